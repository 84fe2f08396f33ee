"""Inputs and outputs of a model as its manifest has them, be it compiled or about to be."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gangway.artifact.datatypes import DTYPES
from gangway.artifact.format import TensorSpec
from gangway.compiler.frontend.graph import Graph
from gangway.compiler.frontend.importer import batch_symbols, zipped_outputs
from gangway.compiler.kernels.plain_specs import DeclaredOutput, TailSpec

_DATATYPES = {**{dtype.name: name for name, dtype in DTYPES.items()}, "bfloat16": "BF16", "string": "BYTES"}


def signature_of(
    graph: Graph, path: Path, tail: TailSpec | None
) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return inputs and outputs of the model in the ONNX file `path`; `tail`: its last layer, if it is one.

    Raises ModelError, OSError.
    """
    inputs = _tensors(graph, graph.inputs, batch_symbols(path))
    outputs = _answers(tail.outputs, graph.batched) if tail else _tensors(graph, graph.outputs, {})
    classes = zipped_outputs(path)
    return inputs, tuple(replace(spec, classes=classes.get(spec.name, ())) for spec in outputs)


def _tensors(graph: Graph, names: tuple[str, ...], batch: Mapping[str, str]) -> tuple[TensorSpec, ...]:
    """Return the specs of inputs or outputs; `batch`: what their first dimensions are called."""
    specs = []
    for name in names:
        kind = graph.types[name]
        shape = (-1, *kind.shape[1:]) if graph.batched else kind.shape
        symbols = (batch[name], *[""] * (len(shape) - 1)) if graph.batched and name in batch else ()
        specs.append(TensorSpec(name, _DATATYPES[kind.dtype], shape, kind.size_bytes, symbols))
    return tuple(specs)


def _answers(answers: tuple[DeclaredOutput, ...], batched: bool) -> tuple[TensorSpec, ...]:
    """Return the specs of a tail's outputs."""
    return tuple(
        TensorSpec(each.name, _DATATYPES[each.dtype], (-1, *each.shape[1:]) if batched else each.shape, 0)
        for each in answers
    )
