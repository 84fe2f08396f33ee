"""Targets, queue policies, priorities and clients that go away: one real server, under a policy that preempts.

How long a request to `heavy` takes stands in the request, and where events must come in an order the workers are held.
"""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from testing.live_server import LiveServer, live_server
from testing.waiting import until
from tests.conftest import CompiledZoo
from tests.helpers.stopped_workers import stopped_workers
from tests.helpers.tiny_model import least_s, orders_of, save_served

TIMEOUT_S = 30
HIGH, LOW = 1, 3
SHORT_US, LONG_US = 100, 5000  # of a task of `heavy`: 48 ms and 2.4 s of computing, a layer a fortieth of it
QOS = 'parameters { key: "qos_ms" value { string_value: "3x" } }'
HEAVY = """max_batch_size: 8 dynamic_batching { priority_levels: 3 default_priority_level: 2
    priority_queue_policy { key: 3 value { timeout_action: REJECT } } }"""  # of level 3
MODELS = {
    "plain": ("mobilenetv2", "dynamic_batching { default_queue_policy { timeout_action: DELAY max_queue_size: 4 } }"),
    "strict": ("mobilenetv2", 'parameters { key: "late" value { string_value: "reject" } }' + QOS),
    "quick": ("mlp", ""),
    "patient": ("mlp", QOS),
    "hasty": ("mlp", 'parameters { key: "late" value { string_value: "reject" } }' + QOS.replace("3x", "0.001")),
}
CLIENT = """
import sys, grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    print("sent", flush=True)
    channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(open(sys.argv[2], "rb").read())
"""


@dataclass(frozen=True)
class Served:
    """The server, a client of it, and where the scheduler's decisions are written."""

    server: LiveServer
    client: triton.InferenceServerClient
    decisions: Path

    def infer(self, model: str, rows: int = 1, task_us: float = 0, **options: Any) -> Any:
        return self.client.infer(model, inputs(model, rows, task_us), **options)

    def send(self, model: str, rows: int = 1, task_us: float = 0, **options: Any) -> "Future[None]":
        """Send a request; the future is that of its answer."""
        answer: Future[None] = Future()

        def done(result: Any, error: InferenceServerException | None) -> None:
            if error is None:
                answer.set_result(None)
            else:
                answer.set_exception(error)

        self.client.async_infer(model, inputs(model, rows, task_us), callback=done, **options)
        return answer

    def queue(self, model: str, rows: int = 1, **options: Any) -> "Future[None]":
        """Send a request, and wait until it waits behind the others."""
        before = self.server.waiting_slots()
        answer = self.send(model, rows, **options)
        until(lambda: self.server.waiting_slots() == before + 1)
        return answer

    def await_busy(self) -> None:
        """Wait until a request has begun."""
        until(lambda: self.server.busy_slots(running=True))

    def await_idle(self) -> float:
        """Wait until nothing is being executed; return the time."""
        until(lambda: not self.server.busy_slots(running=True))
        return time.monotonic()

    def started(self, count: int, since_us: float) -> list[str]:
        """Return the models of the first queries that the scheduler started from then on, in this order.

        What it decides is in the file a second later.
        """
        found: dict[int, str] = {}

        def complete() -> bool:
            whole, _, _ = self.decisions.read_text().rpartition("\n")
            for line in map(json.loads, whole.splitlines()):
                if line["decision"] == "Start" and line["time_us"] > since_us:
                    found.setdefault(line["query_id"], line["model"].partition(",")[0])
            return len(found) >= count

        until(complete)
        return list(found.values())

    def report(self, model: str, **options: Any) -> dict[str, Any]:
        """What the answer says of itself."""
        response = self.infer(model, parameters={"gangway_stats": True}, **options).get_response()
        return {name: value.int64_param for name, value in response.parameters.items()}

    def counts(self, model: str) -> dict[str, int]:
        """Our counters in ModelStatistics."""
        stats = self.client.get_inference_statistics(model).model_stats[0].response_stats
        return {name.removeprefix("gangway_"): int(entry.success.count) for name, entry in stats.items()}


