"""Kernels over plain tensors on every target, against numpy; they need nothing that a library would have to provide."""

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.codegen import Library, aligned
from gangway.compiler.kernels.plain_specs import Instruction, LineSegment, Operand, PointwiseSpec, ReduceSpec, RemapSpec
from gangway.compiler.kernels.specs import Array
from gangway.compiler.kernels.templates import registry
from tests.helpers.kernel_runs import build, in_pieces, planned

COUNT = 1003
UNARY: dict[tuple[str, str], Callable[[Array], Array]] = {
    ("floor", "float32"): np.floor,
    ("ceil", "float64"): np.ceil,
    ("round", "float32"): np.rint,
    ("truncate", "float64"): np.trunc,
    ("exp", "float64"): np.exp,
    ("log", "float64"): np.log,
    ("sin", "float32"): np.sin,
    ("atan", "float64"): np.arctan,
    ("asinh", "float32"): np.arcsinh,
    ("sqrt", "float16"): np.sqrt,
    ("abs", "int8"): np.abs,
}
BINARY: dict[tuple[str, str], Callable[[Array, Array], Array]] = {
    ("pow", "float32"): lambda a, b: np.power(np.abs(a), b),
    ("fmod", "float32"): np.fmod,
    ("max", "float32"): np.maximum,
    ("mul", "int64"): np.multiply,
    ("mod", "int32"): np.mod,
    ("less", "uint16"): np.less,
    ("shift_right", "uint8"): np.right_shift,
}
CASTS = [("float64", "uint64"), ("float32", "int8"), ("float16", "int64"), ("int64", "float32"), ("float64", "float16")]


def numbers(dtype: str, seed: int) -> Array:
    random = np.random.default_rng(seed)
    if np.dtype(dtype).kind == "f":
        return (random.standard_normal(COUNT) * np.exp(random.standard_normal(COUNT) * 2)).astype(dtype)
    return random.integers(1 if seed else 0, 7, COUNT).astype(dtype)


def call(spec: Any, x: list[Array], y: Array, target: TargetSpec, library: Library, symbol: str) -> Array:
    plan = registry.plan(spec, target)
    out = aligned(y, 8)
    refused = [np.zeros(2, np.int64)] if spec.checks else []
    arguments = [*(aligned(array, 8) for array in x), out, *refused]
    in_pieces(library, symbol, arguments, plan.tasks)
    assert not np.any(refused)
    return out


def check(cases: list[tuple[Any, list[Array], Array]], target: TargetSpec, path: Path) -> None:
    """Compile all specs into one library that needs nothing, and compare."""
    library = build(planned((spec for spec, _, _ in cases), target), target, path)
    command = ["nm", "-D", "--undefined-only", "--format=just-symbols", str(path)]
    needed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    assert set(needed) <= {"memset", "memcpy"}
    for n, (spec, x, wanted) in enumerate(cases):
        got = call(spec, x, np.zeros_like(wanted), target, library, f"k{n}")
        tolerance = 2e-3 if wanted.dtype == np.float16 else 1e-6 if wanted.dtype == np.float32 else 1e-12
        tolerance = tolerance if wanted.dtype.kind == "f" else 0
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance, err_msg=str(spec))


def test_pointwise(target: TargetSpec, library_path: Path) -> None:
    cases: list[tuple[Any, list[Array], Array]] = []
    with np.errstate(all="ignore"):
        for (name, dtype), function in UNARY.items():
            x = numbers(dtype, 0)
            program = (Instruction(name, (0,), dtype),)
            cases.append((PointwiseSpec((COUNT,), (Operand(dtype, (1,)),), program), [x], function(x)))
        for (name, dtype), two in BINARY.items():
            a, b = numbers(dtype, 0), numbers(dtype, 1)
            a = np.abs(a) if name == "pow" else a
            wanted = two(a, b)
            operands = (Operand(dtype, (1,)), Operand(dtype, (1,)))
            cases.append(
                (PointwiseSpec((COUNT,), operands, (Instruction(name, (0, 1), wanted.dtype.name),)), [a, b], wanted)
            )
        for source, into in CASTS:
            x = np.abs(numbers(source, 0))
            x = np.minimum(x, 100).astype(source)
            program = (Instruction("cast", (0,), into),)
            cases.append((PointwiseSpec((COUNT,), (Operand(source, (1,)),), program), [x], x.astype(into)))
    check(cases, target, library_path)


def test_movement_and_reduction(target: TargetSpec, library_path: Path) -> None:
    x = np.arange(6 * 5 * 21, dtype=np.float32).reshape(6, 5, 21)
    line = (LineSegment("fill", 2), LineSegment("run", 21, 20, -1), LineSegment("run", 3, 4, 0))
    table = np.array([4 * 105, -1, 2 * 105, 0, 3 * 21], np.int32)
    moved = np.full((3, 2, 26), 7.0, np.float32)
    for i, j in ((i, j) for i in (0, 2) for j in (0, 1)):
        row = x[(4, 0, 2)[i], (0, 3)[j]]
        moved[i, j] = [7, 7, *row[::-1], *[row[4]] * 3]
    picked = np.array([20, -1, 3, 3, 0, 7, 11, 2, 5], np.int32)
    wanted = np.where(picked < 0, 7, x.reshape(-1, 21)[:, picked]).astype(np.float32)
    rows = np.concatenate([np.arange(30) * 21, picked]).astype(np.int32)
    cases: list[tuple[Any, list[Array], Array]] = [
        (RemapSpec("float32", (3, 2), line, x.size, 5, 7.0), [x, table], moved),
        (RemapSpec("float32", (30,), (LineSegment("table", 9, 30),), x.size, 39, 7.0), [x, rows], wanted),
        (ReduceSpec("float32", (6, 5, 21), (False, False, True), "sum", after="mean"), [x], x.mean(2)),
        (ReduceSpec("float32", (6, 5, 21), (True, False, True), "max"), [x], x.max((0, 2))),
        (
            ReduceSpec("float32", (6, 5, 21), (False, True, False), "sum", "square", "sqrt"),
            [x],
            np.sqrt((x * x).sum(1)),
        ),
        (ReduceSpec("float32", (6, 105), (False, True), "argmax"), [x % 17], (x % 17).reshape(6, 105).argmax(1)),
        (
            ReduceSpec("int64", (6, 105), (True, False), "prod"),
            [x.astype("i8") % 5],
            (x.astype("i8") % 5).reshape(6, 105).prod(0),
        ),
    ]
    check(cases, target, library_path)
