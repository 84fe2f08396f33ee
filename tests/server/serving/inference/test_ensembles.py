"""Ensembles in the front end: what the scheduler sees of them, and that nothing is left, however they end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from google.protobuf import text_format
from tritonclient.utils import InferenceServerException

from gangway.artifact.format import Engine
from gangway.executor.messages import Submit
from gangway.executor.slots import NEVER_JOINED, SlotRequest, SlotStatus
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.control.repository.ensembles import EnsembleBuilder, isolated_of, together
from gangway.server.control.repository.loaded import IsolatedLatency, LoadedModel
from gangway.server.control.repository.repository import ModelVersion
from gangway.server.control.repository.schedules import StoredSchedules, UsedSchedule
from gangway.server.errors import ConfigError
from gangway.server.models.config import QosConfig, qos_of
from gangway.server.requests.data_plane import PoolExhaustedError, RequestLayout
from testing.raw_connection import RawConnection
from testing.waiting import until
from tests.helpers.ensemble_configs import Step, config_of
from tests.helpers.raw_stream import simple_request

WAIT_S = 20
INPUTS = "INPUT0:INT32:16 INPUT1:INT32:16"
OUTPUTS = "OUTPUT0:INT32:16 OUTPUT1:INT32:16"
BOTH = "OUTPUT0=OUTPUT0 OUTPUT1=OUTPUT1"
DIAMOND = [
    ("simple", "INPUT0=INPUT0 INPUT1=INPUT1", "OUTPUT0=sum OUTPUT1=difference"),
    ("simple", "INPUT0=sum INPUT1=difference", "OUTPUT0=twice_a"),
    ("simple", "INPUT0=sum INPUT1=difference", "OUTPUT1=twice_b"),
    ("simple", "INPUT0=twice_a INPUT1=twice_b", BOTH),
]
FORK = [
    ("simple", "INPUT0=INPUT0 INPUT1=INPUT1", "OUTPUT0=OUTPUT0"),
    ("simple", "INPUT0=INPUT1 INPUT1=INPUT0", "OUTPUT1=OUTPUT1"),
]
CHAIN_OF_TWO = (("simple", "INPUT0=INPUT0 INPUT1=INPUT1", "OUTPUT0=a"), ("simple", "INPUT0=a INPUT1=a", BOTH))
BRANCHES = tuple(FORK)
LAST = ("simple", "INPUT0=OUTPUT0 INPUT1=OUTPUT1", "OUTPUT0=last")
NESTED = [("diamond", "INPUT0=INPUT0 INPUT1=INPUT1", "OUTPUT0=a OUTPUT1=b"), ("simple", "INPUT0=a INPUT1=b", BOTH)]
ISOLATED = IsolatedLatency(compute_us=1000.0, latency_us=1500.0)


def entry_of(name: str, config: str) -> ModelVersion:
    parsed = text_format.Parse(config, ModelConfig())
    return ModelVersion(name, 1, Path("/nowhere") / name / "1" / "model.onnx", parsed, qos_of(parsed))


@dataclass
class Bench:
    """The front end of this process with ensembles, and the scheduler's side of it."""

    server: Any
    make_inputs: Callable[..., list[triton.InferInput]]
    served: dict[str, dict[int, LoadedModel]]

    def begin(self, name: str, rows: int = 1, **options: Any) -> Any:
        """Ask, and hold whatever is handed over."""
        self.server.scheduler.holding = True
        self.answers: list[Any] = []
        callback = lambda result, error: self.answers.append(error or result)  # noqa: E731
        return self.server.client.async_infer(name, self.make_inputs(rows), callback, **options)

    def held(self) -> tuple[Submit, SlotRequest]:
        submit = self.server.scheduler.held.get(timeout=WAIT_S)
        return submit, self.server.scheduler.slots.request(submit.slot)

    def answer(self, submit: Submit) -> None:
        self.server.scheduler.answer(submit)

    def end(self, submit: Submit, status: SlotStatus) -> None:
        assert self.server.scheduler.slots.finish(submit.slot, submit.generation, status)

    def result(self) -> Any:
        until(lambda: self.answers)
        return self.answers[0]

    def error(self, code: str) -> str:
        error = self.result()
        assert isinstance(error, InferenceServerException)
        assert error.status() == f"StatusCode.{code}", error
        return str(error.message())

    def statistics(self, name: str) -> Any:
        return self.server.client.get_inference_statistics(name).model_stats[0]