def inputs(model: str, rows: int, task_us: float = 0) -> list[triton.InferInput]:
    if model == "heavy":
        tensor = triton.InferInput("orders", [rows, 16], "INT32")
        tensor.set_data_from_numpy(orders_of(rows, task_us))
        return [tensor]
    shape = [rows, 16] if model in ("quick", "patient", "hasty") else [rows, 3, 224, 224]
    tensor = triton.InferInput("input", shape, "FP32")
    tensor.set_data_from_numpy(np.zeros(shape, np.float32))
    return [tensor]


@pytest.fixture(scope="module")
def served(compiled_zoo: CompiledZoo, model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("deadlines")
    decisions = tmp_path_factory.mktemp("decisions") / "decisions.jsonl"
    save_served(repository, "heavy", model_cache, HEAVY)
    for name, (model, config) in MODELS.items():
        compiled_zoo.link(repository, name, model, config)
    flags = [f"--cache-dir={model_cache}", "--scheduler=edf", f"--trace-decisions={decisions}"]
    with live_server(repository, flags) as server, triton.InferenceServerClient(server.url) as client:
        yield Served(server, client, decisions)


@pytest.fixture(autouse=True)
def nothing_is_left(served: Served) -> Iterator[None]:
    pids = served.server.pids()
    yield
    served.await_idle()
    end = time.monotonic() + TIMEOUT_S
    while served.server.busy_slots():  # the next request gives back what an abandoned one left
        assert time.monotonic() < end
        served.infer("quick")
    assert served.server.pids() == pids


def milliseconds_of(text: str) -> float:
    return float(text.split(maxsplit=1)[0])


def test_the_smaller_of_target_and_timeout_counts(served: Served) -> None:
    until(lambda: "ready: gRPC" in served.server.log.read_text())  # after the summary
    summary = re.search(r"^patient +1 +([\d.]+ ms) +([\d.]+ ms) ", served.server.log.read_text(), re.MULTILINE)
    assert summary
    target_us = served.report("patient")["target_us"]
    assert target_us == pytest.approx(1000 * milliseconds_of(summary[2]), rel=0.01)
    config = served.client.get_model_config("patient", as_json=True)["config"]
    least_us = 1000 * float(config["parameters"]["gangway_least_target_ms"]["string_value"])
    assert target_us == pytest.approx(max(3000 * milliseconds_of(summary[1]), least_us), rel=0.01)
    assert served.report("patient", timeout=target_us // 2)["target_us"] == target_us // 2
    assert served.report("patient", timeout=60_000_000)["target_us"] == target_us
    assert served.report("quick")["target_us"] == 0
    assert served.report("quick", timeout=70_000)["target_us"] == 70_000
    assert re.search(r"^strict .* ms or refused ", served.server.log.read_text(), re.MULTILINE)


def test_answers_and_statistics_say_how_requests_were_executed(served: Served) -> None:
    before = served.counts("plain")
    first, second = served.report("plain"), served.report("plain", rows=4)
    after = served.counts("plain")
    assert all(report["blocks"] >= 1 and report["ranks"] >= 1 for report in (first, second))
    assert first["queue_us"] > 0 and first["compute_us"] > 0
    assert after["blocks"] - before["blocks"] == first["blocks"] + second["blocks"]
    assert after["version_0"] - before.get("version_0", 0) == 2
    assert served.report("heavy", rows=2, task_us=SHORT_US)["compute_us"] >= 1e6 * least_s(SHORT_US, rows=2)


def test_late_requests_are_served_unless_a_policy_says_otherwise(served: Served) -> None:
    before = served.counts("patient")
    assert served.infer("patient", timeout=1).as_numpy("output").shape == (1, 10)
    assert served.infer("plain", timeout=1).as_numpy("output").shape == (1, 1000)
    assert served.counts("patient")["qos_missed"] == before["qos_missed"] + 1


def test_what_cannot_be_in_time_is_refused_at_once(served: Served) -> None:
    before = served.counts("strict")
    with (
        stopped_workers(served.server),
        pytest.raises(InferenceServerException, match="Request timeout expired for model 'strict'") as caught,
    ):
        served.infer("strict", timeout=200, client_timeout=TIMEOUT_S)
    assert caught.value.status() == "StatusCode.UNAVAILABLE"
    after = served.counts("strict")
    assert (after["refused"], after["qos_missed"]) == (before["refused"] + 1, before["qos_missed"] + 1)
    assert after["blocks"] == before["blocks"]


def test_a_target_that_no_request_has_met_refuses_nobody(served: Served) -> None:
    before = served.counts("hasty")
    for _ in range(10):
        assert served.infer("hasty").as_numpy("output").shape == (1, 10)
    after = served.counts("hasty")
    assert (after["refused"], after["qos_missed"] - before["qos_missed"]) == (0, 10)
    warning = "hasty: its latency target of 0.001 ms is out of reach: a request takes "
    assert warning in served.server.log.read_text()


def test_a_backlog_that_makes_a_request_late_has_it_refused(served: Served) -> None:
    """As soon as that is certain: the backlog is not worked off before."""
    until(lambda: served.infer("strict", timeout=100_000) and served.counts("strict")["qos_met"])
    with stopped_workers(served.server):
        busy = served.send("heavy", priority=HIGH)
        served.await_busy()
        with pytest.raises(InferenceServerException, match="Request timeout expired") as caught:
            served.infer("strict", timeout=100_000, client_timeout=TIMEOUT_S)
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
        assert not busy.done()
    busy.result(TIMEOUT_S)


def test_a_request_may_be_refused_in_the_middle(served: Served) -> None:
    late = served.send("heavy", task_us=LONG_US, priority=LOW, timeout=int(0.4e6 * least_s(LONG_US)))
    served.await_busy()
    busy = served.send("heavy", task_us=SHORT_US, priority=HIGH)
    busy.result(TIMEOUT_S)
    with pytest.raises(InferenceServerException, match="Request timeout expired for model 'heavy'"):
        late.result(TIMEOUT_S)
    assert served.report("quick")["target_us"] == 0, "the cores are free"


def test_a_high_class_overtakes_the_queue_of_another_model_and_a_full_queue_refuses(served: Served) -> None:
    begin_us = time.monotonic_ns() / 1e3
    with stopped_workers(served.server):
        busy = served.send("heavy", task_us=SHORT_US, priority=HIGH)
        served.await_busy()
        queue = [served.queue("plain", 4) for _ in range(4)]
        with pytest.raises(InferenceServerException, match="Exceeds maximum queue size: 4 requests wait") as caught:
            served.infer("plain", 4, client_timeout=TIMEOUT_S)
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
        normal, urgent = served.queue("quick"), served.queue("quick", priority=HIGH)
    for answer in (busy, urgent, *queue, normal):
        answer.result(TIMEOUT_S)
    assert served.started(7, begin_us) == ["heavy", "quick", *["plain"] * 4, "quick"]


def test_a_call_that_times_out_gives_its_cores_back(served: Served) -> None:
    before = served.counts("heavy")
    begin = time.monotonic()
    with pytest.raises(InferenceServerException) as caught:
        served.infer("heavy", task_us=LONG_US, client_timeout=0.5, timeout=60_000_000)
    assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    served.infer("quick")
    assert served.await_idle() - begin < least_s(LONG_US)
    until(lambda: served.counts("heavy")["qos_missed"] == before["qos_missed"] + 1)
    assert served.counts("heavy")["refused"] == before["refused"]


def test_a_client_that_is_killed_gives_its_cores_back(served: Served, tmp_path: Path) -> None:
    request = tmp_path / "request"
    tensor = inputs("heavy", 1, LONG_US)[0]
    message = triton.service_pb2.ModelInferRequest(model_name="heavy", raw_input_contents=[tensor._get_content()])
    message.inputs.append(tensor._get_tensor())
    request.write_bytes(message.SerializeToString())
    command = [sys.executable, "-c", CLIENT, served.server.url, str(request)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline()
        begin = time.monotonic()
        served.await_busy()
        process.send_signal(signal.SIGKILL)
        assert served.await_idle() - begin < least_s(LONG_US)
    assert process.returncode == -signal.SIGKILL
    served.infer("quick")
