"""A file that changes while it is compiled: nothing made of its new content is kept under the key of the old one."""

import os
from pathlib import Path
from typing import Any

import pytest
from onnx import helper

from gangway.artifact.cache import Cache
from gangway.artifact.instances import SizeSpan
from gangway.compiler.arguments import CompileOptions
from gangway.compiler.errors import UnreadableModelError
from gangway.compiler.pipeline import compile_model
from gangway.compiler.progress import COMPARISON_PHASE
from gangway.compiler.target import detect
from tests.helpers.batch_networks import numbers

INPUTS: dict[str, list[int | str]] = {"x": ["N", "T", 6]}
NODES = [helper.make_node("MatMul", ["x", "w"], ["y"])]


@pytest.mark.parametrize("span", [SizeSpan("T", 1, 4), None])
@pytest.mark.parametrize("phase", ["kernels", COMPARISON_PHASE])
def test_a_file_that_changes_is_not_kept(network: Any, tmp_path: Path, span: SizeSpan | None, phase: str) -> None:
    path, other = (
        network(NODES, INPUTS, {"y": None}, {"w": numbers(6, 6, seed=seed)}).save(tmp_path / f"{seed}.onnx")
        for seed in (0, 1)
    )

    def change(now: str, done: int, total: int) -> None:
        if now == phase and done == total // 2 and other.exists():
            os.replace(other, path)

    cache = Cache(tmp_path / "cache")
    with pytest.raises(UnreadableModelError, match="changed while it was read"):
        compile_model(path, "changed", cache, detect(), change, CompileOptions({"T": 4}, span=span))
    assert not list((tmp_path / "cache").glob("*/manifest.json"))
