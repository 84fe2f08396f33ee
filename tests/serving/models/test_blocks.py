"""Real models in blocks: queries that were stopped, and went on with other cores, give onnxruntime's numbers."""

import json
import math

from gangway.artifact.reader import read_manifest
from testing.live_server import live_server
from testing.load import RIGHT, Load, run_for
from testing.reference import example_of


def test_stopped_queries_give_the_same_numbers(compiled_zoo, tmp_path):
    example = example_of("mobilenetv2", compiled_zoo.onnx_file("mobilenetv2"))
    trace, timeline = tmp_path / "decisions.jsonl", tmp_path / "timeline.json"
    repository = tmp_path / "models"
    repository.mkdir()
    (repository / "mobilenetv2").symlink_to(compiled_zoo.repository / "mobilenetv2")
    options = [f"--cache-dir={compiled_zoo.cache_dir}", "--scheduler=fixed_block:7", "--no-profile"]
    with live_server(repository, [*options, f"--trace-decisions={trace}", f"--timeline={timeline}"]) as server:
        load = run_for(Load(server.url, example.request, example.outputs, clients=4), seconds=1.0)
    assert {outcome.result for outcome in load.outcomes} == {RIGHT}
    starts = [json.loads(line) for line in trace.read_text().splitlines()]
    assert {line["decision"] for line in starts} == {"Start"}
    blocks = len([line for line in starts if line["model"].startswith("mobilenetv2")])
    layers = len(read_manifest(compiled_zoo.artifact("mobilenetv2")).layers)
    assert layers > 3 * 7 and blocks >= math.ceil(layers / 7) * len(load.outcomes)
    work = [event for event in json.loads(timeline.read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(work) >= blocks
