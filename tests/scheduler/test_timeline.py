"""The trace files that Perfetto opens."""

import json
from pathlib import Path

import pytest

from gangway.scheduler.observability import TraceWriter
from gangway.scheduler.timeline import Slice, TimelineWriter
from tests.helpers.full_disk import files_of_at_most


def test_a_trace_is_valid_and_complete(tmp_path):
    path = tmp_path / "trace.json"
    with TimelineWriter(path, cores=3, limit=4) as writer:
        writer.add_block(Slice(0, 10.0, 35.5, 7, 'a "quoted" model', 0, 4, 0, 0, (0, 2, 0, 0)), (2, 0))
        writer.add(Slice(1, 20.0, 19.0, 8, "other", 3, 4, 0, 1))
        writer.add(Slice(1, 40.0, 41.0, 9, 'a "quoted" model', 3, 4, 0, 1))
        writer.add(Slice(1, 50.0, 51.0, 9, "other", 4, 5, 0, 1))
    trace = json.loads(path.read_text())
    rows = {event["tid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert rows == {0: "core 0", 1: "core 1", 2: "core 2"}
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [
        (e["tid"], e["ts"], e["dur"], e["args"]["query"], e["args"]["rank"], e["args"]["ranks"]) for e in events
    ] == [
        (2, 10.0, 25.5, 7, 0, 2),
        (0, 10.0, 25.5, 7, 1, 2),
        (1, 20.0, 0.0, 8, 0, 1),
        (1, 40.0, 1.0, 9, 0, 1),
    ]
    assert events[0]["args"]["versions"] == [0, 2, 0, 0] and events[0]["args"]["layers"] == "0-4"
    colours = {event["cat"]: event["cname"] for event in events}
    assert colours['a "quoted" model'] != colours["other"] and len(colours) == 2
    assert trace["otherData"] == {"written": 4, "dropped": 1}


def test_a_trace_of_nothing_is_valid(tmp_path):
    with TimelineWriter(tmp_path / "trace.json", cores=1):
        pass
    assert len(json.loads((tmp_path / "trace.json").read_text())["traceEvents"]) == 3


def test_a_full_disk_ends_the_timeline_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    with TimelineWriter(Path("/dev/full"), cores=1) as writer:
        for number in range(1000):
            writer.add(Slice(0, number, number + 0.5, 7, "m", 0, 1, 0, 1))
    assert writer.dropped > 0
    assert "the timeline /dev/full ends here, because it cannot be written: [Errno 28]" in caplog.text
    with TraceWriter(Path("/dev/full")) as trace:
        trace.close()


def test_a_disk_that_is_full_in_the_middle_leaves_a_valid_timeline(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "timeline.json"
    with files_of_at_most(200_000), TimelineWriter(path, cores=1) as writer:
        for number in range(3000):
            writer.add(Slice(0, number, number + 0.5, 7, "m", 0, 1, 0, 1))
    timeline = json.loads(path.read_text())
    slices = sum(event["ph"] == "X" for event in timeline["traceEvents"])
    assert slices == timeline["otherData"]["written"] == writer.written > 100
    assert slices + timeline["otherData"]["dropped"] == 3000
    assert caplog.text.count("ends here") == 1
