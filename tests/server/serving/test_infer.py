"""Inference of a front end: what holds whichever protocol carries the request, and in which form its tensors are."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from gangway.clients.inputs import outputs_of
from gangway.executor.slots import SlotCounts, SlotRequest
from gangway.protos import grpc_service_pb2 as pb
from tests.helpers.ways import WAYS, RefusedError, Way, parameters_of, request_of

FINAL = "triton_final_response"  # of an answer in a stream
RAW_WAYS = ("gRPC", "stream", "HTTP")
VALUES = {
    "bool": [True, False, True, True],
    "int8": [-128, 127, 0, 1],
    "int16": [-(2**15), 2**15 - 1, 0, 1],
    "int64": [-(2**63), 2**63 - 1, 0, 1],
    "uint8": [0, 255, 1, 2],
    "uint16": [0, 65535, 1, 2],
    "uint32": [0, 2**32 - 1, 1, 2],
    "uint64": [0, 2**64 - 1, 1, 2],
    "fp32": [1.5, -0.1, np.inf, np.nan],
    "fp64": [1e300, 5e-324, -np.inf, np.nan],
}
NOTHING = SlotCounts()
FLOATS = {"fp32": "float32", "fp64": "float64"}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> Way:
    return WAYS[request.param]


def simple(rows: int = 1, outputs: tuple[str, ...] = (), identity: str = "", **parameters: Any) -> pb.ModelInferRequest:
    """Counts up and ones."""
    counts = np.arange(16 * rows, dtype=np.int32).reshape(rows, 16)
    return request_of("simple", {"INPUT0": counts, "INPUT1": np.ones_like(counts)}, outputs, identity, **parameters)


def assert_right(response: pb.ModelInferResponse, rows: int = 1) -> None:
    counts = np.arange(16 * rows, dtype=np.int32).reshape(rows, 16)
    for name, values in outputs_of(response).items():
        np.testing.assert_array_equal(values, counts + {"OUTPUT0": 1, "OUTPUT1": -1}[name])


@pytest.mark.parametrize("identity", ["first-é", '"\\\n', ""])
def test_sum_and_difference(server: Any, way: Way, identity: str) -> None:
    response = way(server, simple(identity=identity))
    assert (response.id, response.model_name, response.model_version) == (identity, "simple", "1")
    assert_right(response)


@pytest.mark.parametrize("rows", [3, 8])
def test_rows(server: Any, way: Way, rows: int) -> None:
    assert_right(way(server, simple(rows)), rows)


def test_only_requested_outputs_in_the_requested_order(server: Any, way: Way) -> None:
    for wanted in (("OUTPUT1",), ("OUTPUT1", "OUTPUT0")):
        response = way(server, simple(outputs=wanted))
        assert tuple(output.name for output in response.outputs) == wanted
        assert_right(response)


def test_inputs_in_any_order(server: Any, way: Way) -> None:
    counts = np.arange(16, dtype=np.int32).reshape(1, 16)
    assert_right(way(server, request_of("simple", {"INPUT1": np.ones_like(counts), "INPUT0": counts})))


@pytest.mark.parametrize("datatype", VALUES)
def test_elements_of_every_datatype(server: Any, way: Way, datatype: str) -> None:
    values = np.array([VALUES[datatype]], FLOATS.get(datatype, datatype))
    response = way(server, request_of(f"identity_{datatype}", {"x": values}))
    assert (response.outputs[0].datatype, list(response.outputs[0].shape)) == (datatype.upper(), [1, 4])
    np.testing.assert_array_equal(outputs_of(response)["y"], values)


@pytest.mark.parametrize("name", RAW_WAYS)
def test_tensors_that_are_no_numbers_of_json(server: Any, name: str) -> None:
    image = np.random.default_rng(0).standard_normal((1, 3, 224, 224), dtype=np.float32)
    for model, values in (("image", image), ("identity_fp16", image[0, 0, :1, :4].astype(np.float16))):
        np.testing.assert_array_equal(outputs_of(WAYS[name](server, request_of(model, {"x": values})))["y"], values)


def held(server: Any, way: Way, request: pb.ModelInferRequest, counts: SlotCounts = NOTHING) -> Any:
    """What the scheduler sees of a request, and its answer, once so much has been counted of it."""
    server.scheduler.holding = True
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(way, server, request)
        submitted = server.scheduler.held.get(timeout=10)
        seen: SlotRequest = server.scheduler.slots.request(submitted.slot)
        server.scheduler.slots.count(submitted.slot, counts)
        server.scheduler.answer(submitted)
        return seen, answer.result(10)


def test_timeout_and_priority_reach_the_scheduler(server: Any, way: Way) -> None:
    seen, _ = held(server, way, simple(2, timeout=5_000_000, priority=3))
    assert (seen.model_id, seen.rows, seen.priority) == (0, 2, 1)
    assert seen.deadline_ns - seen.arrival_ns == 5e9
    assert (seen.rejects_late, seen.max_queue) == (False, 0)
    seen, _ = held(server, way, simple())
    assert (seen.deadline_ns, seen.priority) == (0, 0)


def test_an_answer_says_how_it_was_made_if_asked(server: Any, way: Way) -> None:
    counts = SlotCounts(blocks=3, conflicts=1, preemptions=2, versions=0b101)
    _, response = held(server, way, simple(identity="7", timeout=9_000_000, gangway_stats=True), counts)
    assert_right(response)
    assert response.id == "7"
    report = {key: value for key, value in parameters_of(response).items() if key != FINAL}
    said = {"target_us": 9_000_000, "blocks": 3, "conflicts": 1, "preemptions": 2, "versions": "0,2"}
    assert report.keys() == said.keys() | {"queue_us", "compute_us", "ranks", "in_place", "batch_rows"}
    assert report.items() >= said.items()
    server.scheduler.holding = False
    assert not way(server, simple()).parameters.keys() - {FINAL}


@pytest.mark.parametrize(
    "name", [name for name in WAYS if name != "stream"]
)  # of which so many are too many themselves
def test_too_many_requests_are_refused_at_once(server: Any, name: str) -> None:
    way = WAYS[name]
    server.scheduler.holding = True
    slots = server.plane.slots.slots
    with ThreadPoolExecutor(slots) as pool:
        running = [pool.submit(way, server, simple()) for _ in range(slots)]
        taken = [server.scheduler.held.get(timeout=10) for _ in range(slots)]
        with pytest.raises(RefusedError, match=f"Exceeds maximum queue size: {slots} requests") as caught:
            way(server, simple())
        assert caught.value.is_of("UNAVAILABLE")
        assert server.client.is_server_live()  # while every slot is taken
        for submitted in taken:
            server.scheduler.answer(submitted)
        for answer in running:
            assert_right(answer.result(10))


def test_many_clients(server: Any, way: Way) -> None:
    def ask(client: int) -> None:
        for number in range(5):
            response = way(server, simple(1 + client, identity=f"{client}-{number}"))
            assert response.id == f"{client}-{number}"
            assert_right(response, 1 + client)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(4)))
