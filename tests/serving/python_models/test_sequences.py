"""Python models with `sequence_batching`: control inputs, and one instance for all requests of a sequence."""

import json
import os
import queue
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from testing.live_server import live_server
from testing.waiting import until
from tests.helpers.python_models import config_of, four, write
from tests.helpers.served import TIMEOUT_S, Served, inputs_of, serving

pytestmark = pytest.mark.long

# The sum of what a sequence has sent, which the instance keeps, and what it is told of each request.
SUMS = """
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        import json, os, time
        responses = []
        for r in requests:
            told = {t.name(): t.as_numpy().ravel().tolist() for t in r.inputs()}
            if told["START"] == [1]:
                self.sums[r.correlation_id()] = 0
            time.sleep(0.002)
            self.sums[r.correlation_id()] += told.pop("x")[0]
            told = {name: [each.decode() if isinstance(each, bytes) else each for each in value]
                    for name, value in told.items()}
            told |= {"sum": self.sums[r.correlation_id()], "pid": os.getpid(), "id": r.correlation_id(),
                     "flags": r.flags(), "shape": pb_utils.get_input_tensor_by_name(r, "START").shape()}
            if told["END"] == [1.5]:
                del self.sums[r.correlation_id()]
            told["kept"] = len(self.sums)
            y = np.array([json.dumps(told).encode()], dtype=object).reshape(SHAPE)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]))
        return responses
"""
CALLS = """
    def execute(self, requests):
        import json
        found = []
        for value, flags in ((1, 1), (2, 0), (3, 2)):
            x = pb_utils.Tensor("x", np.full(4, value, np.float32))
            response = pb_utils.InferenceRequest(model_name="single", inputs=[x], requested_output_names=["y"],
                                                 correlation_id=77, flags=flags).exec()
            found.append(json.loads(response.output_tensors()[0].as_numpy()[0])["sum"])
        y = np.array([json.dumps(found).encode()], dtype=object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]) for _ in requests]
"""

