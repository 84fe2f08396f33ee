"""Attention as today's exporters write it: masks, what rows without keys become, and where heads lie.

Each form becomes one node, which computes what onnxruntime does: by numpy, here.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from gangway.compiler.frontend.graph import Node
from gangway.compiler.frontend.importer import read_graph
from gangway.compiler.frontend.patterns import find_patterns
from gangway.compiler.frontend.simplify import simplify
from tests.compiler.frontend.interpreter import Interpreter
from tests.helpers.onnx_models import save_model

node = helper.make_node
Array = Any
Nodes = list[Any]
S, HEADS, SIZE = 6, 2, 16
C = HEADS * SIZE
LOWEST = float(np.finfo(np.float32).min)
RANDOM = np.random.default_rng(11)


def heads_of(part: str, x: str, weights: str, split: str, heads: str) -> Nodes:
    """Queries, keys or values: a product, cut into heads, which then stand before the positions."""
    return [
        node("MatMul", [x, weights], [f"{part}0"]),
        node("Reshape", [f"{part}0", split], [f"{part}1"]),
        node("Transpose", [f"{part}1"], [heads], perm=[0, 2, 1, 3]),
    ]


def floats(*shape: int) -> Array:
    return RANDOM.standard_normal(shape).astype(np.float32)


def integers(*values: int) -> Array:
    return np.array(values, np.int64)


def number(value: float) -> Array:
    return np.array(value, np.float32)


CONSTANTS: dict[str, Array] = {
    **{f"w{part}": floats(C, C) / 4 for part in "qkv"},
    "wk1": floats(C, SIZE) / 4, "wv1": floats(C, SIZE) / 4, "wvwide": floats(C, 3 * C) / 4,
    "split": integers(0, S, HEADS, SIZE), "split1": integers(0, S, 1, SIZE),
    "splitwide": integers(0, S, HEADS, 3 * SIZE),
    "merge": integers(0, S, C), "mergewide": integers(0, S, 3 * C), "merged heads": integers(-1, S, SIZE),
    "flat turned": integers(-1, S, SIZE), "unflat turned": integers(-1, HEADS, SIZE, S),
    "unflat": integers(-1, HEADS, S, SIZE), "root": number(SIZE**0.5), "inverse": number(SIZE**-0.5),
    "fourth root": number(SIZE**-0.25), "zero": number(0), "never": number(-np.inf), "lowest": number(LOWEST),
    "low": number(-1e9), "minus": number(-10000), "one": number(1), "cap": number(1.5), "inverse cap": number(1 / 1.5),
    "axis1": integers(1), "axis2": integers(2), "last": integers(-1),
    "triangle": np.tril(np.ones((1, 1, S, S), np.bool_)),
    "relative": floats(1, HEADS, S, S), "temperatures": np.abs(floats(HEADS, 1, 1)) + 1,
    "cos": floats(1, 1, S, SIZE), "sin": floats(1, 1, S, SIZE), "begin": integers(0), "half": integers(SIZE // 2),
    "end": integers(SIZE), "axis3": integers(3), "two heads": integers(1, 1, HEADS, 1, 1),
}  # fmt: skip
INPUTS: dict[str, tuple[list[int | str], int]] = {
    "x": (["N", S, C], TensorProto.FLOAT),
    "shown": (["N", 1, S, S], TensorProto.BOOL),
    "keys": (["N", 1, 1, S], TensorProto.INT64),
    "padded": (["N", 1, S, 1], TensorProto.FLOAT),
    "bias": (["N", HEADS, S, S], TensorProto.FLOAT),
    "past k": (["N", 1, 3, SIZE], TensorProto.FLOAT),
    "past v": (["N", 1, 3, SIZE], TensorProto.FLOAT),
}


def heads(part: str, to: str = "", order: tuple[int, ...] = (0, 2, 1, 3)) -> Nodes:
    """One of queries, keys and values, [N, heads, S, size]."""
    return [
        node("MatMul", ["x", f"w{part}"], [f"{part}0"]),
        node("Reshape", [f"{part}0", "split"], [f"{part}1"]),
        node("Transpose", [f"{part}1"], [to or part], perm=order),
    ]


QUERIES, VALUES = heads("q"), heads("v")
PLAIN = [*QUERIES, *heads("k", "kt", (0, 2, 3, 1)), *VALUES]
SCORES = [*PLAIN, node("MatMul", ["q", "kt"], ["s0"]), node("Mul", ["s0", "inverse"], ["s"])]
END = [node("Transpose", ["c"], ["c1"], perm=[0, 2, 1, 3]), node("Reshape", ["c1", "merge"], ["y"])]


def softmax(scores: str = "s", shares: str = "p") -> Nodes:
    return [
        node("Softmax", [scores], ["p"], axis=-1),
        *([node("MatMul", ["p", "v"], ["c"]), *END] if shares == "p" else []),
    ]


def ending(shares: str) -> Nodes:
    return [node("MatMul", [shares, "v"], ["c"]), *END]


def without_nan() -> Nodes:
    """As torch 2.15 writes a softmax that gives 0 where no key is shown."""
    return [
        node("IsNaN", ["p"], ["bad"]),
        node("Where", ["bad", "zero", "p"], ["p1"]),
        *ending("p1"),
    ]


def turned_as_three_axes() -> Nodes:
    """Keys are turned by three axes, and scaled as queries are: torch's exporter since 2.6."""
    return [
        *QUERIES, *heads("k"), *VALUES,
        node("Reshape", ["k", "flat turned"], ["k2"]),
        node("Transpose", ["k2"], ["k3"], perm=[0, 2, 1]),
        node("Reshape", ["k3", "unflat turned"], ["k4"]),
        node("Mul", ["q", "fourth root"], ["q2"]),
        node("Mul", ["k4", "fourth root"], ["k5"]),
        node("MatMul", ["q2", "k5"], ["s"]),
    ]  # fmt: skip


