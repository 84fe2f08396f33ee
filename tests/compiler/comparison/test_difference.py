"""A compiled model whose answers are not onnxruntime's says so; one whose sums have another order does not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gangway.artifact.format import Engine
from gangway.artifact.reader import verify
from gangway.compiler.comparison.difference import describe
from tests.helpers.rounded_products import save_rounded

Compile = Callable[..., Any]


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], ""),
        ([1.0, 2.0, 3.0001], [1.0, 2.0, 3.0], ""),
        ([1.0, 2.0, 4.5], [1.0, 2.0, 5.0], "output 'y' differs by up to 10 % of its largest number"),
        ([1e-9, 0.0], [0.0, 0.0], "by up to 1e+02 %"),
        ([np.nan, np.inf], [np.nan, np.inf], ""),
        ([np.inf, 1.0], [-np.inf, 1.0], "in 50 % of its values, which are infinite or no numbers in one"),
        ([np.nan, 1.0], [1.0, 1.0], "no numbers in one"),
        ([1, 2, 3, 4], [1, 2, 3, 5], "in 25 % of its values"),
        ([True, False], [True, False], ""),
        (["a", "b"], ["a", "c"], "in 50 % of its values"),
        ([[1.0, 2.0]], [1.0, 2.0], "in shape or type: [1, 2] instead of [2]"),
        ([], [], ""),
    ],
)
def test_what_is_told(ours: Any, theirs: Any, words: str) -> None:
    text = describe(["y"], [np.array(ours)], [np.array(theirs)])
    assert words in text if words else not text


def test_the_output_that_differs_most_is_told() -> None:
    right = [np.ones(3, np.float32) for _ in range(3)]
    ours = [right[0], right[1] * np.float32(1.5), right[2] * np.float32(1.2)]
    assert describe(["a", "b", "c"], ours, right) == "output 'b' differs by up to 50 % of its largest number"


def test_halves_are_rounded_at_the_end() -> None:
    ours, theirs = np.array([1.004], np.float16), np.array([1.0], np.float16)
    assert not describe(["y"], [ours], [theirs])
    assert describe(["y"], [ours.astype(np.float32)], [theirs.astype(np.float32)])


@pytest.mark.parametrize(("rounds", "sizes"), [(True, {}), (False, {}), (True, {"T": 6}), (False, {"T": 6})])
def test_rounded_activations(tmp_path: Path, compile_file: Compile, rounds: bool, sizes: dict[str, int]) -> None:
    """onnxruntime may round activations to 8 bits, kernels never do."""
    path = save_rounded(tmp_path / "model.onnx", ["N", *sizes], rounds)
    compiled = compile_file(path, dimensions=sizes)
    assert compiled.manifest.engine is Engine.NATIVE
    assert bool(compiled.manifest.difference) == rounds
    assert compiled.manifest.difference.startswith("output 'y' differs by up to 0." if rounds else "")
    assert verify(compiled.folder).difference == compiled.manifest.difference


def test_what_onnxruntime_serves_does_not_differ(tmp_path: Path, compile_file: Compile) -> None:
    path = save_rounded(tmp_path / "model.onnx", ["N", "T"], True)
    manifest = compile_file(path).manifest
    assert manifest.engine is Engine.ONNXRUNTIME and not manifest.difference
