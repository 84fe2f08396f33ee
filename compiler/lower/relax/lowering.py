"""Layers for a node that no template computes: by Relax, and accepted only if onnxruntime answers the same."""

import math
import multiprocessing
import resource
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gangway.artifact.format import MAX_ARGUMENTS
from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.frontend.graph import Node, TensorType
from gangway.compiler.frontend.shape_inference import evaluate
from gangway.compiler.kernels import codegen
from gangway.compiler.kernels.codegen import Library
from gangway.compiler.kernels.plain_specs import Role, TensorProgramSpec
from gangway.compiler.kernels.specs import Array, KernelSpec
from gangway.compiler.kernels.templates import registry
from gangway.compiler.lower.layers import Layer, Program
from gangway.compiler.lower.relax.legalise import Call, Line, legalise, schedule
from gangway.compiler.target import detect

# Is a node's layer right? Compiled and executed on random numbers, it must agree with the reference, onnxruntime.

REFERENCE_CPU_S = 5
REFERENCE_WALL_S = 60
TOLERANCE = 1e-3  # of a number, and a tenth of it of the largest one
_C_LIBRARY = {"memcpy", "memset", "memmove"}  # what kernels may call


def check(
    node: Node,
    layers: Sequence[Layer],
    line: Line,
    types: Mapping[str, TensorType],
    constants: Mapping[str, Array],
    opset: int,
) -> None:
    """Do nothing if the layers compute the node, which is this line of functions.

    Raises UnsupportedModelError if they do not, or if that cannot be found out.
    """
    names = [name for name in node.inputs if name and name not in constants]
    examples = line.examples or {}
    queries = [
        {name: examples.get(name, _numbers(types[name], seed, infinities)) for seed, name in enumerate(names)}
        for infinities in ((False, True) if line.examples is None else (False,))
    ]
    answers = _reference(node, queries, constants, opset)
    with tempfile.TemporaryDirectory() as folder:
        kernels = _Kernels(layers, Path(folder))
        for query, expected in zip(queries, answers, strict=True):
            found = kernels.run(query, types)
            found |= {output: query[name] for output, name in line.same.items()}
            for name, wanted in expected.items():
                _compare(name, found[name], wanted)


def _compare(name: str, found: Array, wanted: Array) -> None:
    if wanted.shape != found.shape or wanted.dtype != found.dtype:
        raise UnsupportedModelError(f"Relax: '{name}' is {found.dtype}{list(found.shape)}, ONNX says otherwise")
    wanted = np.where(np.isnan(wanted), found, wanted)  # what arithmetic makes of infinities may differ there
    largest = np.abs(wanted[np.isfinite(wanted)]).max(initial=0)
    if not np.allclose(found, wanted, TOLERANCE, TOLERANCE / 10 * largest, equal_nan=True):
        raise UnsupportedModelError(f"Relax: '{name}' differs from the reference")


def _numbers(kind: TensorType, seed: int, infinities: bool) -> Array:
    """Return numbers that are valid in most places: integers, which may be indices, are 0 and 1."""
    random = np.random.default_rng(seed)
    if kind.dtype == "float32":
        numbers = np.asarray(4 * random.standard_normal(kind.shape), np.float32)
        if infinities:
            odd = numbers.reshape(-1)[seed % 2 :: 3]
            odd[:] = np.resize(np.array([np.inf, 0, -np.inf], np.float32), odd.shape)
        return numbers
    return random.integers(0, 2, kind.shape).astype(kind.dtype)


def _reference(
    node: Node,
    queries: Sequence[Mapping[str, Array]],
    constants: Mapping[str, Array],
    opset: int,
) -> list[dict[str, Array]]:
    """Return the node's outputs as the reference computes them, in a process of its own, which can be stopped."""
    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(
        target=_evaluate, args=(theirs, node, queries, constants, opset)
    )
    process.start()
    theirs.close()
    try:
        answers: list[dict[str, Array]] | str = ours.recv() if ours.poll(REFERENCE_WALL_S) else "it does not end"
    except EOFError:
        answers = f"it takes more than {REFERENCE_CPU_S} s, or crashes"
    finally:
        process.kill()
        process.join()
        ours.close()
    if isinstance(answers, str):
        raise UnsupportedModelError(f"Relax: not checked, since the reference fails: {answers}")
    return answers


def _evaluate(
    pipe: Any, node: Node, queries: Sequence[Mapping[str, Array]], constants: Mapping[str, Array], opset: int
) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (REFERENCE_CPU_S, REFERENCE_CPU_S))
    try:
        with np.errstate(all="ignore"):
            pipe.send([evaluate(node, {**constants, **query}, opset) for query in queries])
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}"[:200])


