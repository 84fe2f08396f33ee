"""Answers of Python models that are too large to be sent: refused where they are made, at the cost of nobody else."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import requests
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from gangway.base.memory_budget import MESSAGE_SHARE, memory_budget
from testing.live_server import live_server
from testing.waiting import until
from tests.helpers.own_time import OwnTime
from tests.helpers.python_models import HEAD, config_of, four, parameter, write
from tests.helpers.served import TIMEOUT_S, Array, Served, inputs_of, serving

pytestmark = pytest.mark.long

MOST_BYTES = 256 << 20
LARGE_MIB = 1500
COPIED_MIB = 300  # what a model's process copies before it is refused: pages of more keep a core for seconds
SPARE_BYTES = 48 << 20  # what a process may take for a request that is refused
SLOWEST_S = 1.0  # of another model's answers
MIB = 1 << 20
RAISED_BYTES = 320 * MIB
# x: kind, MiB, and whether the model's own check is on. The array's pages are never touched: they take no memory.
ANSWER = """

def answer(x):
    kind, size_mib, is_checked = map(int, x[:3])
    if not is_checked:
        executions = sys.modules["gangway.python_backend.executions"]
        executions.size_of = lambda array, enough_bytes: 0
    if kind == 1:
        text = b"x" * (1 << 20)
        y = np.array([text] * size_mib, dtype=object)
        return pb_utils.InferenceResponse([pb_utils.Tensor("text", y)])
    if kind == 2:
        y = np.zeros(1, np.uint8)
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", y)], parameters={"p": "x" * (size_mib << 20)})
    if kind == 3:
        return pb_utils.InferenceResponse(error=pb_utils.TritonError("x" * (size_mib << 20)))
    return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.zeros(size_mib << 20, np.uint8))])


"""
EXECUTE = """
    def execute(self, requests):
        return [answer(pb_utils.get_input_tensor_by_name(each, "x").as_numpy()) for each in requests]
"""
SEND = """
    def execute(self, requests):
        for each in requests:
            x = pb_utils.get_input_tensor_by_name(each, "x").as_numpy()
            sender = each.get_response_sender()
            sender.send(answer([0, 1, 1]))
            threading.Thread(target=self.rest, args=(sender, x)).start()

    def rest(self, sender, x):
        try:
            sender.send(answer(x))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        except pb_utils.TritonModelException as error:
            print("the model is told:", error)
"""
ASK = """
    def execute(self, requests):
        responses = []
        for each in requests:
            x = pb_utils.get_input_tensor_by_name(each, "x")
            inner = pb_utils.InferenceRequest(model_name="large", requested_output_names=["y"], inputs=[x]).exec()
            if inner.has_error():
                responses.append(pb_utils.InferenceResponse(error=inner.error()))
            else:
                size = len(pb_utils.get_output_tensor_by_name(inner, "y").as_numpy())
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.full(1, size % 251, np.uint8))]))
        return responses
"""
GIVE = """
    def execute(self, requests):
        x = pb_utils.Tensor("x", np.zeros(int(pb_utils.get_input_tensor_by_name(requests[0], "x").as_numpy()[1]) << 18,
                                         np.float32))
        inner = pb_utils.InferenceRequest(model_name="sums", requested_output_names=["y"], inputs=[x]).exec()
        return [pb_utils.InferenceResponse(error=inner.error())]
