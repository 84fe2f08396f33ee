"""What `front_end.latency` makes of instants: joined by id, parts in order, medians, and the cores that were used."""

import json
from array import array
from pathlib import Path

import pytest

from benchmarks.front_end.latency_client import Errand, floor_traces
from benchmarks.front_end.latency_parts import (
    FLOOR_PARTS,
    PARTS,
    Trip,
    Way,
    beyond_idle,
    draw,
    join,
    medians_us,
    part_rows,
    read_traces,
    use_rows,
)
from gangway.protos import grpc_service_pb2 as pb
from testing.processes import CoreUse

# Nine parts that take 1, 2, ... 9 us, from 1000 ns on.
TRIP = Trip("a", 1000, 46_000)
TRACE = {
    "REQUEST_START": 2000,
    "QUEUE_START": 4000,
    "SCHEDULE_START": 7000,
    "SCHEDULE_END": 11_000,
    "COMPUTE_START": 16_000,
    "COMPUTE_OUTPUT_START": 22_000,
    "RESPONSE_START": 29_000,
    "REQUEST_END": 37_000,
}


def trace_file(traces: dict[str, dict[str, int]]) -> str:
    entries: list[dict[str, object]] = []
    for number, (request_id, instants) in enumerate(traces.items(), 1):
        entries.append({"id": number, "model_name": "m", "model_version": 1, "request_id": request_id})
        entries += [{"id": number, "timestamps": [{"name": name, "ns": ns}]} for name, ns in instants.items()]
    return json.dumps(entries)


def test_traces_are_found_by_the_requests_id() -> None:
    later = {name: ns + 5 for name, ns in TRACE.items()}
    nameless = [{"id": 9, "model_name": "m", "model_version": 1}, {"id": 9, "timestamps": [{"name": "X", "ns": 1}]}]
    text = json.dumps([*json.loads(trace_file({"a": TRACE, "b": later})), *nameless])
    assert read_traces(text) == {"a": TRACE, "b": later}


def test_parts_lie_between_the_instants_of_client_and_server() -> None:
    (way,) = join([TRIP], {"a": TRACE})
    assert way.parts_us == tuple(range(1, 10))
    assert way.beyond_compute_us == 45 - 6
    assert way.total_us == (TRIP.received_ns - TRIP.sent_ns) / 1e3


def test_requests_that_were_not_traced_or_not_computed_are_left_out() -> None:
    failed = {"REQUEST_START": 2000, "REQUEST_END": 3000}
    trips = [TRIP, Trip("b", 0, 1), Trip("c", 0, 1)]
    assert len(join(trips, {"a": TRACE, "b": failed})) == 1


def test_the_last_messages_at_a_server_that_does_nothing_are_those_of_the_client() -> None:
    trips = [Trip("a", 1000, 4000), Trip("b", 5000, 9000)]
    traces = floor_traces(trips, array("q", [1, 2, 3000, 6000]))  # two to warm up
    assert [way.parts_us for way in join(trips, traces, FLOOR_PARTS)] == [(2, 1), (1, 3)]


def test_rows_have_medians_and_shares() -> None:
    ways = [Way((float(factor),) * len(PARTS)) for factor in (1, 2, 30)]
    assert medians_us(ways) == [2] * len(PARTS)
    rows = part_rows(ways, [Way((3, 4)), Way((5, 4)), Way((7, 4))])
    assert [row["part"] for row in rows] == [*PARTS, "all but compute", "all"]
    first, compute, beyond, everything = rows[0], rows[5], rows[-2], rows[-1]
    assert (first["p50 us"], first["do-nothing p50 us"]) == (2, 5)
    assert (compute["part"], compute["do-nothing p50 us"]) == ("compute", "")
    assert first["share %"] == pytest.approx(100 / 9)
    assert (beyond["p50 us"], beyond["do-nothing p50 us"]) == (16, 9)
    assert (everything["p50 us"], everything["share %"]) == (18, pytest.approx(100))


def test_a_load_is_what_goes_beyond_idling() -> None:
    assert beyond_idle(CoreUse(1000, 50, 10), 2.0, CoreUse(100, 30, 1), 1.0) == CoreUse(800, 0, 8)


def test_use_per_request() -> None:
    uses = {"client": CoreUse(4000, 2000, 6), "worker": CoreUse(2000, 0, 2)}
    rows = use_rows({"idle": (uses, 2), "bare": ({"client": CoreUse(1000, 0, 1)}, 1)}, "run_ns")
    assert rows[0] == {"role": "client", "idle": 2, "bare": 1}
    assert rows[1] == {"role": "worker", "idle": 1, "bare": 0}
    assert rows[2] == {"role": "all", "idle": 3, "bare": 1}
    assert use_rows({"idle": (uses, 2)}, "turns")[-1] == {"role": "all", "idle": 4}


def test_ids_stand_in_the_message() -> None:
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[b"x" * 1000]).SerializeToString()
    request_id, message = Errand("", request, "m idle", 1, 1, 0).message(12)
    parsed = pb.ModelInferRequest.FromString(message)
    assert (parsed.id, parsed.model_name, parsed.raw_input_contents[0]) == (request_id, "m", b"x" * 1000)


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw(tmp_path / "way.png", {"m": {"do-nothing": [Way((5, 6))], "idle": [Way(tuple(map(float, range(1, 10))))]}})
    assert (tmp_path / "way.png").read_bytes().startswith(b"\x89PNG")