def no_schedules() -> StoredSchedules:
    """Those of a scheduler that knows no model."""
    return StoredSchedules(Path(), 1, SimpleNamespace(spec_of=lambda model_id: None), lambda: "")  # type: ignore[arg-type]


@pytest.fixture
def bench(server: Any, announced: Any, simple_inputs: Callable[..., list[triton.InferInput]]) -> Bench:
    ready = replace(announced.message, isolated_us=ISOLATED.compute_us)
    simple = LoadedModel(entry_of("simple", ""), ready, ISOLATED, Engine.NATIVE, None)
    served = {"simple": {1: simple}}
    builder = EnsembleBuilder(no_schedules())
    server.front_end.handle(ready)
    for name, steps, more in (("diamond", DIAMOND, REJECT), ("fork", FORK, ""), ("nested", NESTED, QOS)):
        served[name] = {1: builder.make(entry_of(name, config_of(INPUTS, OUTPUTS, steps, more=more)), served)}
        server.front_end.handle(served[name][1].ready)
    return Bench(server, simple_inputs, served)


REJECT = 'parameters { key: "late" value { string_value: "reject" } }'
QOS = 'parameters { key: "qos_ms" value { string_value: "2x" } }'


def expected(rows: int = 1) -> tuple[Any, Any]:
    """2 A + 2 B and 2 A - 2 B."""
    a = np.arange(16 * rows, dtype=np.int32).reshape(rows, 16)
    return 2 * a + 2, 2 * a - 2


def test_steps_read_where_others_have_written_and_run_side_by_side(bench: Bench) -> None:
    bench.begin("diamond", rows=3)
    first, at_first = bench.held()
    bench.answer(first)
    (left, at_left), (right, at_right) = bench.held(), bench.held()  # both, before either has ended
    written = at_first.output_offsets[:2]
    assert at_left.input_offsets[:2] == at_right.input_offsets[:2] == written
    assert not {*written, *at_first.input_offsets[:2]} & {*at_left.output_offsets[:2], *at_right.output_offsets[:2]}
    bench.answer(right)
    bench.answer(left)
    last, at_last = bench.held()
    assert at_last.input_offsets[:2] == (at_left.output_offsets[0], at_right.output_offsets[1])
    assert at_last.output_offsets[:2] == written  # which has no readers any more
    assert {request.rows for request in (at_first, at_left, at_right, at_last)} == {3}
    bench.answer(last)
    for name, wanted in zip(("OUTPUT0", "OUTPUT1"), expected(3), strict=True):
        np.testing.assert_array_equal(bench.result().as_numpy(name), wanted)


def test_one_deadline_priority_and_arrival_for_all_steps(bench: Bench) -> None:
    bench.begin("diamond", priority=1, timeout=500_000)
    seen = []
    for _ in range(4):
        submit, request = bench.held()
        seen.append(request)
        bench.answer(submit)
    bench.result()
    assert len({request.arrival_ns for request in seen}) == 1
    left_us = [500_000 - (request.deadline_ns - request.arrival_ns) / 1e3 for request in seen]
    assert left_us == [2000.0, 1000.0, 1000.0, 0.0]  # the chain after each
    assert {(request.priority, request.rejects_late) for request in seen} == {(-1, True)}


@pytest.mark.parametrize(("level", "most"), [(0, 5), (1, 7), (2, 5)])
def test_the_queue_policy_is_that_of_the_step_s_model_and_the_request_s_level(
    bench: Bench, level: int, most: int
) -> None:
    text = (
        "max_batch_size: 8 dynamic_batching { priority_levels: 2 default_priority_level: 2"
        " default_queue_policy { max_queue_size: 5 }"
        " priority_queue_policy { key: 1 value { max_queue_size: 7 } } }"
    )
    simple = bench.served["simple"][1].ready
    config = ModelConfig.FromString(simple.config)
    text_format.Merge(text, config)
    levelled = replace(simple, name="levelled", config=config.SerializeToString())
    entry = entry_of("levelled", text_format.MessageToString(config))
    served = {"levelled": {1: LoadedModel(entry, levelled, ISOLATED, Engine.NATIVE, None)}}
    steps = [("levelled", "INPUT0=INPUT0 INPUT1=INPUT1", BOTH)]
    ensemble = EnsembleBuilder(no_schedules()).make(entry_of("levels", config_of(INPUTS, OUTPUTS, steps)), served)
    bench.server.front_end.handle(levelled)
    bench.server.front_end.handle(ensemble.ready)
    bench.begin("levels", priority=level)
    submit, request = bench.held()
    assert request.max_queue == most
    bench.answer(submit)
    bench.result()


