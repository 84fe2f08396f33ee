"""Batches across sequences: requests of several ones are executed together, and each keeps its own state and controls.

The models here wait for four requests, for as long as a test can last: so a test knows what is executed together.
"""

import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import grpc
import pytest

from gangway.artifact.cache import Cache
from gangway.clients.connection import SERVICE
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from gangway.protos import grpc_service_pb2 as pb
from gangway.zoo import write_model
from testing.waiting import until
from tests.conftest import CompiledZoo
from tests.helpers import sequence_models
from tests.helpers.sequence_models import TIMEOUT_S, config_of
from tests.helpers.served import Served, serving
from tests.helpers.stopped_workers import stopped_workers
from tests.serving.sequences.test_sequence_fuzz import request_of

ROWS = 4
OLDEST = "oldest { max_candidate_sequences: 1024"
JOINING = f"{OLDEST} preferred_batch_size: [ {ROWS} ] max_queue_delay_microseconds: 60000000"
COMPILED = {"sums": config_of(f"{JOINING} }}")}
SPELLED = {"words": config_of(f"{JOINING} }}")}
CONTROLS = "simple_dyna_sequence"  # adds 1 at the start, the id at the end
Answer = int | str  # a sum, or the status


class Joined(Served):
    def send(self, request: pb.ModelInferRequest) -> Any:
        call = self.channel.unary_unary(SERVICE + "ModelInfer", response_deserializer=pb.ModelInferResponse.FromString)
        return call.future(request.SerializeToString(), timeout=TIMEOUT_S)

    def together(self, requests: Sequence[pb.ModelInferRequest]) -> list[Answer]:
        """Send as many requests as a batch needs; return what each is answered."""
        assert len(requests) == ROWS
        return [answer_of(future) for future in [self.send(request) for request in requests]]

    def batches(self, model: str) -> Mapping[int, int]:
        """How many batches have been executed, by size."""
        return {batch.batch_size: batch.compute_infer.count for batch in self.statistics(model).batch_stats}


def answer_of(future: "Future[pb.ModelInferResponse]") -> Answer:
    try:
        return int.from_bytes(future.result(TIMEOUT_S).raw_output_contents[0], "little", signed=True)
    except grpc.RpcError as error:
        return str(error.code().name)


@pytest.fixture(scope="module")
def served(compiled_zoo: CompiledZoo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Joined]:
    repository = tmp_path_factory.mktemp("models")
    cache_dir = compiled_zoo.cache_dir
    sequence_models.save(repository, cache_dir, COMPILED, SPELLED)
    controls = write_model(repository, CONTROLS)
    joining = (controls / "config.pbtxt").read_text().replace(OLDEST, JOINING)
    (controls / "config.pbtxt").write_text(joining)
    compile_model(Path(controls, "1", "model.onnx"), CONTROLS, Cache(cache_dir), detect(), lambda *_: None)
    flags = (f"--cache-dir={cache_dir}", "--model-control-mode=explicit", "--load-model=*")
    with serving(repository, *flags, kind=Joined) as served:
        yield served
        for name in (*COMPILED, *SPELLED, CONTROLS):
            served.client.unload_model(name)  # which ends its sequences
        served.await_rest()


def step(
    model: str, first: int, values: Sequence[int | str], start: bool = False, end: bool = False
) -> list[pb.ModelInferRequest]:
    """The next request of each of the sequences `first`, `first` + 1, ..."""
    own = [str(value) if model in SPELLED else value for value in values]
    return [request_of(model, first + place, value, start, end) for place, value in enumerate(own)]


@pytest.mark.parametrize("model", ["sums", "words"])
def test_every_sequence_has_its_own_state(served: Joined, model: str) -> None:
    before, steps = dict(served.batches(model)), 8
    sums = [0] * ROWS
    for number in range(steps):
        values = [(number + 1) * 10**place for place in range(ROWS)]
        sums = [total + value for total, value in zip(sums, values, strict=True)]
        assert served.together(step(model, 1, values, start=not number, end=number == steps - 1)) == sums
    after = served.batches(model)
    assert {rows: count - before.get(rows, 0) for rows, count in after.items() if count > before.get(rows, 0)} == {
        ROWS: steps
    }


def test_every_sequence_has_its_own_controls(served: Joined) -> None:
    """One begins, one ends, one does both and one neither, all in one batch."""
    begin = step(CONTROLS, 100, range(ROWS), start=True)
    assert served.together(begin) == [1, 2, 3, 4]
    before = served.statistics(CONTROLS).execution_count
    flags = [(True, False), (False, True), (True, True), (False, False)]
    requests = [request_of(CONTROLS, 100 + place, 10, *flag) for place, flag in enumerate(flags)]
    assert served.together(requests) == [11, 10 + 101, 11 + 102, 10]
    assert served.statistics(CONTROLS).execution_count == before + 1


def test_a_request_that_fails_takes_no_other_with_it(served: Joined) -> None:
    """What is no number changes nothing, in its sequence or in others."""
    assert served.together(step("words", 200, [1, 2, 3, 4], start=True)) == [1, 2, 3, 4]
    assert served.together(step("words", 200, [10, "no number", 10, 10])) == [11, "INTERNAL", 13, 14]
    assert served.together(step("words", 200, [100] * ROWS, end=True)) == [111, 102, 113, 114]


@pytest.mark.parametrize("model", ["sums", "words"])
def test_a_client_that_goes_takes_no_other_with_it(served: Joined, model: str) -> None:
    """Its own request may be executed or not, for it has begun; the sequence goes on."""
    first = 300 if model == "sums" else 400
    assert served.together(step(model, first, [1, 2, 3, 4], start=True)) == [1, 2, 3, 4]
    with stopped_workers(served.server):
        futures = [served.send(request) for request in step(model, first, [10] * ROWS)]
        until(lambda: served.server.busy_slots(running=True) == ROWS)
        futures[1].cancel()
    assert [answer_of(future) for place, future in enumerate(futures) if place != 1] == [11, 13, 14]
    until(lambda: not served.server.busy_slots())
    sums = served.together(step(model, first, [100] * ROWS, end=True))
    assert sums[1] in (102, 112) and [*sums[:1], *sums[2:]] == [111, 113, 114]


@pytest.mark.parametrize("role", ["worker", "scheduler"])
@pytest.mark.parametrize("model", ["sums", "words"])
def test_what_a_killed_process_had_is_executed_again_from_the_same_states(
    served: Joined, model: str, role: str
) -> None:
    first = 500 + 100 * ["worker", "scheduler"].index(role)
    assert served.together(step(model, first, [1, 2, 3, 4], start=True)) == [1, 2, 3, 4]
    with stopped_workers(served.server):
        futures = [served.send(request) for request in step(model, first, [10] * ROWS)]
        until(lambda: served.server.busy_slots(running=True) == ROWS)
        for pid in served.server.pids()[role]:
            os.kill(pid, signal.SIGKILL)
    assert [answer_of(future) for future in futures] == [11, 12, 13, 14]
    assert served.together(step(model, first, [100] * ROWS, end=True)) == [111, 112, 113, 114]
