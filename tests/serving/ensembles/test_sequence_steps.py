"""Ensembles with steps that keep state: the client's sequence is that of the step, over each protocol."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from testing.waiting import until
from tests.helpers import ensemble_configs, sequence_models
from tests.helpers.python_models import TEXTS
from tests.helpers.sequence_models import MODULES, oldest, run_stream, run_unary
from tests.helpers.served import Served, inputs_of, serving
from tests.helpers.stream_models import DECOUPLED, generated, streamed, text_request, write_text_model

pytestmark = pytest.mark.long
X, Y = TEXTS
BATCHING = """
sequence_batching { max_sequence_idle_microseconds: 1000000
  control_input { name: "START" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }
  control_input { name: "END" control { kind: CONTROL_SEQUENCE_END int32_false_true: [0, 1] } }
  control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } } }
"""
# Answers with all texts of the sequence, its id, and its flags: from the request, and as control inputs.
REMEMBERS = """
    def initialize(self, args):
        self.seen = {}

    def execute(self, requests):
        found = []
        for request in requests:
            said = [str(pb_utils.get_input_tensor_by_name(request, name).as_numpy()[0]) for name in ("START", "END")]
            identity = request.correlation_id()
            if said[0] == "1":
                self.seen[identity] = ""
            self.seen[identity] += text(request)
            found.append(answer(f"{self.seen[identity]} {identity} {request.flags()} {''.join(said)}"))
        return found
"""
TAG = """
    def execute(self, requests):
        return [answer(f"<{text(request)}>") for request in requests]
"""
TELLS = """
    def execute(self, requests):
        return [answer(f"{text(r)} {r.correlation_id()} {r.flags()}") for r in requests]
"""
SPLIT = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            for letter in "12":
                sender.send(answer(text(request) + letter))
            sender.send(flags=FINAL)
"""
STEPS = {
    "tagged": [("tag", "x=x", "y=t"), ("remembers", "x=t", "y=y")],
    "nested": [("tag", "x=x", "y=t"), ("tagged", "x=t", "y=y")],
    "telling": [("remembers", "x=x", "y=t"), ("tells", "x=t", "y=y")],
    "twice": [("split", "x=x", "y=t"), ("remembers", "x=t", "y=y")],
}
SUMS = ("INPUT:INT32:1", "OUTPUT:INT32:1")
SPELLED = ("INPUT:STRING:1", "OUTPUT:INT32:1")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository, cache = tmp_path_factory.mktemp("repository"), tmp_path_factory.mktemp("cache")
    sequence_models.save(
        repository,
        cache,
        {"compiled": sequence_models.config_of(oldest(4))},
        {"spelled": sequence_models.config_of(oldest(4))},
    )
    for name, tensors in (("compiled", SUMS), ("spelled", SPELLED)):
        steps = [(name, "INPUT=INPUT", "OUTPUT=OUTPUT")]
        ensemble_configs.write(repository, f"sum_{name}", ensemble_configs.config_of(*tensors, steps, batch=8))
    write_text_model(repository, "remembers", REMEMBERS, more=BATCHING)
    write_text_model(repository, "tag", TAG)
    write_text_model(repository, "tells", TELLS)
    write_text_model(repository, "split", SPLIT, more=DECOUPLED)
    for name, steps in STEPS.items():
        ensemble_configs.write(repository, name, ensemble_configs.config_of(X, Y, steps, batch=0))
    with serving(repository, f"--cache-dir={cache}", "--max-shapes=0", cwd=repository.parent) as served:
        yield served


def flags(index: int, count: int = 3) -> dict[str, bool]:
    return {"sequence_start": index == 0, "sequence_end": index == count - 1}


def asked(served: Served, path: str, name: str, identity: Any) -> list[str]:
    """What a sequence of three requests is answered over one of the ways."""
    url = served.server.url
    if path == "stream":
        requests = [
            text_request(name, letter, identity=letter, sequence_id=identity, **flags(index))
            for index, letter in enumerate("abc")
        ]
        return [each.word for each in streamed(url, *requests)]
    found = []
    for index, letter in enumerate("abc"):
        if path == "generate":
            answer = generated(served.server.http_url, name, letter, "generate", sequence_id=identity, **flags(index))
            found.append(answer.content["y"])
        else:
            x = {"x": np.array([letter.encode()], dtype=object)}
            result = served.client.infer(name, inputs_of(x), sequence_id=identity, **flags(index))
            found.append(result.as_numpy("y")[0].decode())
    return found


WANTED = {
    "remembers": ["a {0} 1 10", "ab {0} 0 00", "abc {0} 2 01"],
    "tagged": ["<a> {0} 1 10", "<a><b> {0} 0 00", "<a><b><c> {0} 2 01"],
    "nested": ["<<a>> {0} 1 10", "<<a>><<b>> {0} 0 00", "<<a>><<b>><<c>> {0} 2 01"],
    "telling": ["a {0} 1 10 {0} 1", "ab {0} 0 00 {0} 0", "abc {0} 2 01 {0} 2"],
}


