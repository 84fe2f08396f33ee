"""The clients that people use already, unchanged, against a real server: perf_analyzer."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from gangway.zoo.repository import write_model

from benchmarks.fetch_perf_analyzer import BINARY
from benchmarks.live_server import LiveServer, live_server
from benchmarks.perf_analyzer import MODES, run_one

INTERVAL_MS = 200


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    folder: Path = tmp_path_factory.mktemp("real-clients")
    for name in ("mlp", "simple", "mobilenetv2"):
        write_model(folder / "models", name)
    with live_server(folder / "models", [f"--cache-dir={folder / 'cache'}"]) as running:
        yield running


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("model", ["mlp", "simple"])
def test_perf_analyzer_measures_without_special_flags(server: LiveServer, model: str, mode: str) -> None:
    assert BINARY.exists(), "run `make tools` first"
    result = run_one(server.url, model, mode, MODES[mode], INTERVAL_MS)
    assert result.problem == ""
    assert len(result.requests_per_s) == MODES[mode].levels


def test_perf_analyzer_sends_pictures(server: LiveServer) -> None:
    result = run_one(server.url, "mobilenetv2", "async", MODES["async"], INTERVAL_MS)
    assert result.problem == ""
