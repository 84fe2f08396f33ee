"""Datatypes, BYTES that are no text, shapes, and outputs unlike the configuration."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.differential.asked import (
    BINARY,
    BOTH,
    FEW,
    GRPC,
    JSON,
    STREAM,
    WAYS,
    Case,
    Request,
    Tensor,
    by,
    doing,
    floats,
    integers,
    texts,
)
from benchmarks.differential.models import Model, config_of

TYPES: Mapping[str, Sequence[Any]] = {
    "BOOL": [True, False, True],
    "INT8": [-128, 0, 127],
    "INT16": [-32768, 0, 32767],
    "INT32": [-(2**31), 0, 2**31 - 1],
    "INT64": [-(2**63), 0, 2**63 - 1],
    "UINT8": [0, 1, 255],
    "UINT16": [0, 1, 65535],
    "UINT32": [0, 1, 2**32 - 1],
    "UINT64": [0, 1, 2**64 - 1],
    "FP16": [0.5, -2.0, 65504.0],
    "FP32": [0.5, -0.0, 3.0e38],
    "FP64": [0.1, -1e300, 5e-324],
    "BYTES": [b"", b"text", "h\u00e9".encode()],
}
NAMES = [(name, name.replace("BYTES", "STRING")) for name in (*TYPES, "BF16")]
SAME = """
    def execute(self, requests):
        return [answer(*(pb_utils.Tensor(each.name().upper(), each.as_numpy()) for each in r.inputs())) for r in requests]
"""
DLPACK = """
    def execute(self, requests):
        return [answer(*(pb_utils.Tensor.from_dlpack("y", each.to_dlpack()) for each in r.inputs())) for r in requests]
"""
LENGTHS = """
    def execute(self, requests):
        found = []
        for r in requests:
            x = pb_utils.get_input_tensor_by_name(r, "x")
            elements = x.as_numpy()
            rows = len(elements) if elements.ndim == 2 else 1
            about = [str(elements.dtype), list(elements.shape), [type(e).__name__ for e in elements.ravel()]]
            found.append(answer(
                pb_utils.Tensor("y", elements),
                pb_utils.Tensor("sizes", np.array([len(e) for e in elements.ravel()], np.int64).reshape(elements.shape)),
                pb_utils.Tensor("about", np.array([json.dumps(about)] * rows, dtype=object).reshape(-1, *[1] * (elements.ndim - 1)))))
        return found
"""
MAKES_TEXT = """
    def initialize(self, args):
        self.made = {
            "bytes": np.array([b"a", b"bc"], dtype=object),
            "str": np.array(["a", "h\\u00e9"], dtype=object),
            "fixed bytes": np.array([b"a", b"bc"]),
            "fixed text": np.array(["a", "h\\u00e9"]),
            "fixed bytes with zeros": np.array([b"a\\0\\0", b"bcd"]),
            "numbers": np.array([1, 2.5], dtype=object),
            "none": np.array([None, "a"], dtype=object),
            "mixed": np.array([b"a", "b", 3], dtype=object),
            "bytearray": np.array([bytearray(b"ab"), bytearray(b"c")], dtype=object),
            "no text": np.array([b"\\xff\\xd8\\0", b"\\x80"], dtype=object),
            "numpy bytes": np.array([np.bytes_(b"ab"), np.str_("cd")], dtype=object),
            "surrogates": np.array([b"\\xed\\xa0\\x80"], dtype=object),
            "matrix": np.array([[b"a", b"b"], [b"c", b"d"]], dtype=object),
            "turned": np.array([[b"a", b"b"], [b"c", b"d"]], dtype=object).T,
            "empty": np.array([], dtype=object),
            "scalar": np.array(b"a", dtype=object),
            "flags": np.array([True, False], dtype=object),
        }

    def execute(self, requests):
        return [answer(pb_utils.Tensor("y", self.made[text(r)])) for r in requests]
