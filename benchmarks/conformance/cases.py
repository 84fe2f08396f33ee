"""ONNX's own node tests (`onnx.backend.test`), as data, and which of them our claim is about.

In scope are the tests of float32, integer and bool tensors whose model imports opset 21 at most. All others are
counted under the reason why they are not: nothing is left out silently.
"""

import os
import pickle
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import TensorProto

from gangway.artifact.cache import default_cache_dir

Array = npt.NDArray[Any]

NEWEST_OPSET = 21
_INTEGERS = ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
_IN_SCOPE = {getattr(TensorProto, name) for name in ("FLOAT", "BOOL", *_INTEGERS)}
_RANDOM = {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"}
_EXPANDED = re.compile(r"_expanded(_.*)?$")


DataSets = tuple[tuple[tuple[Array, ...], tuple[Array, ...]], ...]  # (inputs, expected outputs)
_Test = tuple[str, bytes, DataSets, float, float]  # name, model, data, relative and absolute tolerance


@dataclass(frozen=True)
class Case:
    """One test: a model, input sets and the outputs they must give; `excluded` says why our claim is not about it."""

    name: str
    operator: str
    opset: int
    model: bytes
    data_sets: DataSets
    rtol: float
    atol: float
    excluded: str = ""


def collect() -> list[Case]:
    """Return all node tests of the installed onnx; kept in the user's cache, since making them takes half a minute."""
    path = default_cache_dir() / f"onnx-{onnx.__version__}-node-tests.pickle"
    if not path.exists():
        from onnx.backend.test.loader import load_model_tests  # noqa: PLC0415 - computes the answers of all tests

        tests = [_plain(test) for test in load_model_tests(kind="node")]
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_bytes(pickle.dumps(tests))
        temporary.rename(path)
    return _cases(pickle.loads(path.read_bytes()))


def cases_of(tests: Iterable[Any]) -> list[Case]:
    """Return onnx's test cases as ours. An expanded test, the body of a function, counts for the function."""
    return _cases([_plain(test) for test in tests])


def _plain(test: Any) -> _Test:
    data_sets = tuple((_arrays(inputs), _arrays(outputs)) for inputs, outputs in test.data_sets)
    return test.name, test.model.SerializeToString(), data_sets, test.rtol, test.atol


def _cases(tests: Sequence[_Test]) -> list[Case]:
    models = {name: onnx.load_from_string(model) for name, model, *_ in tests}
    operators = {name: model.graph.node[0].op_type for name, model in models.items()}
    cases = []
    for name, model, data_sets, rtol, atol in tests:
        operator = operators.get(_EXPANDED.sub("", name), operators[name])
        opsets = {entry.domain: entry.version for entry in models[name].opset_import}
        excluded = _exclusion(models[name], opsets)
        cases.append(Case(name, operator, opsets.get("", 0), model, data_sets, rtol, atol, excluded))
    return cases


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