def test_a_multiple_means_the_longest_chain_and_what_is_beside_it(bench: Bench) -> None:
    """Each step uses all cores, so the two that run side by side take as long as one after the other."""
    bench.begin("nested")
    submit, request = bench.held()
    alone_ns = 4 * 1_500_000 + 1_000_000
    assert request.deadline_ns - request.arrival_ns == 2 * alone_ns - 3 * 1_000_000
    bench.server.scheduler.holding = False
    bench.answer(submit)
    np.testing.assert_array_equal(bench.result().as_numpy("OUTPUT1"), np.full((1, 16), 4, np.int32))


def test_cancelled_in_the_middle(bench: Bench) -> None:
    call = bench.begin("diamond")
    first, _ = bench.held()
    bench.answer(first)
    steps = {bench.held()[0].slot, bench.held()[0].slot}
    call.cancel()
    cancelled = {bench.server.scheduler.cancelled.get(timeout=WAIT_S).slot for _ in range(2)}
    assert cancelled == steps
    bench.error("CANCELLED")
    assert bench.server.scheduler.held.empty()


def test_the_client_s_deadline_ends_what_runs(bench: Bench) -> None:
    bench.server.scheduler.holding = True
    with RawConnection(bench.server.url) as connection:
        stream = connection.call("ModelInfer", simple_request(model="diamond").SerializeToString(), timeout_s=0.1)
        submit, request = bench.held()
        assert request.limit_ns > request.arrival_ns and not request.deadline_ns
        assert bench.server.scheduler.cancelled.get(timeout=WAIT_S).slot == submit.slot
        assert connection.answer(stream)[0]["grpc-status"] == str(grpc.StatusCode.DEADLINE_EXCEEDED.value[0])


@pytest.mark.parametrize(
    ("status", "code", "message"),
    [
        (SlotStatus.INTERNAL, "INTERNAL", "the execution of model 'simple' failed"),
        (SlotStatus.LATE, "UNAVAILABLE", "Request timeout expired for model 'simple'"),
        (SlotStatus.QUEUE_FULL, "UNAVAILABLE", "Exceeds maximum queue size"),
        (SlotStatus.UNAVAILABLE, "UNAVAILABLE", "could not be executed now"),
    ],
)
def test_a_failed_step_is_the_answer_and_ends_the_others(
    bench: Bench, status: SlotStatus, code: str, message: str
) -> None:
    before = bench.statistics("diamond").inference_stats.fail.count
    bench.begin("diamond")
    first, _ = bench.held()
    bench.answer(first)
    steps = {submit.slot: submit for submit in (bench.held()[0], bench.held()[0])}
    failed, other = steps.values()
    bench.end(failed, status)
    assert bench.server.scheduler.cancelled.get(timeout=WAIT_S).slot == other.slot
    text = bench.error(code)
    assert text.startswith("in ensemble 'diamond', step ") and " ('simple'): " in text and message in text
    assert bench.statistics("diamond").inference_stats.fail.count == before + 1


def test_without_a_slot_for_a_step_the_request_is_refused_at_once(bench: Bench) -> None:
    plane = bench.server.plane
    bench.begin("diamond")
    first, _ = bench.held()
    taken = []
    try:
        while True:
            taken.append(plane.open(RequestLayout(0, (), ()), 1))
    except PoolExhaustedError:
        pass
    bench.answer(first)
    text = bench.error("UNAVAILABLE")
    for request in taken:
        request.close()
    assert "Exceeds maximum queue size" in text


def test_only_what_is_asked_for_is_computed(bench: Bench) -> None:
    before = bench.statistics("simple").execution_count
    bench.server.scheduler.holding = False
    wanted = [triton.InferRequestedOutput("OUTPUT1")]
    result = bench.server.client.infer("fork", bench.make_inputs(2), outputs=wanted)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), 1 - np.arange(32, dtype=np.int32).reshape(2, 16))
    assert result.as_numpy("OUTPUT0") is None
    assert bench.statistics("simple").execution_count == before + 1