"""
MADE_TEXTS = (
    *("bytes", "str", "fixed bytes", "fixed text", "fixed bytes with zeros", "numbers", "none", "mixed", "no text"),
    *("numpy bytes", "surrogates", "matrix", "turned", "empty", "scalar", "flags"),
)
OTHER = """
    def initialize(self, args):
        y, z, s = np.array([1, 2], np.float32), np.array([3], np.int32), np.array([b"s"], dtype=object)
        right = {"y": y, "z": z, "s": s}
        self.made = {
            "right": right,
            "reverse order": {"s": s, "z": z, "y": y},
            "one missing": {"y": y, "s": s},
            "none at all": {},
            "one more": {**right, "more": y},
            "only another": {"more": y},
            "float64 for float32": {**right, "y": y.astype(np.float64)},
            "float16 for float32": {**right, "y": y.astype(np.float16)},
            "int64 for int32": {**right, "z": z.astype(np.int64)},
            "uint8 for int32": {**right, "z": z.astype(np.uint8)},
            "bool for int32": {**right, "z": z.astype(bool)},
            "int32 for float32": {**right, "y": y.astype(np.int32)},
            "text for float32": {**right, "y": s},
            "float32 for text": {**right, "s": y},
            "three for two": {**right, "y": np.zeros(3, np.float32)},
            "two axes for one": {**right, "y": np.zeros((2, 3), np.float32)},
            "scalar for one axis": {**right, "y": np.float32(7) * np.ones((), np.float32)},
            "nothing for two": {**right, "y": np.zeros(0, np.float32)},
            "empty axis": {**right, "y": np.zeros((0, 4), np.float32)},
            "scalar text": {**right, "s": np.array(b"s", dtype=object)},
            "strided": {**right, "y": np.arange(4, dtype=np.float32)[::2]},
            "reversed": {**right, "y": np.arange(2, dtype=np.float32)[::-1]},
            "fortran order": {**right, "y": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))},
            "broadcast": {**right, "y": np.broadcast_to(np.float32(5), (2,))},
            "read only": {**right, "y": np.frombuffer(b"\\0\\0\\x80?\\0\\0\\0@", np.float32)},
            "many elements": {**right, "z": np.arange(100000, dtype=np.int32)},
        }

    def execute(self, requests):
        return [answer(*(pb_utils.Tensor(*pair) for pair in self.made[text(r)].items())) for r in requests]
"""
OTHERS = (
    *("right", "reverse order", "one missing", "none at all", "one more", "only another", "float64 for float32"),
    *("float16 for float32", "int64 for int32", "uint8 for int32", "bool for int32", "int32 for float32"),
    *("text for float32", "float32 for text", "three for two", "two axes for one", "scalar for one axis"),
    *("nothing for two", "empty axis", "scalar text", "strided", "reversed", "fortran order", "broadcast", "read only"),
    "many elements",
)
OTHER_BATCH = """
    def initialize(self, args):
        self.made = {
            "right": np.zeros((2, 3), np.float32),
            "other rows": np.zeros((3, 3), np.float32),
            "no batch": np.zeros(3, np.float32),
            "other width": np.zeros((2, 4), np.float32),
            "one axis more": np.zeros((2, 1, 3), np.float32),
            "int64": np.zeros((2, 3), np.int64),
            "no rows": np.zeros((0, 3), np.float32),
        }

    def execute(self, requests):
        return [answer(pb_utils.Tensor("y", self.made[text(r)])) for r in requests]
"""
RESHAPED = """
    def execute(self, requests):
        found = []
        for r in requests:
            x = pb_utils.get_input_tensor_by_name(r, "x").as_numpy()
            found.append(answer(pb_utils.Tensor("y", x.reshape(-1)), told(json.dumps(list(x.shape)).encode())))
        return found
