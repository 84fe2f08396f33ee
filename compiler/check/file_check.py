"""What will serve the parts of an ONNX file, found without code: the file is read and lowered as a compilation does.

Nothing is compiled, and no memory is planned. TVM is imported only for nodes that neither a kernel nor a definition
computes, and what its Relax makes of them is not compared with onnxruntime.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import onnx

from gangway.base.files import words_of
from gangway.compiler.arguments import NO_DIMENSIONS
from gangway.compiler.errors import (
    EndedApartError,
    ModelError,
    UnsupportedModelError,
    WrongSizeError,
    faults_as_refusals,
)
from gangway.compiler.fallback import PART, require_servable, sums_of
from gangway.compiler.frontend.graph import Graph
from gangway.compiler.frontend.importer import deciding_inputs, input_symbols, read_graph
from gangway.compiler.kernels.plain_specs import IslandSpec, TailSpec, TensorProgramSpec
from gangway.compiler.lower.layers import LoweredLayer, Program
from gangway.compiler.lower.lowering import lower_model
from gangway.compiler.model_file import parse

SIZES = (32, 224, 640)  # of symbolic dimensions, to read a file with, in this order
ROWS = 1  # of a batch that is compiled for one number of rows after the other: a compilation tries one, too
Lower = Callable[[Graph], Program]


class ServedBy(StrEnum):
    """What serves a file."""

    KERNELS = "kernels"
    ISLANDS = "kernels, with islands of onnxruntime"
    ONNXRUNTIME = "onnxruntime"
    NOTHING = "nothing"


class CompiledRows(StrEnum):
    """For which numbers of rows a file is compiled."""

    ANY = "any"
    EACH = "each"  # one after the other, when a request has them
    FIXED = "fixed"


@dataclass(frozen=True)
class IslandNodes:
    """Nodes that onnxruntime executes as one layer: how many of each operator, and why no kernel computes the first."""

    nodes: Mapping[str, int]
    reason: str
    is_tail: bool


@dataclass(frozen=True)
class FileCheck:
    """What is said of a file.

    `open_sizes`: symbolic dimensions and inputs whose values decide: each of their sizes is compiled when a request has
    it. `sizes`: with which the file was read. `by_tvm`: operators that TVM's Relax is expected to compute. `reason`:
    why not for any number of rows, why there are no kernels at all, or why nothing serves the file.
    """

    served_by: ServedBy
    rows: CompiledRows = CompiledRows.FIXED
    open_sizes: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    layers: int = 0
    islands: tuple[IslandNodes, ...] = ()
    by_tvm: tuple[str, ...] = ()
    reason: str = ""


def lower_statically(graph: Graph) -> Program:
    """Return the layers of a model, which are not measured and not compared. Raises ModelError."""
    return lower_model(graph, slow=(), is_checked=False)


def check_file(path: Path, sizes: Mapping[str, int] = NO_DIMENSIONS, lower: Lower = lower_statically) -> FileCheck:
    """Return what will serve an ONNX file; `sizes` of symbolic dimensions, others have plausible ones."""
    try:
        found = _check(path, sizes, lower)
    except (ModelError, OSError) as error:
        return FileCheck(ServedBy.NOTHING, reason=words_of(error))
    is_compiled = found.served_by is not ServedBy.ONNXRUNTIME
    if is_compiled and not found.open_sizes:
        return found
    try:
        require_servable(path)
    except (ModelError, OSError) as error:
        why = f"it ends onnxruntime: {error}" if isinstance(error, EndedApartError) else str(error)
        rest = (
            "that serves open sizes until they are compiled"
            if is_compiled
            else f"nor can it be compiled: {found.reason}"
        )
        return FileCheck(ServedBy.NOTHING, open_sizes=found.open_sizes, reason=f"{why}; {rest}")
    return found


def _check(path: Path, given: Mapping[str, int], lower: Lower) -> FileCheck:
    """Return what the compiler makes of a file. Raises ModelError and OSError for what cannot be read."""
    symbols = input_symbols(path)
    firsts = {each[0] if each else "" for each in symbols.values()}
    others = {name for each in symbols.values() for name in each[1:] if name}
    has_batch = bool(firsts) and "" not in firsts and not firsts & others
    names = others | (set() if has_batch else firsts - {""})
    decide = set(deciding_inputs(path)) - names - firsts
    open_names = tuple(sorted(names | (decide if names else decide & given.keys())))
    given = {name: size for name, size in given.items() if name in names | firsts | decide}
    if names - given.keys():
        given = {name: size for name, size in _channels(path, symbols).items() if name in names} | given
    batch = dict.fromkeys(firsts, ROWS) if has_batch and not firsts & given.keys() else {}
    refusal: ModelError | None = None
    for sizes in _plausible(names, decide & set(open_names), given):
        for rows in ({}, batch) if batch else ({},):
            try:
                with faults_as_refusals():
                    graph = read_graph(path, {**sizes, **rows})
                    found = _of_program(lower(graph))
            except ModelError as error:
                if isinstance(error, WrongSizeError):
                    name = "".join(symbols.get(error.tensor, ())[error.axis : error.axis + 1])
                    if name in names - given.keys():
                        return _check(path, {**given, name: error.size}, lower)
                is_better = isinstance(error, UnsupportedModelError) and not isinstance(refusal, UnsupportedModelError)
                refusal = error if refusal is None or is_better else refusal
                continue
            kind = CompiledRows.ANY if graph.batched else CompiledRows.EACH if rows else CompiledRows.FIXED
            why = str(refusal) if kind is CompiledRows.EACH else ""
            return replace(found, rows=kind, open_sizes=open_names, sizes=sizes, reason=why)
    return FileCheck(ServedBy.ONNXRUNTIME, open_sizes=open_names, reason=str(refusal))


def _channels(path: Path, symbols: Mapping[str, Sequence[str]]) -> dict[str, int]:
    """Return the numbers of channels that weights fix, by the names of inputs' dimensions."""
    graph = parse(path)[0].graph
    shapes = {tensor.name: tensor.dims for tensor in graph.initializer}
    found: dict[str, int] = {}
    for node in graph.node:
        if node.op_type == "Conv" and len(weights := shapes.get("".join(node.input[1:2]), ())) > 1:
            groups = next((item.i for item in node.attribute if item.name == "group"), 1)
            found |= {name: weights[1] * groups for name in symbols.get(node.input[0], ())[1:2] if name}
    return found


