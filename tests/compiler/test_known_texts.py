"""Trials of models that refuse texts they do not know, as scikit-learn's OneHotEncoder is exported by default."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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