"""
SUM = """
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.zeros(1, np.uint8))]) for each in requests]
"""
STEPS = """
platform: "ensemble"
input { name: "x" data_type: TYPE_FP32 dims: [4] }
output { name: "y" data_type: TYPE_UINT8 dims: [-1] }
ensemble_scheduling {
  step { model_name: "large" model_version: -1
    input_map { key: "x" value: "x" } output_map { key: "y" value: "between" } }
  step { model_name: "bytes" model_version: -1
    input_map { key: "x" value: "between" } output_map { key: "y" value: "y" } }
}
"""
MEMORY = parameter("gangway_python_memory_mib", 8000)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("repository")
    head = f"import sys, threading\n{HEAD}{ANSWER}"
    large = config_of("x:FP32:4", "y:UINT8:-1 text:STRING:-1", more=MEMORY)
    write(repository, "large", EXECUTE, large, head)
    decoupled = f"{MEMORY}\nmodel_transaction_policy {{ decoupled: true }}"
    write(repository, "sender", SEND, config_of("x:FP32:4", "y:UINT8:-1 text:STRING:-1", more=decoupled), head)
    write(repository, "asker", ASK, config_of("x:FP32:4", "y:UINT8:-1", more=MEMORY), head)
    write(repository, "giver", GIVE, config_of("x:FP32:4", "y:UINT8:-1", more=MEMORY), head)
    write(repository, "sums", SUM, config_of("x:FP32:-1", "y:UINT8:-1"))
    write(repository, "bytes", SUM, config_of("x:UINT8:-1", "y:UINT8:-1"))
    write(repository, "other")
    (repository / "whole" / "1").mkdir(parents=True)
    (repository / "whole" / "config.pbtxt").write_text(STEPS)
    with serving(repository) as served:
        yield served


def ask(kind: int = 0, size_mib: int = LARGE_MIB, is_checked: bool = True) -> Array:
    return np.array([kind, size_mib, is_checked, 0], np.float32)


@contextmanager
def nobody_pays(served: Served) -> Iterator[None]:
    """Worker and front end take no memory for what happens, and another model answers meanwhile."""
    served.infer("other", x=four(1))
    pids = [pid for role in ("worker", "front end", "supervisor", "scheduler") for pid in served.server.pids()[role]]
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the highest amount is counted from here on
    before = {pid: highest_bytes(pid) for pid in pids}
    stop, own_time = threading.Event(), OwnTime()

    def ask_other() -> None:
        with triton.InferenceServerClient(served.server.url) as client:
            while not stop.is_set():
                begin = time.monotonic()
                client.infer("other", inputs_of({"x": four(1)}), client_timeout=TIMEOUT_S)
                own_time.waited(begin)

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(ask_other)
        try:
            yield
        finally:
            stop.set()
        asking.result(TIMEOUT_S)
    assert own_time.longest_s < SLOWEST_S
    assert {pid: grown for pid in pids if (grown := highest_bytes(pid) - before[pid]) > SPARE_BYTES} == {}


def highest_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


TOO_LARGE = rf"RESOURCE_EXHAUSTED.*the answer of model 'large' has {LARGE_MIB * MIB} bytes, {MOST_BYTES} are possible"


@pytest.mark.parametrize("name", ["large", "whole"])
def test_an_answer_that_is_too_large(served: Served, name: str) -> None:
    with nobody_pays(served), pytest.raises(InferenceServerException, match=TOO_LARGE):
        served.infer(name, x=ask())


def test_over_http(served: Served) -> None:
    x = {"name": "x", "datatype": "FP32", "shape": [4], "data": ask().tolist()}
    url = f"http://{served.server.http_url}/v2/models/large/infer"
    with nobody_pays(served):
        answer = requests.post(url, json={"inputs": [x]}, timeout=TIMEOUT_S)
    assert answer.status_code != 200
    assert f"has {LARGE_MIB * MIB} bytes, {MOST_BYTES} are possible" in answer.json()["error"]


def test_texts_parameters_and_messages(served: Served) -> None:
    with nobody_pays(served):
        with pytest.raises(InferenceServerException, match=rf"RESOURCE_EXHAUSTED.* bytes, {MOST_BYTES} are possible"):
            served.infer("large", x=ask(1))
        with pytest.raises(InferenceServerException, match=r"RESOURCE_EXHAUSTED.*has parameters of \d+ bytes"):
            served.infer("large", x=ask(2, 100))
        with pytest.raises(InferenceServerException, match=r"INTERNAL.*x{100}"):
            served.infer("large", x=ask(3, 100))


def test_what_another_model_asks_for(served: Served) -> None:
    """Triton has no code for it, so the model that asks gets INTERNAL, and the sentence."""
    with nobody_pays(served):
        with pytest.raises(InferenceServerException, match=rf"INTERNAL.*{LARGE_MIB * MIB} bytes, {MOST_BYTES} are"):
            served.infer("asker", x=ask())
        with pytest.raises(InferenceServerException, match=rf"the request to model 'sums' has {LARGE_MIB * MIB} bytes"):
            served.infer("giver", x=ask())


@pytest.mark.parametrize("is_checked", [True, False])
def test_responses_that_are_sent(served: Served, is_checked: bool) -> None:
    """A stream ends with the error in place of the response; the model is told, and cannot go on."""
    size_mib = LARGE_MIB if is_checked else COPIED_MIB
    messages: list[str] = []
    ended = threading.Event()

    def take(result: triton.InferResult | None, error: InferenceServerException | None) -> None:
        messages.append(str(error) if result is None else str(len(result.as_numpy("y"))))
        if len(messages) == 2:
            ended.set()

    with nobody_pays(served), triton.InferenceServerClient(served.server.url) as client:
        client.start_stream(take)
        client.async_stream_infer("sender", inputs_of({"x": ask(0, size_mib, is_checked)}))
        assert ended.wait(TIMEOUT_S)
        client.stop_stream()
    assert messages[0] == str(MIB)
    assert f"the answer of model 'sender' has {size_mib * MIB} bytes, {MOST_BYTES} are possible" in messages[1]
    if is_checked:  # after its client, and the log is another process's
        until(lambda: "the model is told: the answer of model 'sender'" in served.log())


def test_an_instance_that_does_not_check(served: Served) -> None:
    """The front end refuses by the size that comes first."""
    (instance,) = served.instances("large")
    with nobody_pays(served), pytest.raises(InferenceServerException, match=TOO_LARGE):
        served.infer("large", x=ask(is_checked=False))
    assert np.array_equal(served.infer("large", x=ask(0, 1))["y"], np.zeros(MIB, np.uint8))
    assert served.instances("large") == [instance]


def test_the_largest_answers_come(served: Served) -> None:
    for name in ("large", "whole"):
        assert len(served.infer(name, x=ask(0, 200))["y"]) == (200 * MIB if name == "large" else 1)


@pytest.mark.skipif(memory_budget().limit.size_bytes < RAISED_BYTES / MESSAGE_SHARE, reason="needs 10 GiB of memory")
def test_a_flag_lets_answers_be_as_large_as_messages(tmp_path: Path) -> None:
    head = f"import sys, threading\n{HEAD}{ANSWER}"
    write(tmp_path / "models", "large", EXECUTE, config_of("x:FP32:4", "y:UINT8:-1 text:STRING:-1", more=MEMORY), head)
    flags = [f"--cache-dir={tmp_path / 'cache'}", f"--grpc-max-message-bytes={RAISED_BYTES}"]
    with live_server(tmp_path / "models", flags) as server, triton.InferenceServerClient(server.url) as client:
        served = Served(server, client, tmp_path / "models")
        size = served.infer("large", x=ask(0, COPIED_MIB))["y"].size
        assert size == COPIED_MIB * MIB > MOST_BYTES
        with pytest.raises(InferenceServerException, match=rf"{LARGE_MIB * MIB} bytes, {RAISED_BYTES} are possible"):
            served.infer("large", x=ask())