def shown_by_a_number(mask: str = "shown") -> Nodes:
    return [node("Where", [mask, "zero", "never"], ["m"]), node("Add", ["s", "m"], ["t"])]


def all_hidden(source: str, finds: str) -> Nodes:
    """Rows of scores, or of a mask, that are minus infinity as a whole, found in one of several ways."""
    equal = [node("Equal", [source, "never"], ["e"])]
    found = {
        "all": [*equal, node("Cast", ["e"], ["e1"], to=7), node("ReduceMin", ["e1", "last"], ["e2"], keepdims=1),
                node("Cast", ["e2"], ["bad"], to=9)],
        "not any": [*equal, node("Not", ["e"], ["e1"]), node("Cast", ["e1"], ["e2"], to=6),
                    node("ReduceMax", ["e2", "last"], ["e3"], keepdims=1), node("Cast", ["e3"], ["e4"], to=9),
                    node("Not", ["e4"], ["bad"])],
        "largest": [node("ReduceMax", [source, "last"], ["e"], keepdims=1), node("Equal", ["e", "never"], ["bad"])],
        "infinite": [node("IsInf", [source], ["e"], detect_positive=0), node("Cast", ["e"], ["e1"], to=7),
                     node("ReduceMin", ["e1", "last"], ["e2"], keepdims=1), node("Cast", ["e2"], ["bad"], to=9)],
    }[finds]  # fmt: skip
    return [*found, node("Where", ["bad", "zero", "p"], ["p1"]), *ending("p1")]


def shared_keys(repeats: str) -> Nodes:
    """One head of keys and values for all of queries."""
    repeated = {
        "Expand": lambda part: [
            node("Unsqueeze", [part, "axis2"], [f"{part}u"]),
            node("Expand", [f"{part}u", "two heads"], [f"{part}e"]),
            node("Reshape", [f"{part}e", "unflat"], [f"{part}r"]),
        ],
        "Tile": lambda part: [
            node("Unsqueeze", [part, "axis2"], [f"{part}u"]),
            node("Tile", [f"{part}u", "two heads"], [f"{part}e"]),
            node("Reshape", [f"{part}e", "unflat"], [f"{part}r"]),
        ],
        "MatMul": lambda part: [node("Identity", [part], [f"{part}r"])],
    }[repeats]
    made = [item for part in "kv" for item in (*heads_of(part, "x", f"w{part}1", "split1", part), *repeated(part))]
    return [
        *QUERIES, *made,
        node("Transpose", ["kr"], ["kt"], perm=[0, 1, 3, 2]),
        node("MatMul", ["q", "kt"], ["s0"]),
        node("Mul", ["s0", "inverse"], ["s"]),
        node("Softmax", ["s"], ["p"], axis=-1),
        node("MatMul", ["p", "vr"], ["c"]),
        *END,
    ]  # fmt: skip


