"""Targets, queue policies, priorities and clients that go away: one real server, under a policy that preempts.

`heavy` with all its rows takes so long (LONG_S and more) that a test can do something in the middle of it.
"""

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

from benchmarks.live_server import LiveServer, live_server

TIMEOUT_S = 30
HEAVY_ROWS = 8
HIGH, LOW = 1, 3
IMAGE, FLOATS = (3, 224, 224), (16,)
QOS = 'parameters { key: "qos_ms" value { string_value: "3x" } }'
MODELS = {
    "heavy": (  # level 3 is refused when it is late
        "resnet50",
        """max_batch_size: 8 dynamic_batching { priority_levels: 3 default_priority_level: 2
        priority_queue_policy { key: 3 value { timeout_action: REJECT allow_timeout_override: true } } }""",
    ),
    "plain": ("mobilenetv2", "dynamic_batching { default_queue_policy { timeout_action: DELAY max_queue_size: 4 } }"),
    "strict": ("mobilenetv2", 'parameters { key: "late" value { string_value: "reject" } }' + QOS),
    "quick": ("mlp", ""),
    "patient": ("mlp", QOS),
}
CLIENT = """
import sys, grpc
with grpc.insecure_channel(sys.argv[1]) as channel:
    print("sent", flush=True)
    channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(open(sys.argv[2], "rb").read())
"""


@dataclass(frozen=True)
class Served:
    """The server, a client of it, and how long `heavy` takes with all rows."""

    server: LiveServer
    client: triton.InferenceServerClient
    long_s: float

    def infer(self, model: str, rows: int = 1, **options: Any) -> Any:
        return self.client.infer(model, inputs(model, rows), **options)

    def send(self, model: str, rows: int = 1, **options: Any) -> "Future[float]":
        """Send a request; the future has the time of its answer."""
        answer: Future[float] = Future()

        def done(result: Any, error: InferenceServerException | None) -> None:
            if error is None:
                answer.set_result(time.monotonic())
            else:
                answer.set_exception(error)

        self.client.async_infer(model, inputs(model, rows), callback=done, **options)
        return answer

    def block(self, **options: Any) -> "Future[float]":
        """Have `heavy` take all cores, before everything of a normal class."""
        busy = self.send("heavy", HEAVY_ROWS, priority=HIGH, **options)
        self.await_busy()
        return busy

    def await_busy(self) -> None:
        """Wait until a request is being executed."""
        end = time.monotonic() + TIMEOUT_S
        while not self.server.busy_slots(running=True):
            assert time.monotonic() < end

    def await_idle(self) -> float:
        """Wait until nothing is being executed; return the time."""
        end = time.monotonic() + TIMEOUT_S
        while self.server.busy_slots(running=True):
            assert time.monotonic() < end
        return time.monotonic()

    def report(self, model: str, **options: Any) -> dict[str, Any]:
        """What the answer says of itself."""
        response = self.infer(model, parameters={"gangway_stats": True}, **options).get_response()
        return {name: value.int64_param for name, value in response.parameters.items()}

    def counts(self, model: str) -> dict[str, int]:
        """Our counters in ModelStatistics."""
        stats = self.client.get_inference_statistics(model).model_stats[0].response_stats
        return {name.removeprefix("gangway_"): int(entry.success.count) for name, entry in stats.items()}


def inputs(model: str, rows: int) -> list[triton.InferInput]:
    shape = [rows, *(FLOATS if model in ("quick", "patient") else IMAGE)]
    tensor = triton.InferInput("input", shape, "FP32")
    tensor.set_data_from_numpy(np.zeros(shape, np.float32))
    return [tensor]


