"""What is written about each decision."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gangway.artifact.precision import BF16, DEADLINE, FP32
from gangway.scheduler.observability import TraceWriter, describe
from gangway.scheduler.policy import Query, RunningBlock, Snapshot, Start, Stop, Wake
from gangway.scheduler.profiles import ModelProfile
from tests.helpers.full_disk import files_of_at_most

MODEL = ModelProfile(4, "resnet50", layers=9, max_ranks=2, latency_us=(((10.0, 6.0),),) * 9)
WAITING = Query(12, 4, 1, arrival_us=1000.0, deadline_us=5000.0, next_layer=3, started=True)
RUNNING = RunningBlock(Query(11, 4, 1, 500.0, None), 9, (0,), 900.0, layer=5)
SNAPSHOT = Snapshot(1500.0, [WAITING], [RUNNING], (1,), 2, {4: MODEL}, level=0.25)


def test_a_line_says_what_was_decided_and_on_what_grounds() -> None:
    line = describe(Start(12, 9, (1,), wanted=2, reason="it was the oldest"), SNAPSHOT)
    assert line == {
        "time_us": 1500.0,
        "decision": "Start",
        "query_id": 12,
        "end_layer": 9,
        "cores": (1,),
        "versions": (),
        "wanted": 2,
        "reason": "it was the oldest",
        "blocks": (),
        "together": False,
        "precision": "",
        "model": "resnet50",
        "next_layer": 3,
        "age_us": 500.0,
        "slack_us": 3500.0,
        "rows": 1,
        "requests": 1,
        "waiting": {"resnet50": 1},
        "running": [[11, "resnet50", 5, 9, (0,), False]],
        "free": (1,),
        "level": 0.25,
    }
    assert describe(Stop(11), SNAPSHOT)["slack_us"] is None
    assert "model" not in describe(Wake(2000.0), SNAPSHOT)


@pytest.mark.parametrize("precision", [FP32, BF16])
def test_a_line_names_the_precision_that_is_chosen(precision: str) -> None:
    either = replace(MODEL, in_bf16=replace(MODEL, model_id=5, name="resnet50, in bf16"))
    query = replace(WAITING, precision=DEADLINE, started=False, next_layer=0)
    state = replace(SNAPSHOT, waiting=[query], models={4: either})
    line = describe(Start(12, 9, (1,), precision=precision), state)
    assert (line["model"], line["precision"], line["waiting"]) == ("resnet50", precision, {"resnet50": 1})


def test_the_file_has_a_line_per_decision_and_an_end(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    with TraceWriter(path, limit_bytes=1000) as trace:
        trace.add([Stop(11), Wake(2000.0)], SNAPSHOT)
        trace.tick(2e6)
        assert [json.loads(line)["decision"] for line in path.read_text().splitlines()] == ["Stop", "Wake"]
        for _ in range(20):
            trace.add([Stop(11)], SNAPSHOT)
    lines = path.read_text().splitlines()
    assert len(lines) + trace.dropped == 22 and trace.dropped > 10
    assert path.stat().st_size <= 1000
    with TraceWriter(path) as trace:  # of a scheduler that takes the place of a dead one
        trace.add([Stop(11)], SNAPSHOT)
    assert len(path.read_text().splitlines()) == len(lines) + 1


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    with TraceWriter(path) as trace:
        trace.add([Stop(11)], SNAPSHOT)
        trace.tick(2e6)
        before = path.read_text()
        with files_of_at_most(len(before) + 20):
            trace.add([Wake(2000.0)] * 3, SNAPSHOT)
            trace.tick(4e6)
            assert path.read_text() == before
        assert trace.dropped == 3
        trace.add([Wake(2000.0)], SNAPSHOT)
    lines = path.read_text().splitlines()
    assert [json.loads(line)["decision"] for line in lines] == ["Stop", "Wake"]