def after_the_past() -> Nodes:
    """Keys and values of earlier steps, which are inputs, and one head of them for all of queries."""
    made = [
        item
        for part in "kv"
        for item in (
            *heads_of(part, "x", f"w{part}1", "split1", f"{part}2"),
            node("Concat", [f"past {part}", f"{part}2"], [f"present {part}"], axis=2),
        )
    ]
    return [
        *QUERIES, *made,
        node("Transpose", ["present k"], ["kt"], perm=[0, 1, 3, 2]),
        node("MatMul", ["q", "kt"], ["s0"]),
        node("Div", ["s0", "root"], ["s"]),
        node("Softmax", ["s"], ["p"], axis=-1),
        node("MatMul", ["p", "present v"], ["c"]),
        *END,
    ]  # fmt: skip


def turned_by_positions(part: str) -> Nodes:
    """Rotary positions: channels of a head are turned in pairs."""
    return [
        node("Slice", [part, "half", "end", "axis3"], [f"{part}right"]),
        node("Slice", [part, "begin", "half", "axis3"], [f"{part}left"]),
        node("Neg", [f"{part}right"], [f"{part}minus"]),
        node("Concat", [f"{part}minus", f"{part}left"], [f"{part}turned"], axis=3),
        node("Mul", [part, "cos"], [f"{part}cos"]),
        node("Mul", [f"{part}turned", "sin"], [f"{part}sin"]),
        node("Add", [f"{part}cos", f"{part}sin"], [f"{part}r"]),
    ]


def windows(*after: Any) -> Nodes:
    """Windows in front of the positions, as of Swin: positions of each head, and which pixels a window shows."""
    made = [item for part in "qkv" for item in heads_of(part, "windows", f"w{part}", "split windows", part)]
    return [
        node("Reshape", ["wide", "in windows"], ["windows"]),
        *made,
        node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]),
        node("Mul", ["q", "inverse"], ["q2"]),
        node("MatMul", ["q2", "kt"], ["s"]),
        *after,
        node("MatMul", ["p", "v"], ["c"]),
        node("Transpose", ["c"], ["c1"], perm=[0, 2, 1, 3]),
        node("Reshape", ["c1", "out of windows"], ["y"]),
    ]


def on_an_image(*product: Any) -> Nodes:
    """As detectors have it: queries, keys and values of a head are channels beside each other, pixels are positions."""
    return [
        node("Conv", ["image", "qkv"], ["joint"]),
        node("Reshape", ["joint", "joint heads"], ["flat joint"]),
        node("Split", ["flat joint", "of a head"], ["q", "k", "v"], axis=2),
        node("Transpose", ["q"], ["qt"], perm=[0, 1, 3, 2]),
        node("MatMul", ["qt", "k"], ["s0"]),
        node("Mul", ["s0", "inverse"], ["s"]),
        node("Softmax", ["s"], ["p"], axis=-1),
        *product,
        node("Reshape", ["c", "as an image"], ["y0"]),
        node("Conv", ["y0", "window"], ["y"], pads=[1, 1, 1, 1]),
    ]