# Says whether two requests were there at the same time.
MEETS = """
    def initialize(self, args):
        import threading
        self.both = threading.Barrier(2)

    def execute(self, requests):
        import threading
        for request in requests:
            threading.Thread(target=self.meet, args=(request.get_response_sender(),), daemon=True).start()

    def meet(self, sender):
        import threading
        try:
            self.both.wait(5)
            y = b"met"
        except threading.BrokenBarrierError:
            y = b"alone"
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([y], dtype=object))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""


def control(name: str, kind: str, values: str) -> str:
    return f'control_input {{ name: "{name}" control {{ kind: CONTROL_SEQUENCE_{kind} {values} }} }}'


def sequences(corrid: str, more: str = "") -> str:
    controls = [
        control("START", "START", "int32_false_true: [0, 1]"),
        control("END", "END", "fp32_false_true: [0.5, 1.5]"),
        control("READY", "READY", "bool_false_true: [false, true]"),
        control("CORRID", "CORRID", f"data_type: TYPE_{corrid}"),
    ]
    return f"sequence_batching {{ {more} {' '.join(controls)} }}"


def of_shape(shape: tuple[int, ...]) -> str:
    return SUMS.replace("SHAPE", str(shape))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("repository")
    groups = "instance_group { count: COUNT kind: KIND_CPU }"
    single = config_of(outputs="y:STRING:1", more=sequences("UINT64"))
    write(repository, "single", of_shape((1,)), single)
    texts = config_of(outputs="y:STRING:1", more=sequences("STRING"))
    write(repository, "texts", of_shape((1,)), texts)
    oldest = sequences("INT64", "oldest { max_candidate_sequences: 8 }") + groups.replace("COUNT", "2")
    write(repository, "several", of_shape((1, 1)), config_of(outputs="y:STRING:1", batch=8, more=oldest))
    warm = (
        'model_warmup { name: "zeros" batch_size: 1 inputs { key: "x"'
        " value { data_type: TYPE_FP32 dims: [4] zero_data: true } } }"
    )
    write(repository, "warm", of_shape((1,)), single + warm)
    write(repository, "calls", CALLS, config_of(outputs="y:STRING:1"))
    decoupled = "model_transaction_policy { decoupled: true }"
    write(repository, "meets", MEETS, config_of(outputs="y:STRING:1", more=decoupled))
    with serving(repository, "--model-control-mode=explicit", "--load-model=*", cwd=repository.parent) as served:
        yield served


def send(served: Served, name: str, value: float, identity: int | str, start: bool = False, end: bool = False) -> Any:
    """What a model is told of a request of a sequence."""
    x = four(value)[None] if name == "several" else four(value)
    where = {"sequence_id": identity, "sequence_start": start, "sequence_end": end}
    result = served.client.infer(name, inputs_of({"x": x}), **where)
    return json.loads(result.as_numpy("y").ravel()[0])


def test_control_inputs(served: Served) -> None:
    told = send(served, "single", 2, 9, start=True)
    assert (told["START"], told["END"], told["READY"], told["CORRID"]) == ([1], [0.5], [True], [9])
    assert (told["id"], told["flags"], told["sum"], told["shape"]) == (9, 1, 2, [1])
    told = send(served, "single", 3, 9)
    assert (told["START"], told["END"], told["flags"], told["sum"]) == ([0], [0.5], 0, 5)
    told = send(served, "single", 4, 9, end=True)
    assert (told["START"], told["END"], told["flags"], told["sum"], told["kept"]) == ([0], [1.5], 2, 9, 0)
    told = send(served, "single", 1, 10, start=True, end=True)
    assert (told["flags"], told["sum"]) == (3, 1)


def test_ids_that_are_texts(served: Served) -> None:
    told = send(served, "texts", 2, "first-one", start=True, end=True)
    assert (told["CORRID"], told["id"]) == (["first-one"], "first-one")


def test_clients_do_not_see_control_inputs(served: Served) -> None:
    assert [tensor.name for tensor in served.client.get_model_metadata("single").inputs] == ["x"]
    with pytest.raises(InferenceServerException, match="unexpected inference input 'START'"):
        feeds = {"x": four(1), "START": np.ones(1, np.int32)}
        served.client.infer("single", inputs_of(feeds), sequence_id=1, sequence_start=True)
    with pytest.raises(InferenceServerException, match="must specify the START flag"):
        send(served, "single", 1, 123)


def test_all_requests_of_a_sequence_reach_one_instance(served: Served) -> None:
    def run(identity: int) -> set[int]:
        told = [send(served, "several", n, identity, start=n == 1, end=n == 10) for n in range(1, 11)]
        assert [each["sum"] for each in told] == [sum(range(1, n + 1)) for n in range(1, 11)]
        assert told[0]["shape"] == [1, 1]
        return {each["pid"] for each in told}

    with ThreadPoolExecutor(8) as pool:
        pids = list(pool.map(run, range(1, 33)))
    assert all(len(each) == 1 for each in pids)
    assert set.union(*pids) == set(served.instances("several"))


def test_a_model_makes_requests_of_a_sequence(served: Served) -> None:
    assert json.loads(served.infer("calls", x=four(0))["y"][0]) == [1, 3, 6]


def test_a_model_is_warmed_up(served: Served) -> None:
    assert send(served, "warm", 1, 5, start=True, end=True)["kept"] == 0


def test_an_instance_that_is_lost_takes_its_sequences_along(served: Served) -> None:
    send(served, "single", 1, 50, start=True)
    (pid,) = served.instances("single")
    os.kill(pid, signal.SIGKILL)
    until(lambda: served.instances("single") not in ([], [pid]))

    def starts_again() -> bool:
        try:
            return bool(send(served, "single", 4, 50, start=True, end=True)["sum"] == 4)
        except InferenceServerException as error:
            assert "UNAVAILABLE" in str(error.status())
            return False

    until(starts_again)


def test_several_front_ends_cannot_have_sequences(tmp_path_factory: pytest.TempPathFactory) -> None:
    repository = tmp_path_factory.mktemp("models")
    write(repository, "single", of_shape((1,)), config_of(outputs="y:STRING:1", more=sequences("UINT64")))
    flags = ["--front-ends=2", "--model-control-mode=explicit"]
    with (
        live_server(repository, flags, cwd=repository.parent) as server,
        triton.InferenceServerClient(server.url) as client,
        pytest.raises(InferenceServerException, match="must be 1 for this model"),
    ):
        client.load_model("single")


def test_without_sequences_the_requests_of_a_stream_do_not_wait_for_each_other(served: Served) -> None:
    """An id that they share means nothing, as in Triton."""
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with triton.InferenceServerClient(served.server.url) as client:
        client.start_stream(lambda result, error: found.put(error or result))
        for _ in range(2):
            client.async_stream_infer("meets", inputs_of({"x": four(1)}), sequence_id=5)
        answers = [found.get(timeout=TIMEOUT_S).as_numpy("y")[0] for _ in range(2)]
    assert answers == [b"met", b"met"]