class _Kernels:
    """The layers of a node, compiled."""

    def __init__(self, layers: Sequence[Layer], folder: Path) -> None:
        """Raise UnsupportedModelError if they are no plain C functions."""
        self._layers, self._target = layers, detect()
        specs = [layer.spec for layer in layers if isinstance(layer.spec, KernelSpec)]
        self._plans = [registry.plan(spec, self._target) for spec in specs]
        symbols = [f"k{index}" for index in range(len(specs))]
        try:
            kernels = {
                symbol: registry.emit(plan, self._target, symbol)
                for symbol, plan in zip(symbols, self._plans, strict=True)
            }
        except registry.UnsupportedSpecError as error:
            raise UnsupportedModelError(f"Relax: {error}") from error
        path = folder / "kernels.o"
        codegen.build_object(kernels, self._target, path)
        if missing := undefined(path) - _C_LIBRARY:
            raise UnsupportedModelError(f"Relax: it calls {', '.join(sorted(missing))}")
        codegen.link([path], folder / "kernels.so")
        self._library = Library(folder / "kernels.so")

    def run(self, query: Mapping[str, Array], types: Mapping[str, TensorType]) -> dict[str, Array]:
        """Return all tensors after the layers have been executed."""
        tensors = dict(query)
        for index, (layer, plan) in enumerate(zip(self._layers, self._plans, strict=True)):
            spec = plan.spec
            assert isinstance(spec, TensorProgramSpec)
            names = (layer.output, *layer.more_outputs)
            result, *more = [np.zeros(types[name].shape, types[name].dtype) for name in names]
            scratch = [np.zeros(elements, np.uint8 if kind == "bool" else kind) for elements, kind in spec.scratch]
            first, *others = [np.ascontiguousarray(tensors[name]) for name in layer.inputs]
            weights = registry.pack(plan, self._target, layer.weights)
            self._library.call(f"k{index}", [first, *weights, *others, *scratch, *more, result], 0, plan.tasks)
            tensors |= dict(zip(names, (result, *more), strict=True))
        return tensors


def undefined(path: Path) -> set[str]:
    """Return the symbols that an object file wants from outside."""
    command = [
        "ld",
        "-shared",
        "--unresolved-symbols=report-all",
        "--warn-unresolved-symbols",
        "-o",
        "/dev/null",
        str(path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return {line.rpartition("`")[2].rstrip("'") for line in done.stderr.splitlines() if "undefined reference" in line}


MOST_ELEMENTS = 1 << 22
ELEMENT_TYPES = {"float32", "bool", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))}


def lower_by_relax(program: Program, node: Node) -> None:
    """Add the layers of one node. Raises UnsupportedModelError that says what Relax cannot or does wrongly."""
    if node.operator == "GridSample":
        raise node.one_engine("onnxruntime has its own answers to coordinates that are no numbers, or beyond integers")
    constants = {name: program.graph.constants[name] for name in node.inputs if name in program.graph.constants}
    inputs = {name: program.type(name) for name in node.inputs if name and name not in constants}
    outputs = {name: program.type(name) for name in node.outputs if name}
    if foreign := {kind.dtype for kind in (*inputs.values(), *outputs.values())} - ELEMENT_TYPES:
        raise UnsupportedModelError(f"Relax: element type {', '.join(sorted(foreign))}")
    if any(math.prod(kind.shape) > MOST_ELEMENTS for kind in (*inputs.values(), *outputs.values())):
        raise UnsupportedModelError(f"Relax: a tensor of more than {MOST_ELEMENTS} numbers cannot be checked")
    try:
        line = legalise(node, inputs, outputs, constants, program.graph.opset)
        layers = [_layer(node, index, call) for index, call in enumerate(line.calls)]
        check(node, layers, line, {**inputs, **outputs, **line.between}, constants, program.graph.opset)
    except UnsupportedModelError:
        raise
    except Exception as error:  # the importer asserts, and TVM raises whatever its passes check
        raise UnsupportedModelError(f"Relax: {_last_line(error)}") from error
    program.add_types(line.between)
    program.layers += layers
    program.views |= line.same


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:200]


def _layer(node: Node, index: int, call: Call) -> Layer:
    inputs = tuple(item for item in call.operands if isinstance(item, str))
    weights = [item for item in call.operands if not isinstance(item, str)]
    scheduled = schedule(call.function)
    roles: list[Role] = ["input" if isinstance(item, str) else "weight" for item in call.operands]
    roles.extend("output" for _ in call.outputs)
    roles.extend("scratch" for _ in scheduled.scratch)
    if not inputs:
        raise UnsupportedModelError("Relax: a function of constants only")
    if len(roles) > MAX_ARGUMENTS:
        raise UnsupportedModelError(f"Relax: a function of {len(roles)} tensors; {MAX_ARGUMENTS} are possible")
    spec = TensorProgramSpec(scheduled.function, tuple(roles), scheduled.scratch, scheduled.tasks, scheduled.operations)
    raw: dict[str, Array] = {str(place): np.ascontiguousarray(item) for place, item in enumerate(weights)}
    name = node.name if not index else f"{node.name}:{index}"
    return Layer(name, node.operator, spec, inputs, call.outputs[0], raw, more_outputs=call.outputs[1:])
