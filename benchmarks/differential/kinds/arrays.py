"""Arrays that models make tensors of: by DLPack, of texts in every form, without elements, in batches and streams."""

from collections.abc import Iterator, Sequence

from benchmarks.differential.asked import (
    BOTH,
    FEW,
    GRPC,
    JSON,
    STREAM,
    Case,
    Infer,
    Request,
    Tensor,
    Together,
    by,
    doing,
    floats,
    generate,
    texts,
)
from benchmarks.differential.kinds.streams import DECOUPLED, FINAL
from benchmarks.differential.models import Model, config_of, lambdas, telling

DLPACKED = {
    "a slice": "np.arange(6, dtype=np.float32)[::2]",
    "a reversed one": "np.arange(6, dtype=np.float32)[::-1]",
    "a turned one": "np.arange(6, dtype=np.float32).reshape(2, 3).T",
    "Fortran order": "np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))",
    "a column": "np.arange(6, dtype=np.float32).reshape(2, 3)[:, 1]",
    "a row": "np.arange(6, dtype=np.float32).reshape(2, 3)[1]",
    "a scalar": "np.array(1.5, np.float32)",
    "one axis of size 1": "np.arange(3, dtype=np.float32).reshape(3, 1, 1)",
    "int8": "np.arange(3, dtype=np.int8)",
    "uint64": "np.arange(3, dtype=np.uint64)",
    "float16": "np.arange(3, dtype=np.float16)",
    "float64": "np.arange(3, dtype=np.float64)",
}
SNIPPETS = {
    **{
        f"from {name}": f"shown(pb_utils.Tensor.from_dlpack('t', pb_utils.Tensor('s', {code}).to_dlpack()))"
        for name, code in DLPACKED.items()
    },
    "to_dlpack shares": "(lambda a: [np.from_dlpack(pb_utils.Tensor('t', a)), a.fill(5)][0].tolist())(np.zeros(2, np.float32))",
    "to_dlpack of texts": "pb_utils.Tensor('t', np.array(['a'], dtype=object)).to_dlpack() is None",
    "to_dlpack of flags": "np.from_dlpack(pb_utils.Tensor('t', np.array([True, False]))).tolist()",
    "to_dlpack of a slice": "np.from_dlpack(pb_utils.Tensor('t', np.arange(6)[::2])).tolist()",
    "input to_dlpack": "str(type(r.inputs()[1].to_dlpack()).__name__)",
    "input by numpy": "np.from_dlpack(r.inputs()[1]).tolist()",
    "input is its own": "(lambda a: [a.fill(7), r.inputs()[1].as_numpy().tolist()][1])(r.inputs()[1].as_numpy())",
    "capsule's name": "repr(pb_utils.Tensor('t', np.arange(3)).to_dlpack()).split()[2]",
    "tensor of a scalar": "shown(pb_utils.Tensor('t', np.array(3, np.int32)))",
    "tensor of float128": "shown(pb_utils.Tensor('t', np.zeros(2, np.longdouble)))",
    "tensor of a structure": "shown(pb_utils.Tensor('t', np.zeros(2, [('a', 'i4')])))",
    "tensor of times": "shown(pb_utils.Tensor('t', np.zeros(2, 'timedelta64[s]')))",
    "tensor of void": "shown(pb_utils.Tensor('t', np.zeros(2, 'V4')))",
    "tensor of intc": "shown(pb_utils.Tensor('t', np.zeros(2, np.intc)))",
    "tensor of longlong": "shown(pb_utils.Tensor('t', np.zeros(2, np.longlong)))",
    "tensor of int": "shown(pb_utils.Tensor('t', np.array([1, 2])))",
    "tensor of float": "shown(pb_utils.Tensor('t', np.array([1.0, 2])))",
    "tensor of flags": "shown(pb_utils.Tensor('t', np.array([1, 2]) > 1))",
    "tensor of a record": "shown(pb_utils.Tensor('t', np.rec.array([(1,)], dtype=[('a', 'i4')]).a))",
    "tensor of a memory map": "shown(pb_utils.Tensor('t', np.memmap(__import__('tempfile').TemporaryFile(), np.int32, 'w+', shape=(2,))))",
    "tensor of characters": "shown(pb_utils.Tensor('t', np.char.array([b'a', b'bc'])))",
    "tensor of many axes": "shown(pb_utils.Tensor('t', np.zeros((1,) * 20, np.float32)))[:2]",
    "tensor of texts in two axes": "shown(pb_utils.Tensor('t', np.array([['a', 'b']], dtype=object)))[:2]",
    "texts stay as they are": "[type(e).__name__ for e in pb_utils.Tensor('t', np.array(['a', b'b', 3], dtype=object)).as_numpy()]",
}
TRIES = telling(SNIPPETS)
SHOWN = """
def shown(tensor):
    array = tensor.as_numpy()
    return [array.dtype.name, list(array.shape), array.ravel().tolist()]


"""
TEXTS = {
    "no elements": "np.empty((0, 2), dtype=object)",
    "no axis": "np.array('text', dtype=object)",
    "no axis, fixed": "np.array(b'text')",
    "no axis, characters": "np.array('text')",
    "three axes": "np.array([[['a', 'b'], ['c', 'd']]], dtype=object)",
    "a slice": "np.array([b'a', b'b', b'c', b'd'], dtype=object)[::2]",
    "reversed": "np.array([b'a', b'b', b'c'], dtype=object)[::-1]",
    "broadcast": "np.broadcast_to(np.array(b'a', dtype=object), (2, 2))",
    "fixed in two axes": "np.array([['a', 'bc'], ['d', 'efg']])",
    "fixed, turned": "np.array([['a', 'bc'], ['d', 'efg']]).T",
    "fixed of no size": "np.array([b'', b''])",
    "numpy numbers": "np.array([np.float32(1.5), np.int64(2)], dtype=object)",
    "a list": "np.array([[1, 2], None], dtype=object)",
    "a dictionary": "np.array([{'a': 1}], dtype=object)",
    "JSON": "np.array([json.dumps({'a': 'h\\u00e9'})], dtype=object)",
    "JSON as characters": "np.array([json.dumps({'a': 'h\\u00e9'})])",
    "empty ones": "np.array([b'', '', b''], dtype=object)",
    "zeros": "np.array([b'\\0', b'a\\0'], dtype=object)",
    "zeros in texts": "np.array(['\\0', 'a\\0b'], dtype=object)",
    "characters beyond 16 bits": "np.array(['\\U0001f600'])",
    "a joined alphabet": "np.array([bytes(range(128))], dtype=object)",
    "a path": "np.array([__import__('pathlib').Path('/a/b')], dtype=object)",
    "a class of text": "np.array([type('Own', (str,), {})('own')], dtype=object)",
    "a class of bytes": "np.array([type('Own', (bytes,), {})(b'own')], dtype=object)",
    "an enumeration": "np.array([__import__('enum').Enum('Colour', 'RED').RED], dtype=object)",
    "many": "np.array([str(n) for n in range(5000)], dtype=object)",
    "large": "np.array([b'x' * 300000], dtype=object)",
}
MADE = f"""
    def made(self, r):
        return {{{", ".join(f"{name!r}: lambda: {code}" for name, code in TEXTS.items())}}}[text(r)]()

"""
GIVES = (
    MADE
    + """
    def execute(self, requests):
        return [answer(pb_utils.Tensor("y", self.made(r))) for r in requests]
"""
)
GIVES_STREAMS = (
    MADE
    + f"""
    def execute(self, requests):
        for r in requests:
            sender = r.get_response_sender()
            sender.send(answer(pb_utils.Tensor("y", self.made(r))))
            sender.send({FINAL})
"""
)
ASKS_GIVES = """
    def execute(self, requests):
        found = []
        for r in requests:
            inner = pb_utils.InferenceRequest(model_name="gives", requested_output_names=["y"], inputs=r.inputs()).exec()
            found.append(answer(error=inner.error()) if inner.has_error() else answer(*inner.output_tensors()))
        return found
"""
NUMBERS = {
    "no axis": "np.array(1.5, np.float32)",
    "NaN": "np.array([np.nan, 1], np.float32)",
    "infinities": "np.array([np.inf, -np.inf], np.float32)",
    "no elements": "np.zeros((0,), np.float32)",
    "no elements in two axes": "np.zeros((3, 0), np.float32)",
    "small": "np.array([1e-45, 1e-10, 0.1], np.float32)",
    "large": "np.array([1e30, 16777217, 123456789], np.float32)",
    "float64": "np.array([0.1, 1e300, 5e-324])",
    "uint64": "np.array([2**64 - 1], np.uint64)",
    "int8": "np.array([-128, 127], np.int8)",
    "flags": "np.array([True, False])",
    "float16": "np.array([0.5, 65504], np.float16)",
    "big endian": "np.array([1, 2], '>f4')",
    "of more axes": "np.ones((2, 1, 2), np.float32)",
}
COUNTS_OUT = f"""
    def execute(self, requests):
        found = []
        for r in requests:
            made = {lambdas(NUMBERS)}
            found.append(answer(pb_utils.Tensor("y", made[text(r)]())))
        return found
"""
RAGGED_TEXTS = """
    def execute(self, requests):
        found = []
        for r in requests:
            x = pb_utils.get_input_tensor_by_name(r, "x").as_numpy()
            sizes = [len(e) for e in x.ravel()]
            seen = np.array([[json.dumps([len(requests), list(x.shape), sizes])]], dtype=object)
            found.append(answer(pb_utils.Tensor("seen", seen), pb_utils.Tensor("y", x)))
        return found
"""
IN, OUT = "do:STRING:1", "y:STRING:-1"
RAGGED = (
    'backend: "python" max_batch_size: 4 input { name: "x" data_type: TYPE_STRING dims: [-1] allow_ragged_batch: true } '
    'output { name: "y" data_type: TYPE_STRING dims: [-1] } output { name: "seen" data_type: TYPE_STRING dims: [1] } '
    "dynamic_batching { max_queue_delay_microseconds: 300000 preferred_batch_size: [4] }"
)
MODELS = (
    Model("tries", TRIES, config_of("do:STRING:1 x:FP32:-1", "y:STRING:1"), head=Model("").head + SHOWN),
    Model("gives", GIVES, config_of(IN, OUT)),
    Model("gives_streams", GIVES_STREAMS, config_of(IN, OUT, more=DECOUPLED)),
    Model("asks_gives", ASKS_GIVES, config_of(IN, OUT)),
    Model("gives_numbers", COUNTS_OUT, config_of(IN, "y:FP32:-1")),
    Model("ragged_texts", RAGGED_TEXTS, RAGGED),
)
JPEG = b"\xff\xd8\xff\xe0\0"


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for name in SNIPPETS:
        yield from by("arrays", name, Request("tries", [texts("do", name), floats("x", 1, 2)]), (GRPC,))
    for name in TEXTS:
        yield from by("texts given", name, doing("gives", name), FEW if "large" in name else (*BOTH, "binary"))
        yield from by("texts given", f"{name}, on a stream", doing("gives_streams", name), (STREAM,))
        yield from by("texts given", f"{name}, asked by a model", doing("asks_gives", name), (GRPC,))
        if name not in ("large", "many"):
            yield from generate("generate", f"texts given: {name}", "gives", {"do": name})
    for name in NUMBERS:
        yield from by("numbers given", name, doing("gives_numbers", name), (*BOTH, "binary"))
        yield from generate("generate", f"numbers given: {name}", "gives_numbers", {"do": name})
    rows: Sequence[Sequence[bytes]] = ([JPEG], [b"", b"\xff"], [], [b"a", b"bc", b"def"])
    requests = [Request("ragged_texts", [Tensor("x", "BYTES", (1, len(row)), row)]) for row in rows]
    yield Case("ragged: texts", [Together(requests)])
    yield Case("ragged: texts, one", [Infer(requests[1], GRPC), Infer(requests[3], JSON)])