@pytest.mark.parametrize("name", WANTED)
@pytest.mark.parametrize("path", ["stream", "call", "generate"])
@pytest.mark.parametrize("identity", [7, "seven"])
def test_a_sequence(served: Served, name: str, path: str, identity: Any) -> None:
    assert asked(served, path, name, identity) == [each.format(identity) for each in WANTED[name]]


def test_sequences_at_the_same_time(served: Served) -> None:
    found: dict[int, list[str]] = {}
    threads = [
        threading.Thread(target=lambda key: found.update({key: asked(served, "stream", "tagged", key)}), args=(key,))
        for key in range(1, 9)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {key: [each.format(key) for each in WANTED["tagged"]] for key in range(1, 9)}


def test_a_request_for_each_response_of_a_decoupled_step(served: Served) -> None:
    requests = [text_request("twice", letter, sequence_id=9, sequence_start=letter == "a") for letter in "ab"]
    found = [each.word.split()[0] for each in streamed(served.server.url, *requests)]
    assert found == ["a1", "a2", "a2b1", "a2b1b2"]  # each of them has the flags of the client's request


@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({}, "must specify a non-zero or non-empty correlation ID"),
        ({"sequence_id": 77}, "must specify the START flag on the first request of the sequence"),
        ({"sequence_id": True}, "invalid value type for 'sequence_id' parameter"),
        ({"sequence_id": 5, "sequence_start": "yes"}, "invalid value type for 'sequence_start' parameter"),
    ],
)
def test_refusals_are_those_of_the_step(served: Served, parameters: dict[str, Any], reason: str) -> None:
    before = served.client.get_inference_statistics("tagged").model_stats[0].inference_stats.fail.count
    (found,) = streamed(served.server.url, text_request("tagged", "a", **parameters))
    assert reason in found.word
    if "type" not in reason:
        assert found.word.startswith("!in ensemble 'tagged', step 1 ('remembers'): inference request")
        until(
            lambda: (
                served.client.get_inference_statistics("tagged").model_stats[0].inference_stats.fail.count == before + 1
            )
        )


def test_what_is_counted(served: Served) -> None:
    def counts() -> list[int]:
        statistics = [served.client.get_inference_statistics(name).model_stats[0] for name in ("tagged", "remembers")]
        return [each.inference_stats.success.count for each in statistics]

    before = counts()
    asked(served, "stream", "tagged", 4)
    until(lambda: counts() == [before[0] + 3, before[1] + 3])


def test_large_tensors(served: Served) -> None:
    letters = ["a" * 3_000_000, "b" * 40_000]
    requests = [text_request("tagged", each, sequence_id=11, sequence_start=each[0] == "a") for each in letters]
    found = [each.word.split()[0] for each in streamed(served.server.url, *requests)]
    assert found == [f"<{letters[0]}>", f"<{letters[0]}><{letters[1]}>"]


def test_clients_that_go_leave_nothing_behind(served: Served) -> None:
    """The step waits for its turn behind others' sequences, or is executed."""
    for milliseconds in (1, 3, 10, 30, 100) * 3:
        with ThreadPoolExecutor(4) as pool:
            for key in range(4):
                pool.submit(give_up, served, key + 20, milliseconds / 1000)
    until(lambda: served.server.busy_slots() == 0)
    until(lambda: asked(served, "stream", "tagged", 5) == [each.format(5) for each in WANTED["tagged"]])


def give_up(served: Served, identity: int, timeout_s: float) -> None:
    x = inputs_of({"x": np.array([b"a"], dtype=object)})
    with suppress(InferenceServerException):
        served.client.infer("tagged", x, sequence_id=identity, sequence_start=True, client_timeout=timeout_s)


@pytest.mark.parametrize("protocol", MODULES)
@pytest.mark.parametrize(("name", "values"), [("sum_compiled", [1, 2, 3]), ("sum_spelled", ["1", "2", "3"])])
def test_states_of_onnx_models(served: Served, protocol: str, name: str, values: list[Any]) -> None:
    url = served.server.url if protocol == "grpc" else served.server.http_url
    assert run_unary(url, MODULES[protocol], name, 3, values) == [1, 3, 6]
    assert run_stream(served.server.url, name, [4, "five", 6], values) == [[1, 3, 6]] * 3


def test_a_step_that_fails_ends_its_request_only(served: Served) -> None:
    with pytest.raises(InferenceServerException, match=r"in ensemble 'sum_spelled', step 0 \('spelled'\)"):
        run_unary(served.server.url, triton, "sum_spelled", 8, ["1", "nothing"])
    assert run_unary(served.server.http_url, triton_http, "sum_spelled", 9, ["1", "2"]) == [1, 3]
    until(lambda: served.server.busy_slots() == 0)
