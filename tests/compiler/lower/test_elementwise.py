"""Elementwise operators of any type, broadcast, alone and in chains, against ONNX's reference implementation."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import helper

from tests.helpers.sampled import sampled

node = helper.make_node
FLOATS = ["float16", "float32", "float64"]
SIGNED, UNSIGNED = ["int8", "int16", "int32", "int64"], ["uint8", "uint16", "uint32", "uint64"]
Run = Callable[..., list[str]]


def numbers(dtype: str, shape: tuple[int, ...] = (3, 37), seed: int = 0) -> Any:
    random = np.random.default_rng(seed)
    if dtype == "bool":
        return random.integers(0, 2, shape).astype(bool)
    if dtype in FLOATS:
        values = (random.standard_normal(shape) * 3).astype(dtype)
        values.reshape(-1)[:4] = [0, np.inf, -np.inf, np.nan]
        return values
    return random.integers(max(-9, np.iinfo(dtype).min), 10, shape).astype(dtype)


@pytest.mark.parametrize("dtype", sampled(["float16", "float32", "float64"], ["float32"]))
def test_float_functions(same: Run, dtype: str) -> None:
    names = "Neg Abs Sign Floor Ceil Round Sqrt Exp Log Reciprocal Sin Cos Tan Asin Acos Atan Sinh Cosh Tanh Asinh"
    names += " Acosh Atanh Erf Sigmoid Relu LeakyRelu Softplus Elu Mish Gelu Selu Softsign"
    nodes = [node(name, ["x"], [name]) for name in names.split()]
    x = numbers(dtype)
    same(nodes, {"x": np.where(np.isinf(x), 0.5, x).astype(dtype)})


@pytest.mark.parametrize("dtype", sampled(["int8", "int32", "int64", "uint8", "uint64"], ["int8", "int64", "uint64"]))
def test_integers(same: Run, dtype: str) -> None:
    names = "Add Sub Mul BitwiseAnd BitwiseOr BitwiseXor Equal Less GreaterOrEqual"
    nodes = [node(name, ["x", "y"], [name]) for name in names.split()]
    nodes += [node(name, ["x", "z"], [name]) for name in ("Div", "Mod")]
    nodes += [node("Abs", ["x"], ["Abs"]), node("BitwiseNot", ["x"], ["BitwiseNot"])]
    if dtype == "int32":
        nodes += [node("Pow", ["s", "t"], ["Pow"])]
    nodes += [node(name, ["x", "y", "z"], [name]) for name in ("Min", "Max")]
    nodes += [node("Clip", ["x", "two", "four"], ["Clip"])]
    if dtype in UNSIGNED:
        nodes += [node("BitShift", ["x", "four"], ["right"], direction="RIGHT")]
    x, y = numbers(dtype), numbers(dtype, (37,), 1)
    z = np.where(y == 0, 1, y).astype(dtype)
    x, y = np.maximum(x, y), np.minimum(y, x).astype(dtype)[0]
    feeds = {"x": x, "y": y, "z": z}
    if dtype == "int32":
        feeds |= {"s": x % 5 - 2, "t": np.abs(y) % 4}
    same(nodes, feeds, {"two": np.array(2, dtype), "four": np.array(4, dtype)})


def test_division_that_processors_trap_on_does_no_harm(same: Run) -> None:
    x, y = np.array([7, np.iinfo(np.int32).min, -7, 5], np.int32), np.array([0, -1, 2, -1], np.int32)
    same([node("Div", ["x", "y"], ["q"])], {"x": x, "y": y})


@pytest.mark.parametrize(
    "source",
    sampled(["bool", *FLOATS, "int8", "int64", "uint8", "uint32"], ["bool", "float16", "int64"]),
)
def test_casts(same: Run, source: str) -> None:
    x = numbers(source)
    x = (
        np.where(np.isfinite(x), np.abs(x), 0).astype(source)
        if source in FLOATS
        else np.abs(x.astype("i8")).astype(source)
    )
    kinds = ["bool", *FLOATS, *SIGNED, *UNSIGNED]
    codes = {name: helper.np_dtype_to_tensor_dtype(np.dtype(name)) for name in kinds}
    if source in ("float32", "float64"):
        del codes["uint32"]  # is onnxruntime's alone
    same([node("Cast", ["x"], [name], to=code) for name, code in codes.items()], {"x": x}, tolerance=0)


def test_truth_values(same: Run) -> None:
    nodes = [node(name, ["a", "b"], [name]) for name in ("And", "Or", "Xor")]
    nodes += [node("Equal", ["a", "b"], ["same"]), node("Not", ["a"], ["not"]), node("Where", ["a", "x", "y"], ["w"])]
    nodes += [node("Less", ["x", "y"], ["less"]), node("Not", ["less"], ["not_less"]), node("IsNaN", ["x"], ["nan"])]
    nodes += [node("IsInf", ["x"], ["inf"]), node("IsInf", ["x"], ["up"], detect_negative=0)]
    nodes += [
        node("Max", ["x", "y"], ["max"]),
        node("Min", ["y", "x"], ["min"]),
        node("Mod", ["x", "y"], ["m"], fmod=1),
    ]
    x, y = numbers("float32"), np.roll(numbers("float32", seed=3), 2)
    same(nodes, {"a": numbers("bool"), "b": numbers("bool", (3, 1), 1), "x": x, "y": y})


def test_broadcasting(same: Run) -> None:
    """Operands of any rank, from either side, with axes that merge and axes that do not."""
    shapes: dict[str, tuple[int, ...]] = {
        "a": (5, 1, 7, 3),
        "b": (4, 1, 3),
        "c": (7, 1),
        "d": (1,),
        "e": (),
        "f": (5, 4, 7, 3),
        "g": (4, 7, 40),
    }
    random = np.random.default_rng(0)
    feeds = {name: random.uniform(1, 2, shape).astype(np.float32) for name, shape in shapes.items()}
    pairs = ["ab", "ac", "cb", "da", "ef", "fa", "bf", "ff", "gc", "cg", "ce", "ed"]
    nodes = [node("Sub", list(pair), [f"r{pair}"]) for pair in pairs]
    nodes += [node("Sum", ["a", "b", "c", "d"], ["sum"]), node("Mean", ["f", "b", "c"], ["mean"])]
    nodes += [node("Mul", ["g", "row"], ["h"]), node("Div", ["g", "column"], ["i"])]
    constants = {"row": np.arange(40, dtype=np.float32), "column": np.arange(1, 8, dtype=np.float32).reshape(7, 1)}
    same(nodes, feeds, constants)


def test_chains_are_one_kernel(same: Run) -> None:
    """GELU as exporters write it, a mask, and a reader of something in between."""
    nodes = [
        node("Div", ["x", "root"], ["a"]),
        node("Erf", ["a"], ["b"]),
        node("Add", ["b", "one"], ["c"]),
        node("Mul", ["x", "c"], ["d"]),
        node("Mul", ["d", "half"], ["gelu"]),
        node("Cast", ["m"], ["e"], to=1),
        node("Unsqueeze", ["e", "zero"], ["f"]),
        node("Sub", ["one", "f"], ["g"]),
        node("Mul", ["g", "least"], ["mask"]),
        node("Exp", ["y"], ["h"]),
        node("Neg", ["h"], ["i"]),
        node("Sqrt", ["h"], ["j"]),
        node("Add", ["i", "j"], ["k"]),
        node("ReduceSum", ["h"], ["l"], keepdims=0),
        node("Mul", ["k", "y"], ["m1"]),
        node("Reshape", ["m1", "flat"], ["n"]),
        node("Add", ["n", "n"], ["o"]),
    ]
    constants = {
        **{
            name: np.array(value, np.float32)
            for name, value in {"root": 1.4142, "one": 1, "half": 0.5, "least": -1e4}.items()
        },
        "zero": np.zeros(1, np.int64),
        "flat": np.array([-1], np.int64),
    }
    random = np.random.default_rng(0)
    x, y = (random.standard_normal((5, 41)).astype(np.float32) for _ in range(2))
    operators = same(nodes, {"x": x, "y": y, "m": numbers("int64", (3, 7))}, constants, tolerance=1e-5)
    assert sorted(operators) == ["Cast+Sub+Mul", "Div+Erf+Add+Mul+Mul", "Exp", "ReduceSum", "Sqrt+Neg+Add+Mul+Add"]


@pytest.mark.parametrize("shape", [(6,), (2, 3), (1, 3, 2, 1), (1, 6)])
def test_a_number_and_itself_or_zero(same: Run, shape: tuple[int, ...]) -> None:
    x = np.array([np.nan, np.inf, -np.inf, -0.0, 7.5, -3e38], np.float32).reshape(shape)
    nodes = [
        node("Sub", ["x", "x"], ["difference"]),
        node("Div", ["x", "x"], ["ratio"]),
        node("Equal", ["x", "x"], ["equal"]),
        node("Mul", ["zero", "x"], ["first"]),
        node("Mul", ["x", "zero"], ["second"]),
        node("Elu", ["x"], ["flat"], alpha=0.0),
        node("HardSigmoid", ["x"], ["hard"], alpha=0.0, beta=0.5),
        node("LeakyRelu", ["x"], ["cut"], alpha=0.0),
    ]
    same(nodes, {"x": x}, {"zero": np.float32(0)})


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
@pytest.mark.parametrize("count", sampled([6, 7, 11, 50], [7, 50]))
def test_many_operands(same: Run, count: int, dtype: Any) -> None:
    """Forests add up as many trees as they have; no island computes that."""
    random = np.random.default_rng(count)
    feeds = {f"x{number}": random.integers(-9, 9, (3, 5 - number % 2 * 4)).astype(dtype) for number in range(count)}
    operators = ["Max", "Min", *(["Sum", "Mean"] if dtype == np.float32 else [])]
    layers = same([node(operator, list(feeds), [operator]) for operator in operators], feeds)
    assert {name for layer in layers for name in layer.split("+")} <= {*operators, "Div", "Add"}