FORMS: dict[str, Nodes] = {
    "channels first": on_an_image(
        node("Transpose", ["p"], ["pt"], perm=[0, 1, 3, 2]), node("MatMul", ["v", "pt"], ["c"])
    ),
    "areas of pixels": [
        node("Conv", ["image", "qkv"], ["joint"]), node("Reshape", ["joint", "pixels"], ["j0"]),
        node("Transpose", ["j0"], ["j1"], perm=[0, 2, 1]), node("Reshape", ["j1", "areas"], ["j2"]),
        node("Transpose", ["j2"], ["j3"], perm=[0, 2, 3, 1]),
        node("Split", ["j3", "of a head"], ["q", "k", "v"], axis=2),
        node("Transpose", ["q"], ["qt"], perm=[0, 1, 3, 2]), node("MatMul", ["qt", "k"], ["s0"]),
        node("Mul", ["s0", "inverse"], ["s"]), node("Softmax", ["s"], ["p"], axis=-1),
        node("Transpose", ["p"], ["pt"], perm=[0, 1, 3, 2]), node("MatMul", ["v", "pt"], ["c"]),
        node("Transpose", ["c"], ["c1"], perm=[0, 3, 1, 2]), node("Reshape", ["c1", "rows of pixels"], ["c2"]),
        node("Transpose", ["c2"], ["c3"], perm=[0, 3, 1, 2]), node("Conv", ["c3", "window"], ["y"], pads=[1, 1, 1, 1]),
    ],
    "channels first, turned twice": on_an_image(
        node("Transpose", ["v"], ["vt"], perm=[0, 1, 3, 2]), node("MatMul", ["p", "vt"], ["ct"]),
        node("Transpose", ["ct"], ["c"], perm=[0, 1, 3, 2]),
    ),
    "windows": windows(node("Add", ["s", "relative"], ["t"]), node("Softmax", ["t"], ["p"])),
    "windows that show a part": windows(
        node("Add", ["s", "relative"], ["t"]), node("Reshape", ["t", "five"], ["u"]),
        node("Add", ["u", "of windows"], ["v5"]), node("Reshape", ["v5", "four"], ["w4"]),
        node("Softmax", ["w4"], ["p"]),
    ),
    "windows that show a part, for each head": windows(
        node("Reshape", ["s", "five"], ["u"]), node("Add", ["u", "of windows and heads"], ["v5"]),
        node("Softmax", ["v5"], ["p5"]), node("Reshape", ["p5", "four"], ["p"]),
    ),
    "torch: keys by three axes, both scaled": [*turned_as_three_axes(), *softmax()],
    "torch: mask of truth values, 0 for NaN": [
        *turned_as_three_axes(), *shown_by_a_number(), node("Softmax", ["t"], ["p"], axis=-1), *without_nan(),
    ],
    "0 for NaN, by a negation": [
        *SCORES, *shown_by_a_number(), node("Softmax", ["t"], ["p"], axis=-1), node("IsNaN", ["p"], ["bad"]),
        node("Not", ["bad"], ["good"]), node("Where", ["good", "p", "zero"], ["p1"]), *ending("p1"),
    ],
    "0 for what is not itself": [
        *SCORES, *shown_by_a_number(), node("Softmax", ["t"], ["p"], axis=-1), node("Equal", ["p", "p"], ["good"]),
        node("Where", ["good", "p", "zero"], ["p1"]), *ending("p1"),
    ],
    **{
        f"0 where all scores are hidden: {finds}": [
            *SCORES, *shown_by_a_number(), node("Softmax", ["t"], ["p"], axis=-1), *all_hidden("t", finds),
        ]
        for finds in ("all", "not any", "largest", "infinite")
    },
    "0 where a mask hides all": [
        *SCORES, *shown_by_a_number(), node("Softmax", ["t"], ["p"], axis=-1), *all_hidden("m", "largest"),
    ],
    **{
        f"hidden by {value}": [*SCORES, node("Where", ["shown", "s", value], ["t"]), *softmax("t")]
        for value in ("never", "lowest", "low")
    },
    "hidden by a negation, and 0 behind the softmax": [
        *SCORES, node("Not", ["shown"], ["hidden"]), node("Where", ["hidden", "lowest", "s"], ["t"]),
        node("Softmax", ["t"], ["p"], axis=-1), node("Where", ["hidden", "zero", "p"], ["p1"]), *ending("p1"),
    ],
    "hidden before the scale": [
        *PLAIN, node("MatMul", ["q", "kt"], ["s"]), node("Where", ["shown", "s", "lowest"], ["t"]),
        node("Div", ["t", "root"], ["u"]), *softmax("u"),
    ],
    "both kinds of mask by And, 0 for NaN": [
        *SCORES, node("Cast", ["keys"], ["k8"], to=9), node("And", ["k8", "triangle"], ["both"]),
        node("And", ["both", "shown"], ["three"]), *shown_by_a_number("three"),
        node("Softmax", ["t"], ["p"], axis=-1), *without_nan(),
    ],
    "padding as a number less than 0": [
        *SCORES, node("Cast", ["keys"], ["k8"], to=1), node("Sub", ["one", "k8"], ["k9"]),
        node("Mul", ["k9", "minus"], ["m"]), node("Add", ["s", "m"], ["t"]), *softmax("t"),
    ],
    "a mask that is taken away": [
        *SCORES, node("Cast", ["keys"], ["k8"], to=1), node("Sub", ["s", "k8"], ["t"]), *softmax("t"),
    ],
    "queries that see nothing": [*SCORES, node("Add", ["s", "padded"], ["t"]), *softmax("t")],
    "positions and a mask": [
        *PLAIN, node("MatMul", ["q", "kt"], ["s"]), node("Cast", ["keys"], ["k8"], to=9),
        node("Where", ["k8", "zero", "lowest"], ["m"]), node("Add", ["relative", "m"], ["b"]),
        node("Add", ["s", "b"], ["t"]), *softmax("t"),
    ],
    "three kinds of what is added": [
        *SCORES, node("Add", ["s", "bias"], ["t"]), node("Add", ["t", "relative"], ["u"]),
        node("Where", ["shown", "u", "lowest"], ["v0w"]), *softmax("v0w"),
    ],
    "a cap of the scores": [
        *PLAIN, node("MatMul", ["q", "kt"], ["s0"]), node("Mul", ["s0", "inverse cap"], ["s1"]),
        node("Tanh", ["s1"], ["s2"]), node("Mul", ["s2", "cap"], ["s"]), node("Add", ["s", "bias"], ["t"]),
        *softmax("t"),
    ],
    "a temperature of each head": [
        *PLAIN, node("MatMul", ["q", "kt"], ["s0"]), node("Mul", ["s0", "temperatures"], ["s"]),
        node("Add", ["s", "relative"], ["t"]), *softmax("t"),
    ],
    "queries and keys with rotary positions": [
        *QUERIES, *heads("k"), *VALUES, *turned_by_positions("q"), *turned_by_positions("k"),
        node("Transpose", ["kr"], ["kt"], perm=[0, 1, 3, 2]), node("MatMul", ["qr", "kt"], ["s0"]),
        node("Mul", ["s0", "inverse"], ["s"]), *softmax(),
    ],
    **{f"one head of keys, by {repeats}": shared_keys(repeats) for repeats in ("Expand", "Tile", "MatMul")},
    "keys of earlier steps": after_the_past(),
    "values of another size": [
        *SCORES[:-5], *SCORES[-2:], node("MatMul", ["x", "wvwide"], ["v0"]), node("Reshape", ["v0",
        "splitwide"], ["v1"]),
        node("Transpose", ["v1"], ["v"], perm=[0, 2, 1, 3]), node("Softmax", ["s"], ["p"]), node("MatMul", ["p",
        "v"], ["c"]),
        node("Transpose", ["c"], ["c1"], perm=[0, 2, 1, 3]), node("Reshape", ["c1", "mergewide"], ["y"]),
    ],
    "heads that stay apart": [*SCORES, node("Softmax", ["s"], ["p"]), node("MatMul", ["p", "v"], ["y"])],
    "heads in the batch behind the softmax": [
        *SCORES, node("Softmax", ["s"], ["p"]), node("Reshape", ["p", "sixes"], ["p1"]),
        node("Reshape", ["v", "merged heads"], ["v9"]), node("MatMul", ["p1", "v9"], ["c0"]),
        node("Reshape", ["c0", "unflat"], ["c"]), *END,
    ],
}  # fmt: skip
WINDOWS, AREAS = 4, 3
CONSTANTS |= {
    "sixes": integers(-1, S, S), "in windows": integers(-1, S, C), "split windows": integers(-1, S, HEADS, SIZE),
    "out of windows": integers(-1, WINDOWS * S, C), "five": integers(-1, WINDOWS, HEADS, S, S),
    "four": integers(-1, HEADS, S, S), "of windows": floats(1, WINDOWS, 1, S, S),
    "of windows and heads": floats(1, WINDOWS, HEADS, S, S),
}  # fmt: skip
CONSTANTS |= {
    "qkv": floats(HEADS * 4 * SIZE, 3, 1, 1), "joint heads": integers(-1, HEADS, 4 * SIZE, 12),
    "pixels": integers(-1, HEADS * 4 * SIZE, 12), "areas": integers(-1, 12 // AREAS, HEADS, 4 * SIZE),
    "rows of pixels": integers(-1, 3, 4, 2 * C),
    "of a head": integers(SIZE, SIZE, 2 * SIZE), "as an image": integers(-1, 2 * C, 3, 4),
    "window": floats(5, 2 * C, 3, 3) / 8,
}  # fmt: skip
INPUTS["image"] = (["N", 3, 3, 4], TensorProto.FLOAT)
INPUTS["wide"] = (["N", WINDOWS * S, C], TensorProto.FLOAT)


def feeds_of(inputs: dict[str, Any]) -> dict[str, Array]:
    """Query 2 sees no key, and the last key is hidden."""
    feeds: dict[str, Array] = {}
    for name, (dims, kind) in inputs.items():
        shape = [1 if n == "N" else int(n) for n in dims]
        if kind == TensorProto.FLOAT:
            feeds[name] = floats(*shape)
            continue
        feeds[name] = np.ones(shape, helper.tensor_dtype_to_np_dtype(kind))
        feeds[name][..., -1] = 0
        if name == "shown":
            feeds[name][..., 2, :] = 0
            feeds[name][..., 1, 3] = 0
    if "padded" in feeds:
        feeds["padded"][..., 2, :] = -np.inf
    return feeds


def rewritten(path: Path, nodes: Nodes, outputs: tuple[str, ...] = ("y",)) -> list[Node]:
    """Return the attention nodes of the rewritten graph, which computes what onnxruntime does."""
    used = {name for item in nodes for name in item.input}
    inputs = {name: given for name, given in INPUTS.items() if name in used}
    kinds = {name: (kind, dims) for name, (dims, kind) in inputs.items()}, dict.fromkeys(outputs, ...)
    constants = {name: value for name, value in CONSTANTS.items() if name in used}
    save_model(path, nodes, *kinds, constants, opset=20, ir_version=10)
    feeds = feeds_of(inputs)
    expected = onnxruntime.InferenceSession(str(path)).run(None, feeds)
    found = find_patterns(simplify(read_graph(path)))
    for answer, value in zip(Interpreter(found).run(feeds), expected, strict=True):
        np.testing.assert_allclose(answer.reshape(value.shape), value, rtol=1e-4, atol=1e-5)
    return [item for item in found.nodes if item.operator == "FusedAttention"]


@pytest.mark.parametrize("form", FORMS)
def test_form(tmp_path: Path, form: str) -> None:
    (found,) = rewritten(tmp_path / "model.onnx", FORMS[form])
    spec = found.attributes["spec"]
    expected = "zero and nan" if "0 for" in form else "zero" if "0 " in form else "nan"
    assert spec.empty_rows == expected
    assert spec.windows == (WINDOWS if "windows" in form else AREAS if "areas" in form else 1)
    assert spec.sharing == (HEADS if "one head" in form or "earlier" in form else 1)
    assert len(spec.biases) <= 2


def _renamed(item: Any) -> Any:
    """The same node of another layer."""
    copy = onnx.NodeProto()
    copy.CopyFrom(item)
    copy.input[:] = [name if name in INPUTS or name in CONSTANTS else f"{name}2" for name in item.input]
    copy.output[:] = [f"{name}2" for name in item.output]
    return copy


def test_two_layers_share_a_mask(tmp_path: Path) -> None:
    first = [*SCORES, node("Where", ["shown", "s", "lowest"], ["t"]), *softmax("t")]
    second = [_renamed(item) for item in first]
    found = rewritten(tmp_path / "model.onnx", [*second, *first], ("y", "y2"))
    assert len(found) == 2
    assert len({item.inputs[3] for item in found}) == 1


WRONG: dict[str, Nodes] = {
    "shares of one key": [
        *SCORES, node("Softmax", ["s"], ["p"]), node("Greater", ["p", "inverse"], ["big"]),
        node("Where", ["big", "zero", "p"], ["p1"]), *ending("p1"),
    ],
    "another mask": [
        *SCORES, *shown_by_a_number(), node("Softmax", ["t"], ["p"]), node("Where", ["triangle", "p", "zero"], ["p1"]),
        *ending("p1"),
    ],
    "rows with an infinite score": [
        *SCORES, *shown_by_a_number(), node("Softmax", ["t"], ["p"]), node("ReduceMin", ["t",
        "last"], ["e"], keepdims=1),
        node("Equal", ["e", "never"], ["bad"]), node("Where", ["bad", "zero", "p"], ["p1"]), *ending("p1"),
    ],
    "another number than 0": [
        *SCORES, *shown_by_a_number(), node("Softmax", ["t"], ["p"]), node("IsNaN", ["p"], ["bad"]),
        node("Where", ["bad", "one", "p"], ["p1"]), *ending("p1"),
    ],
    "a bias below the cap": [
        *SCORES, node("Add", ["s", "bias"], ["s1"]), node("Tanh", ["s1"], ["t"]), *softmax("t"),
    ],
    "shares that are an output": [*SCORES, node("Softmax", ["s"], ["p"]), *ending("p")],
}  # fmt: skip


@pytest.mark.parametrize("form", WRONG)
def test_what_is_something_else_stays(tmp_path: Path, form: str) -> None:
    outputs = ("y", "p") if "output" in form else ("y",)
    assert not rewritten(tmp_path / "model.onnx", WRONG[form], outputs)
