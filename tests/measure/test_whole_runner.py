"""Models that onnxruntime serves, measured on 1 to all cores."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gangway.artifact.cache import Cache
from gangway.artifact.format import Engine, Manifest
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from gangway.executor.launch import available_cores
from gangway.measure.profiler import core_counts, profile_model
from tests.helpers.onnx_networks import FOREIGN, Foreign, wide
from tests.helpers.small_cache import small_cache


def compiled(network: Foreign, tmp_path: Path) -> tuple[Path, Manifest]:
    path = network.save(tmp_path / "model.onnx")
    manifest = compile_model(
        path, "whole", Cache(tmp_path / "cache"), detect(), lambda phase, done, total: None
    ).manifest
    assert manifest.engine is Engine.ONNXRUNTIME
    return tmp_path / "cache", manifest


@pytest.mark.parametrize("make", [wide, FOREIGN["gather"]])
def test_such_models_are_measured(make: Callable[[], Foreign], tmp_path: Path) -> None:
    cores = available_cores()
    cache_dir, manifest = compiled(make(), tmp_path)
    with small_cache():
        profile = profile_model(cache_dir, manifest, cores, seconds=0.1)
    assert profile.cores == core_counts(len(cores))
    assert profile.batches[0] == 1 and (manifest.batched or len(profile.batches) == 1)
    (layer,) = profile.layers
    assert min(min(times) for times in layer.latency_us[0]) > 0
