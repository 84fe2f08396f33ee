"""A server that is told of two NUMA nodes of one core: no request has more than one rank, and answers are right."""

import json

import pytest

from gangway.executor.launch import available_cores
from testing.live_server import live_server
from testing.load import RIGHT, Load, run_for
from testing.reference import example_of

CORES = available_cores()[:2]


@pytest.mark.long
@pytest.mark.skipif(len(CORES) < 2, reason="two nodes need two cores")
def test_gangs_stay_inside_a_node(compiled_zoo, tmp_path):
    example = example_of("mobilenetv2", compiled_zoo.onnx_file("mobilenetv2"))
    trace, repository = tmp_path / "decisions.jsonl", tmp_path / "models"
    repository.mkdir()
    (repository / "mobilenetv2").symlink_to(compiled_zoo.repository / "mobilenetv2")
    options = [f"--cache-dir={compiled_zoo.cache_dir}", "--no-profile", f"--trace-decisions={trace}"]
    options += [f"--cores={','.join(map(str, CORES))}", f"--numa-nodes={CORES[0]};{CORES[1]}"]
    with live_server(repository, options) as server:
        load = run_for(Load(server.url, example.request, example.outputs, clients=1), seconds=0.3)
        load.outcomes.extend(run_for(Load(server.url, example.request, example.outputs, clients=3), 0.5).outcomes)
        log = server.log.read_text()
    assert {outcome.result for outcome in load.outcomes} == {RIGHT}
    decided = [json.loads(line) for line in trace.read_text().splitlines()]
    gangs = [tuple(line["cores"]) for line in decided if line["decision"] in ("Start", "Resize")]
    assert {*gangs} == {(0,), (1,)}, "with one node there are gangs of two cores here"
    assert f"the cores are of 2 NUMA nodes, which no gang crosses: {CORES[0]}; {CORES[1]}" in log
