"""Trials of models that refuse texts they do not know, as scikit-learn's OneHotEncoder is exported by default."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from gangway.artifact.format import Engine
from tests.helpers.onnx_text import write

PLACE = 'ai.onnx.ml.OneHotEncoder<cats_strings: strings = ["Rome", "Oslo"], zeros: int = 0>'
COLOUR = 'ai.onnx.ml.OneHotEncoder<cats_strings: strings = ["red"], zeros: int = 0>'
ANY = 'ai.onnx.ml.OneHotEncoder<cats_strings: strings = ["red"], zeros: int = 1>'
PLACES = ("Rome", "Oslo")
NUMBERS = {"first": np.array([0]), "last": np.array([2])}


@pytest.mark.parametrize(
    ("graph", "known"),
    [
        (f"(string[N,1] a, string[N] b) => (float[N,1,2] y, float[N,1] z) {{ y = {PLACE}(a) z = {COLOUR}(b) }}",
         {"a": (PLACES,), "b": (("red",),)}),
        (f"(string[N,3] a) => (float[N,1,2] y, float[N,1,1] z) {{ u = ai.onnx.ml.ArrayFeatureExtractor(a, first)"
         f" v = Gather<axis = 1>(a, last) y = {PLACE}(u) z = {COLOUR}(v) }}", {"a": (PLACES, ("0",), ("red",))}),
        (f"(string[N,1] a, string[N,1] b) => (float[N,2,2] y) {{ c = Concat<axis = 1>(a, b) y = {PLACE}(c) }}",
         {"a": (PLACES,), "b": (PLACES,)}),
        (f"(string[N,1] a) => (float[N,1,1] y) {{ y = {ANY}(a) }}", {"a": ()}),
    ],
)  # fmt: skip
def test_trials_ask_with_texts_that_are_known(
    tmp_path: Path, compile_file: Callable[..., Any], graph: str, known: dict[str, Any]
) -> None:
    constants = {name: value for name, value in NUMBERS.items() if name in graph}
    manifest = compile_file(write(tmp_path / "model.onnx", graph, **constants)).manifest
    assert (manifest.engine, manifest.batched) == (Engine.ONNXRUNTIME, True)
    assert {spec.name: spec.example_texts for spec in manifest.inputs} == known
    assert manifest.trial_sizes  # so a run has succeeded


@pytest.mark.parametrize(
    ("columns", "texts", "known"),
    [
        (1, [b"\xe9t\xe9", b"Oslo"], (("Oslo",),)),  # the first is no UTF-8
        (1, [b"\xe9", b"\xe8"], (("0",),)),
        (1, [b"R" * 200_000, b"Oslo"], ()),  # no message holds them
        (200_000, [b"Rome", b"Oslo"], ()),
    ],
)
def test_what_cannot_be_asked_for(
    tmp_path: Path,
    compile_file: Callable[..., Any],
    columns: int,
    texts: list[bytes],
    known: tuple[tuple[str, ...], ...],
) -> None:
    path = write(tmp_path / "model.onnx", f"(string[N,{columns}] a) => (float[N,{columns},2] y) {{ y = {PLACE}(a) }}")
    model = onnx.load(path)
    next(item for item in model.graph.node[0].attribute if item.name == "cats_strings").strings[:] = texts
    onnx.save(model, path)
    (spec,) = compile_file(path).manifest.inputs
    assert spec.example_texts == known