"""
MODELS = (
    Model(
        "types",
        SAME,
        config_of(
            " ".join(f"{name.lower()}:{kind}:-1?" for name, kind in NAMES if name != "BF16"),
            " ".join(f"{name}:{kind}:-1" for name, kind in NAMES if name != "BF16"),
        ),
    ),
    Model("bf16", DLPACK, config_of("x:BF16:-1", "y:BF16:-1")),
    Model("lengths", LENGTHS, config_of("x:STRING:-1", "y:STRING:-1 sizes:INT64:-1 about:STRING:1")),
    Model("lengths_rows", LENGTHS, config_of("x:STRING:-1", "y:STRING:-1 sizes:INT64:-1 about:STRING:1", batch=4)),
    Model("makes_text", MAKES_TEXT, config_of("do:STRING:1", "y:STRING:-1")),
    Model("other", OTHER, config_of("do:STRING:1", "y:FP32:2 z:INT32:-1 s:STRING:1")),
    Model("other_rows", OTHER_BATCH, config_of("do:STRING:1", "y:FP32:3", batch=4)),
    Model(
        "reshaped",
        RESHAPED.replace("told(", "pb_utils.Tensor('s', np.array([").replace(
            ".encode())", ".encode()], dtype=object))"
        ),
        'backend: "python" max_batch_size: 0 '
        'input { name: "x" data_type: TYPE_FP32 dims: [4] reshape { shape: [2, 2] } } '
        'output { name: "y" data_type: TYPE_FP32 dims: [2, 2] reshape { shape: [4] } } '
        'output { name: "s" data_type: TYPE_STRING dims: [1] }',
    ),
)
JPEG = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00\x01\x02\x00"
BYTES: Mapping[str, Sequence[bytes]] = {
    "a picture": [JPEG],
    "no UTF-8": [b"\x80\xff", b"\xc3", b"ok"],
    "zeros": [b"\0", b"a\0b", b"\0\0"],
    "empty elements": [b"", b"", b""],
    "one empty element": [b""],
    "no elements": [],
    "text": ["h\u00e9 \u4e2d \U0001f600".encode()],
    "long": [b"x" * 70000, b"y"],
}


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for name, elements in TYPES.items():
        tensor = Tensor(name.lower(), name, (3,), elements)
        ways = [way for way in WAYS if name != "FP16" or way not in ("typed",)]
        if name == "FP16":
            ways.remove(JSON)
        yield from by("types", name, Request("types", [tensor]), ways)
        empty = Tensor(name.lower(), name, (0,), [])
        yield from by("types", f"{name} without elements", Request("types", [empty]), (GRPC, BINARY))
    yield from by("types", "BF16", Request("bf16", [Tensor("x", "BF16", (2,), [1.5, -2.0])]), FEW)
    yield from by("types", "FP16 as JSON", Request("types", [Tensor("fp16", "FP16", (1,), [1.5])]), (JSON,))
    special = Tensor("fp32", "FP32", (3,), [float("nan"), float("inf"), float("-inf")])
    yield from by("types", "NaN and infinities", Request("types", [special]), FEW)
    several = [Tensor("int8", "INT8", (1,), [1]), Tensor("bool", "BOOL", (1,), [True]), texts("bytes", "a")]
    yield from by("types", "several", Request("types", several), WAYS)
    for name, elements in BYTES.items():
        is_text = all(each.isascii() or name == "text" for each in elements)
        ways = [way for way in WAYS if way != JSON or is_text]
        for model, shape in (("lengths", (len(elements),)), ("lengths_rows", (1, len(elements)))):
            tensor = Tensor("x", "BYTES", shape, elements)
            yield from by("bytes", f"{name} to {model}", Request(model, [tensor]), ways)
    rows = Tensor("x", "BYTES", (2, 2), [JPEG, b"", b"\xff", b"a"])
    yield from by("bytes", "rows", Request("lengths_rows", [rows]), FEW)
    yield from by("bytes", "only the sizes of a picture", Request("lengths", [texts("x", JPEG)], ["sizes"]), WAYS[:3])
    for name in MADE_TEXTS:
        yield from by("texts made", name, doing("makes_text", name), BOTH if name != "no text" else FEW)
    for name in OTHERS:
        yield from by("outputs", name, doing("other", name), BOTH)
        if name in ("right", "one missing", "one more", "float64 for float32", "two axes for one", "none at all"):
            yield from by("outputs", name, doing("other", name), (STREAM, BINARY))
            yield from by("outputs", f"{name}, y and s asked", doing("other", name, wanted=["y", "s"]), BOTH)
            yield from by("outputs", f"{name}, z asked", doing("other", name, wanted=["z"]), BOTH)
    for name in ("right", "other rows", "no batch", "other width", "one axis more", "int64", "no rows"):
        do = texts("do", name, name, shape=(2, 1))
        yield from by("outputs of rows", name, Request("other_rows", [do]), BOTH)
    yield from by("reshape", "four", Request("reshaped", [floats("x", 1, 2, 3, 4)]), WAYS)
    yield from by("reshape", "two by two", Request("reshaped", [floats("x", 1, 2, 3, 4, shape=(2, 2))]), BOTH)
    for what, tensor in {
        "another type": integers("fp32", 1),
        "an unknown name": floats("nothing", 1),
        "two axes": floats("fp32", 1, 2, shape=(1, 2)),
        "negative size": floats("fp32", 1, shape=(-1,)),
        "fewer elements than the shape": floats("fp32", 1, 2, shape=(3,)),
        "more elements than the shape": floats("fp32", 1, 2, 3, shape=(2,)),
        "no shape": floats("fp32", 1, shape=()),
    }.items():
        yield from by("wrong inputs", what, Request("types", [tensor]), WAYS)
    yield from by("wrong inputs", "the same twice", Request("types", [floats("fp32", 1), floats("fp32", 2)]), BOTH)
    yield from by("wrong inputs", "none at all", Request("types"), BOTH)
    yield from by("wrong inputs", "a required one is missing", Request("lengths"), BOTH)
    yield from by("wrong inputs", "too many rows", Request("lengths_rows", [texts("x", *"abcde", shape=(5, 1))]), BOTH)
    yield from by("wrong inputs", "no rows", Request("lengths_rows", [texts("x", shape=(0, 1))]), BOTH)
    yield from by("wrong inputs", "no batch axis", Request("lengths_rows", [texts("x", "a")]), BOTH)
    yield from by("wrong outputs", "unknown", Request("lengths", [texts("x", "a")], ["nothing"]), WAYS)
    yield from by("wrong outputs", "twice", Request("lengths", [texts("x", "a")], ["y", "y"]), BOTH)