def test_ensembles_within_ensembles_and_what_is_counted(bench: Bench) -> None:
    bench.server.scheduler.holding = False
    result = bench.server.client.infer("nested", bench.make_inputs(2), parameters={"gangway_stats": True})
    a, b = expected(2)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), a + b)
    np.testing.assert_array_equal(result.as_numpy("OUTPUT1"), a - b)
    assert {"queue_us", "compute_us", "target_us"} <= {*result.get_response().parameters}
    nested, inner, simple = (bench.statistics(name) for name in ("nested", "diamond", "simple"))
    assert (nested.execution_count, inner.execution_count, simple.execution_count) == (1, 1, 5)
    assert (nested.inference_count, inner.inference_count, simple.inference_count) == (2, 2, 10)
    stats = nested.inference_stats
    assert stats.success.ns > stats.compute_infer.ns and stats.queue.ns == 0
    assert stats.compute_infer.ns == simple.inference_stats.compute_infer.ns
    assert stats.compute_input.ns == simple.inference_stats.compute_input.ns


def test_steps_with_a_schedule_are_members_of_one_compound_task(bench: Bench) -> None:
    fork, model = bench.served["fork"][1].ready, bench.served["simple"][1].ready
    bench.server.front_end.handle(replace(fork, compounds=((3, (model.model_id, model.model_id)),)))
    numbers = []
    for rows, outputs in ((1, None), (2, None), (1, [triton.InferRequestedOutput("OUTPUT0")]), (1, None)):
        bench.begin("fork", rows, outputs=outputs)
        for submit, request in [bench.held() for _ in range(1 if outputs else 2)]:
            numbers.append(request.compound)
            assert (request.join_key & NEVER_JOINED != 0) == (request.compound != 0)
            bench.answer(submit)
        assert not isinstance(bench.result(), InferenceServerException)
    first, last = numbers[0], numbers[-1]
    assert numbers == [first, first, 0, 0, 0, last, last]
    assert first >> 32 == last >> 32 == 3 and first != last


@pytest.mark.parametrize(
    ("steps", "busy", "used", "compute_us"),
    [
        (CHAIN_OF_TWO, (1.0, 1.0), (), 2000),
        (BRANCHES, (1.0, 1.0), (), 2000),
        (BRANCHES, (0.5, 0.5), (), 1000),
        (BRANCHES, (0.75, 0.5), (), 1250),
        (BRANCHES, (1.0, 1.0), (UsedSchedule(1, (7, 8), (0, 1), 1400.0),), 1400),
        ((*BRANCHES, LAST), (0.5, 0.5, 0.25), (), 2000),
        ((*BRANCHES, LAST), (1.0, 1.0, 1.0), (UsedSchedule(1, (7, 8), (0, 1), 1400.0),), 2400),
    ],
)
def test_branches_take_the_cores_together(
    steps: Sequence[Step], busy: Sequence[float], used: Sequence[UsedSchedule], compute_us: float
) -> None:
    config = config_of(INPUTS, OUTPUTS, steps)
    parsed = entry_of("any", config).config.ensemble_scheduling.step
    found = isolated_of(parsed, [ISOLATED] * len(steps), busy, used)
    assert found is not None and found.compute_us == compute_us
    links = 2 if steps == CHAIN_OF_TWO or len(steps) > 2 else 1
    assert found.latency_us == compute_us + links * 500, "each link of the chain is asked for"
    assert together(parsed) == ([[0, 1]] if steps != CHAIN_OF_TWO else [])


def test_a_reference_to_oneself_is_found() -> None:
    builder = EnsembleBuilder(no_schedules())
    one = entry_of("one", config_of(INPUTS, OUTPUTS, [("two", "INPUT0=INPUT0 INPUT1=INPUT1", BOTH)]))
    two = entry_of("two", config_of(INPUTS, OUTPUTS, [("one", "INPUT0=INPUT0 INPUT1=INPUT1", BOTH)]))
    for entry in (one, two):
        builder.want(entry.name, [entry])
    with pytest.raises(ConfigError, match=r"circular dependency between ensembles: one -> \.\.\. -> two -> one"):
        builder.make(one, {})
    assert one.qos == QosConfig()
