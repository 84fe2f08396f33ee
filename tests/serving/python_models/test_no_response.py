"""A request to which no response can come any more is ended, wherever the model stands. Triton's client waits on."""

import queue
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from testing.waiting import until
from tests.helpers import ensemble_configs
from tests.helpers.python_models import config_of, four, write
from tests.helpers.served import TIMEOUT_S, Served, inputs_of, serving

NONE = "[None for _ in requests]"
# What a model does with a request whose first number is 1, 2, 3 or 4; any other is answered.
FORGETS = {
    "returns_none": f"return {NONE}",
    "returns_nothing": "return None",
    "drops_sender": f"[each.get_response_sender() for each in requests]; return {NONE}",
    "thread_ends": f"threading.Timer(0, self.fail, [requests[0].get_response_sender()]).start(); return {NONE}",
}
BODY = """
    def fail(self, sender):
        raise ValueError("in a thread")

    def execute(self, requests):
        first = {each.inputs()[0].as_numpy().ravel()[0] for each in requests}
        FORGETS
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", each.inputs()[0].as_numpy())]) for each in requests]
"""
CALLS = """
    def execute(self, requests):
        found = []
        for request in requests:
            inner = pb_utils.InferenceRequest(model_name="forgets", inputs=request.inputs(),
                requested_output_names=["y"]).exec()
            found.append(pb_utils.InferenceResponse(inner.output_tensors(), inner.error()))
        return found
"""
LATER = """
    def send(self, sender, x):
        sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]), 1)

    def execute(self, requests):
        for each in requests:
            threading.Timer(0.1, self.send, (each.get_response_sender(), each.inputs()[0].as_numpy())).start()
        return [None for _ in requests]
"""
STREAMS = """
    def execute(self, requests):
        for each in requests:
            each.get_response_sender().send(
                pb_utils.InferenceResponse([pb_utils.Tensor("y", each.inputs()[0].as_numpy())]))
"""
HEAD = "import threading\nimport triton_python_backend_utils as pb_utils\n\n\n"
ENSEMBLES = {
    "first": ("forgets", "keeps"),
    "middle": ("keeps", "forgets", "keeps"),
    "last": ("keeps", "forgets"),
}
TEXT = r"INTERNAL.*has let go of a request without a response"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("repository")
    code = "\n        ".join(f"if {number} in first: {each}" for number, each in enumerate(FORGETS.values(), 1))
    write(repository, "forgets", BODY.replace("FORGETS", code), head=HEAD)
    coroutine = BODY.replace("FORGETS", f"if 1 in first: return {NONE}").replace("def ex", "async def ex")
    write(repository, "coroutine", coroutine, head=HEAD)
    one_of_two = "if 1 in first: return [None, *map(lambda _: pb_utils.InferenceResponse([]), requests[1:])]"
    batches = config_of(batch=2, more="dynamic_batching { max_queue_delay_microseconds: 1000000 }")
    write(repository, "batch", BODY.replace("FORGETS", one_of_two), batches, HEAD)
    write(repository, "calls", CALLS, head=HEAD)
    write(repository, "keeps", BODY.replace("FORGETS", "pass"), head=HEAD)
    write(repository, "later", LATER, head=HEAD)
    write(repository, "streams", STREAMS, config_of(more="model_transaction_policy { decoupled: true }"), HEAD)
    for name, models in ENSEMBLES.items():
        tensors = ["x", *(f"t{number}" for number in range(1, len(models))), "y"]
        steps = [
            (model, f"x={given}", f"y={found}")
            for model, given, found in zip(models, tensors, tensors[1:], strict=False)
        ]
        ensemble_configs.write(repository, name, ensemble_configs.config_of("x:FP32:4", "y:FP32:4", steps, batch=0))
    with serving(repository) as served:
        yield served


@pytest.mark.parametrize("name", [*FORGETS, "coroutine", "calls", *ENSEMBLES])
def test_it_is_an_error_at_once(served: Served, name: str) -> None:
    model, number = ("forgets", 1 + list(FORGETS).index(name)) if name in FORGETS else (name, 1)
    with pytest.raises(InferenceServerException, match=TEXT):
        served.infer(model, x=four(number))
    assert np.array_equal(served.infer(model, x=four(9))["y"], four(9))
    until(lambda: served.server.busy_slots() == 0)


def test_it_concerns_that_request_of_a_batch_only(served: Served) -> None:
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    for _ in range(2):
        inputs = inputs_of({"x": four(1)[None]})
        served.client.async_infer("batch", inputs, lambda result, error: found.put(error), client_timeout=TIMEOUT_S)
    errors = [str(found.get(timeout=TIMEOUT_S)) for _ in range(2)]
    assert sorted("has let go of a request" in each for each in errors) == [False, True]
    assert "None" in errors


def test_a_response_may_come_later(served: Served) -> None:
    assert np.array_equal(served.infer("later", x=four(1))["y"], four(1))


def test_a_stream_ends(served: Served) -> None:
    """Its responses have come; that there are no more is no error."""
    found: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with triton.InferenceServerClient(served.server.url) as client:
        client.start_stream(lambda result, error: found.put((result, error)))
        client.async_stream_infer("streams", inputs_of({"x": four(3)}), enable_empty_final_response=True)
        answers = [found.get(timeout=TIMEOUT_S) for _ in range(2)]
    assert [error for _, error in answers] == [None, None]
    finals = [result.get_response().parameters["triton_final_response"].bool_param for result, _ in answers]
    assert finals == [False, True]
    assert np.array_equal(answers[0][0].as_numpy("y"), four(3))