def _plausible(names: set[str], values: set[str], given: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Yield sizes of dimensions and values of inputs; what is `given` stays."""
    free = sorted(names - given.keys())
    rest = {**dict.fromkeys(values, 1), **given}
    yield {**dict.fromkeys(free, SIZES[0]), **rest}
    if len(free) > 1 or (free and len(names) > 1):
        known = {**dict.fromkeys(free, PART), **given}
        for sizes in sums_of({name: known[name] for name in sorted(names)}, free):
            yield {**rest, **sizes}
    for size in SIZES[1:] if free else ():
        yield {**dict.fromkeys(free, size), **rest}


def _of_program(program: Program) -> FileCheck:
    islands = tuple(_island(layer, program.refused) for layer in program.layers if isinstance(layer.spec, IslandSpec))
    by_tvm = dict.fromkeys(each.operator for each in program.layers if isinstance(each.spec, TensorProgramSpec))
    served_by = ServedBy.ISLANDS if islands else ServedBy.KERNELS
    return FileCheck(served_by, layers=len(program.layers), islands=islands, by_tvm=tuple(by_tvm))


def _island(layer: LoweredLayer, refused: Mapping[str, str]) -> IslandNodes:
    assert isinstance(layer.spec, IslandSpec)
    nodes: Sequence[onnx.NodeProto] = onnx.ModelProto.FromString(layer.spec.model).graph.node
    reasons = [refused[name] for node in nodes for name in node.output if name in refused]
    # A tail has copies of what passes it; others than refused nodes make or read what is no tensor in memory.
    counted = Counter(
        node.op_type for node in nodes if not (node.op_type == "Identity" and node.output[0].endswith(":copy"))
    )
    why = reasons[0] if reasons else "its outputs have sizes that depend on data, or hold strings"
    return IslandNodes(dict(counted), why, isinstance(layer.spec, TailSpec))
