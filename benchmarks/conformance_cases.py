"""ONNX's own node tests (`onnx.backend.test`), as data, and which of them our claim is about.

In scope are the tests of float32, integer and bool tensors whose model imports opset 21 at most. All others are
counted under the reason why they are not: nothing is left out silently.
"""

import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from gangway.artifact.cache import default_cache_dir
from onnx import TensorProto

Array = npt.NDArray[Any]

NEWEST_OPSET = 21
_INTEGERS = ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
_IN_SCOPE = {getattr(TensorProto, name) for name in ("FLOAT", "BOOL", *_INTEGERS)}
_RANDOM = {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"}
_EXPANDED = re.compile(r"_expanded(_.*)?$")


@dataclass(frozen=True)
class Case:
    """One test: a model, input sets and the outputs they must give; `excluded` says why our claim is not about it."""

    name: str
    operator: str
    opset: int
    model: bytes
    data_sets: tuple[tuple[tuple[Array, ...], tuple[Array, ...]], ...]  # (inputs, expected outputs)
    rtol: float
    atol: float
    excluded: str = ""


def collect() -> list[Case]:
    """Return all node tests of the installed onnx; kept in the user's cache, since making them takes half a minute."""
    path = default_cache_dir() / f"node-tests-onnx-{onnx.__version__}.pickle"
    if path.exists():
        return list(pickle.loads(path.read_bytes()))
    from onnx.backend.test.loader import load_model_tests  # noqa: PLC0415 - computes the answers of all tests

    cases = cases_of(load_model_tests(kind="node"))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    temporary.write_bytes(pickle.dumps(cases))
    temporary.rename(path)
    return cases


def cases_of(tests: list[Any]) -> list[Case]:
    """Return onnx's test cases as ours. An expanded test, the body of a function, counts for the function."""
    operators = {test.name: test.model.graph.node[0].op_type for test in tests}
    return [_case(test, operators) for test in tests]


def _case(test: Any, operators: dict[str, str]) -> Case:
    opsets = {entry.domain: entry.version for entry in test.model.opset_import}
    return Case(
        test.name,
        operators.get(_EXPANDED.sub("", test.name), operators[test.name]),
        opsets.get("", 0),
        test.model.SerializeToString(),
        tuple((_arrays(inputs), _arrays(outputs)) for inputs, outputs in test.data_sets),
        test.rtol,
        test.atol,
        _exclusion(test.model, opsets),
    )


def _arrays(values: Any) -> tuple[Any, ...]:
    """Scalars of numpy become arrays; sequences, which are out of scope, stay lists."""
    return tuple(np.asarray(value) if isinstance(value, np.generic) else value for value in values)


def _exclusion(model: Any, opsets: dict[str, int]) -> str:
    """Return why a test is out of scope, empty if it is in."""
    if others := sorted(set(opsets) - {"", "ai.onnx"}):
        return f"domain {others[0]}"
    for value in (*model.graph.input, *model.graph.output):
        kind = value.type.WhichOneof("value")
        if kind != "tensor_type":
            return kind.removesuffix("_type") + "s"
        if value.type.tensor_type.elem_type not in _IN_SCOPE:
            return TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower()
    if found := sorted(inner for inner in _inner_types(model.graph) if inner not in _IN_SCOPE):
        return TensorProto.DataType.Name(found[0]).lower()
    operators = {node.op_type for node in model.graph.node}
    if operators & _RANDOM or any(_is_training_dropout(node, model.graph) for node in model.graph.node):
        return "random results"
    if max(opsets.values()) > NEWEST_OPSET:
        return f"opset > {NEWEST_OPSET}"
    return ""


def _inner_types(graph: Any) -> Iterator[int]:
    """Element types between the nodes: those that nodes state by attributes."""
    for node in graph.node:
        for attribute in node.attribute:
            if (node.op_type, attribute.name) in {("Cast", "to"), ("EyeLike", "dtype"), ("SequenceEmpty", "dtype")}:
                yield attribute.i
            elif attribute.type == onnx.AttributeProto.TENSOR:
                yield attribute.t.data_type


def _is_training_dropout(node: Any, graph: Any) -> bool:
    return node.op_type == "Dropout" and len(node.input) > 2 and len(graph.input) > 2


def same(found: Array, expected: Array, case: Case) -> str:
    """Return what is wrong with an output, empty if nothing is; tolerance is the test's own."""
    if found.dtype != expected.dtype:
        return f"type {found.dtype} instead of {expected.dtype}"
    if found.shape != expected.shape:
        return f"shape {list(found.shape)} instead of {list(expected.shape)}"
    close = np.isclose(found, expected, rtol=case.rtol, atol=case.atol, equal_nan=True)
    if close.all():
        return ""
    index = int(np.argmin(close))
    wrong = f"{int((~close).sum())} of {close.size} numbers"
    return f"{wrong}, the first at {index}: {found.ravel()[index]} instead of {expected.ravel()[index]}"
