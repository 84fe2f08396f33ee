"""Blocks of Algorithm 2 on a default server of eight workers: leases, metrics, trace and page agree about them."""

import json
from pathlib import Path
from typing import Any

import pytest

from gangway.artifact.format import Manifest
from gangway.artifact.profile import LayerProfile, Profile, ProfiledMachine, machine_id, write_profile
from gangway.artifact.reader import read_manifest
from gangway.base.host_limits import cpu_name
from gangway.executor.launch import available_cores
from testing.live_server import LiveServer, live_server
from testing.load import RIGHT, Load, LoadProcess
from testing.reference import example_of
from testing.waiting import until
from tests.conftest import CompiledZoo
from tests.helpers.http_requests import ask_http
from tests.helpers.scraped_metrics import Scraped

WORKERS = 8
CORES = f"--cores={available_cores()[0]}x{WORKERS}"
COUNTS = (1, 2, 4, 8)
MODEL = "mobilenetv2"
CLIENTS = 3  # so that queries overlap: alone one is a single block, by Algorithm 2's threshold
FRONT = 10  # layers that use all workers; the others use one
FRONT_US, LAYER_US = 8000.0, 800.0  # on one worker; most is in front: further cores are worth asking for
TARGET_MS = 500.0  # so that plans do not depend on the speed of a loaded machine
PLANNED = f"planned in {FRONT} blocks"


def profiled(manifest: Manifest) -> Profile:
    """Return a profile on eight cores: the first layers use all of them, and have no target to spare."""
    layers, whole_us = [], [0.0] * len(COUNTS)
    for number, layer in enumerate(manifest.layers):
        times_us = [FRONT_US / count if number < FRONT else LAYER_US for count in COUNTS]
        whole_us = [sum(pair) for pair in zip(whole_us, times_us, strict=True)]
        weight = 1.0 if number < FRONT else LAYER_US
        grid = (tuple((time_us,) for time_us in times_us),) * len(layer.versions)
        layers.append(LayerProfile(layer.name, grid, 0.0, weight, (), ()))
    whole = tuple((time_us,) for time_us in whole_us)
    target, cpu = manifest.target.name, cpu_name()
    machine = ProfiledMachine(machine_id(cpu, WORKERS, target), cpu, WORKERS, target, 1.0, 1.0)
    return Profile(manifest.key, MODEL, machine, COUNTS, (1,), tuple(layers), whole, whole, (), 0, (9,), 0.01, 1.0)


def watched(server: LiveServer) -> list[dict[str, Any]]:
    """Return the decisions that the page shows, of the second in which somebody looks."""
    return list(ask_http(server.http_url, "GET", "/v2/gangway/state").content["decisions"])


@pytest.mark.long
def test_metrics_trace_and_page_show_planned_blocks(compiled_zoo: CompiledZoo, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    cache, trace = compiled_zoo.linked_cache(tmp_path / "cache"), tmp_path / "decisions.jsonl"
    manifest = read_manifest(cache / compiled_zoo.artifact(MODEL).name)
    write_profile(cache, profiled(manifest))
    folder = tmp_path / "models" / MODEL
    folder.mkdir(parents=True)
    (folder / "1").symlink_to(compiled_zoo.repository / MODEL / "1")
    config = f'max_batch_size: 8 parameters {{ key: "qos_ms" value {{ string_value: "{TARGET_MS}" }} }}'
    (folder / "config.pbtxt").write_text(config)
    example = example_of(MODEL, compiled_zoo.onnx_file(MODEL))
    options = [f"--cache-dir={cache}", CORES, f"--trace-decisions={trace}"]
    with live_server(tmp_path / "models", options) as server:
        with LoadProcess(Load(server.url, example.request, example.outputs, clients=CLIENTS)) as process:
            until(lambda: any(PLANNED in decision["text"] for decision in watched(server)))
            load = process.stop()
        metrics, layers = Scraped(server), len(manifest.layers) * len(load.outcomes)
        until(lambda: metrics.scrape()("gangway_layers_total", model=MODEL) >= layers)  # they are told once a second
        began = metrics.scrape()("gangway_blocks_planned_total", model=MODEL)
    assert {outcome.result for outcome in load.outcomes} == {RIGHT}
    decided: dict[int, list[int]] = {}  # by query, the blocks that each decision has planned
    for line in map(json.loads, trace.read_text().splitlines()):
        if line["decision"] in ("Start", "Resize", "Replan"):
            decided.setdefault(line["query_id"], []).append(len(line["blocks"]))
    undisturbed = sum(counts[0] for counts in list(decided.values())[:-CLIENTS] if len(counts) == 1)
    assert 0 < undisturbed <= began <= sum(sum(counts) for counts in decided.values())