@pytest.fixture(scope="module")
def served(compiled_zoo: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("deadlines")
    for name, (model, config) in MODELS.items():
        (repository / name).mkdir()
        (repository / name / "1").symlink_to(compiled_zoo.repository / model / "1")
        (repository / name / "config.pbtxt").write_text(config)
    flags = [f"--cache-dir={compiled_zoo.cache_dir}", "--scheduler=edf"]
    with live_server(repository, flags) as server, triton.InferenceServerClient(server.url) as client:
        served = Served(server, client, 0.0)
        served.infer("heavy", HEAVY_ROWS)  # the first time pages are given
        begin = time.monotonic()
        served.infer("heavy", HEAVY_ROWS)
        yield Served(server, client, time.monotonic() - begin)


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
    summary = re.search(r"^patient +1 +([\d.]+ ms) +([\d.]+ ms) ", served.server.log.read_text(), re.MULTILINE)
    assert summary
    target_us = served.report("patient")["target_us"]
    assert target_us == pytest.approx(1000 * milliseconds_of(summary[2]), rel=0.01)
    assert target_us == pytest.approx(3000 * milliseconds_of(summary[1]), rel=0.01)
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
    assert first["queue_us"] > 0
    assert second["compute_us"] > first["compute_us"] > 0
    assert after["blocks"] - before["blocks"] == first["blocks"] + second["blocks"]
    assert after["version_0"] - before.get("version_0", 0) == 2


def test_late_requests_are_served_unless_a_policy_says_otherwise(served: Served) -> None:
    before = served.counts("patient")
    assert served.infer("patient", timeout=1).as_numpy("output").shape == (1, 10)
    assert served.infer("plain", timeout=1).as_numpy("output").shape == (1, 1000)
    assert served.counts("patient")["qos_missed"] == before["qos_missed"] + 1


def test_what_cannot_be_in_time_is_refused_at_once(served: Served) -> None:
    before = served.counts("strict")
    begin = time.monotonic()
    with pytest.raises(InferenceServerException, match="Request timeout expired for model 'strict'") as caught:
        served.infer("strict", timeout=200)
    assert time.monotonic() - begin < 0.5 * served.long_s
    assert caught.value.status() == "StatusCode.UNAVAILABLE"
    after = served.counts("strict")
    assert (after["refused"], after["qos_missed"]) == (before["refused"] + 1, before["qos_missed"] + 1)
    assert after["blocks"] == before["blocks"]


def test_a_backlog_that_makes_a_request_late_has_it_refused(served: Served) -> None:
    busy = served.block()
    with pytest.raises(InferenceServerException, match="Request timeout expired") as caught:
        served.infer("strict", timeout=int(0.2e6 * served.long_s))
    assert caught.value.status() == "StatusCode.UNAVAILABLE"
    assert not busy.done(), "as soon as it was certain"
    busy.result(TIMEOUT_S)


def test_a_request_may_be_refused_in_the_middle(served: Served) -> None:
    begin = time.monotonic()
    late = served.send("heavy", HEAVY_ROWS, priority=LOW, timeout=int(1.4e6 * served.long_s))
    served.await_busy()
    assert not late.done()
    busy = served.send("heavy", HEAVY_ROWS, priority=HIGH)
    assert busy.result(TIMEOUT_S) > begin
    with pytest.raises(InferenceServerException, match="Request timeout expired for model 'heavy'"):
        late.result(TIMEOUT_S)
    assert served.report("quick")["target_us"] == 0, "the cores are free"


def test_a_high_class_overtakes_the_queue_of_another_model_and_a_full_queue_refuses(served: Served) -> None:
    busy = served.block()
    queue = [served.send("plain", 4) for _ in range(4)]
    normal = served.send("quick")
    with pytest.raises(InferenceServerException, match="Exceeds maximum queue size: 4 requests wait") as caught:
        served.infer("plain", 4)
    assert caught.value.status() == "StatusCode.UNAVAILABLE"
    urgent = served.send("quick", priority=HIGH)
    answered = [answer.result(TIMEOUT_S) for answer in (busy, urgent, *queue, normal)]
    assert answered[1] < min(answered[2:6]), "it came after them"
    assert max(answered[2:5]) < answered[6], "in their own class first come goes first"


def test_a_call_that_times_out_gives_its_cores_back(served: Served) -> None:
    before = served.counts("heavy")
    with pytest.raises(InferenceServerException) as caught:
        served.infer("heavy", HEAVY_ROWS, client_timeout=0.3 * served.long_s, timeout=int(2e6 * served.long_s))
    begin = time.monotonic()
    assert caught.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    assert served.await_idle() - begin < 0.4 * served.long_s
    served.infer("quick")
    assert time.monotonic() - begin < 0.5 * served.long_s
    after = served.counts("heavy")
    assert (after["qos_missed"], after["refused"]) == (before["qos_missed"] + 1, before["refused"])


def test_a_client_that_is_killed_gives_its_cores_back(served: Served, tmp_path: Path) -> None:
    request = tmp_path / "request"
    tensor = inputs("heavy", HEAVY_ROWS)[0]
    message = triton.service_pb2.ModelInferRequest(model_name="heavy", raw_input_contents=[tensor._get_content()])
    message.inputs.append(tensor._get_tensor())
    request.write_bytes(message.SerializeToString())
    command = [sys.executable, "-c", CLIENT, served.server.url, str(request)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline()
        served.await_busy()
        process.send_signal(signal.SIGKILL)
        begin = time.monotonic()
        assert served.await_idle() - begin < 0.5 * served.long_s
    assert process.returncode == -signal.SIGKILL
    served.infer("quick")
