"""The clients that people use already, unchanged, against a real server: perf_analyzer."""

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.fetch_perf_analyzer import BINARY
from benchmarks.live_server import LiveServer, live_server
from benchmarks.perf_analyzer import MODES, run_one

INTERVAL_MS = 200


@pytest.fixture(scope="module")
def server(compiled_zoo: Any) -> Iterator[LiveServer]:
    with live_server(compiled_zoo.repository, [f"--cache-dir={compiled_zoo.cache_dir}"]) as running:
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
