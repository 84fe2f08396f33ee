"""What reaches a Python model of a request, and what of its answer comes back: alone, inside of ensembles, by BLS."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gangway.protos import grpc_service_pb2 as pb
from tests.helpers import ensemble_configs, ways
from tests.helpers.http_requests import ask_http
from tests.helpers.python_models import config_of, write
from tests.helpers.served import Served, serving

TELLS = """
    def execute(self, requests):
        import json
        responses = []
        for request in requests:
            told = json.dumps({"id": request.request_id(), "parameters": json.loads(request.parameters()),
                "timeout": request.timeout(), "priority": request.priority(),
                "inputs": [tensor.name() for tensor in request.inputs()], "wanted": request.requested_output_names()})
            tensors = [pb_utils.Tensor("told", np.array([told.encode()], dtype=object)),
                pb_utils.Tensor("more", np.zeros(1, np.float32))]
            responses.append(pb_utils.InferenceResponse(tensors, parameters={"by": "tells", "count": 3, "half": 0.5}))
        return responses
"""
SENDS = TELLS.replace("responses.append(", "request.get_response_sender().send(flags=1, response=").replace(
    "return responses", "return None"
)
# It hands on what it got, as its own request to `tells`.
PASSES_ON = """
    def execute(self, requests):
        import json
        responses = []
        for request in requests:
            inner = pb_utils.InferenceRequest(model_name="tells", inputs=request.inputs(),
                requested_output_names=["told"], request_id=request.request_id(), timeout=request.timeout(),
                priority=request.priority(), parameters=json.loads(request.parameters()))
            answer = inner.exec()
            assert not answer.has_error(), answer.error().message()
            responses.append(pb_utils.InferenceResponse(answer.output_tensors(), parameters=answer.parameters()))
        return responses
"""
COPIES = """
    def execute(self, requests):
        found = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x")
            y = np.full(1, -1, np.float32) if x is None else x.as_numpy()
            response = pb_utils.InferenceResponse([pb_utils.Tensor("y", y)], parameters={"by": "copies", "first": True})
            found.append(response)
        return found
"""
# It leaves q away where x is 0.
LEAVES_AWAY = """
    def execute(self, requests):
        found = []
        for request in requests:
            x = request.inputs()[0].as_numpy()
            names = ["p", "q"] if x[0] else ["p"]
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor(name, x) for name in names]))
        return found
"""
PAIR, TOLD = "a:FP32:1 b:FP32:1", "told:STRING:1 more:FP32:1"
STEP = ("tells", "a=a b=b", "told=told")
PARAMETERS: Mapping[str, Any] = {"text": "ä", "number": -7, "large": 2**63 + 5, "flag": True, "half": 0.5}
FORWARDED = {"x-user": "me"}
FLAGS = (
    "--grpc-header-forward-pattern=^x-user$",
    "--http-header-forward-pattern=(?i)^x-user$",
    "--cache-config=local,size=1000000",
)
MISSING = (
    "expected 1 inputs but got 0 inputs for model 'copies'. Got input(s) [], but missing required input(s) ['x']."
    " Please provide all required input(s)."
)


def write_all(repository: Path) -> None:
    write(repository, "tells", TELLS, config_of(PAIR, TOLD))
    write(repository, "sends", SENDS, config_of(PAIR, TOLD, more="model_transaction_policy { decoupled: true }"))
    write(repository, "cached", TELLS, config_of(PAIR, TOLD, more="response_cache { enable: true }"))
    write(repository, "passes_on", PASSES_ON, config_of(PAIR, "told:STRING:1"))
    write(repository, "copies", COPIES, config_of("x:FP32:1", "y:FP32:1"))
    optional = 'input { name: "x" data_type: TYPE_FP32 dims: [1] optional: true }'
    write(repository, "copies_any", COPIES, config_of("", "y:FP32:1", more=optional))
    write(repository, "leaves_away", LEAVES_AWAY, config_of("x:FP32:1", "p:FP32:1 q:FP32:1"))

    def ensemble(name: str, inputs: str, outputs: str, *steps: ensemble_configs.Step) -> None:
        ensemble_configs.write(repository, name, ensemble_configs.config_of(inputs, outputs, steps, batch=0))

    ensemble("one_step", PAIR, "told:STRING:1", STEP)
    ensemble("second_step", PAIR, "told:STRING:1", ("copies", "x=a", "y=m"), ("tells", "b=b a=m", "told=told"))
    ensemble("nested", PAIR, "told:STRING:1", ("second_step", "a=a b=b", "told=told"))
    ensemble("step_passes_on", PAIR, "told:STRING:1", ("passes_on", "a=a b=b", "told=told"))
    ensemble("maps_both", PAIR, TOLD, ("tells", "a=a b=b", "told=told more=more"))
    both = ("leaves_away", "x=x", "p=p q=q")
    ensemble("direct", "x:FP32:1", "p:FP32:1 q:FP32:1", both)
    ensemble("needs", "x:FP32:1", "p:FP32:1 r:FP32:1", both, ("copies", "x=q", "y=r"))
    ensemble("may_need", "x:FP32:1", "p:FP32:1 r:FP32:1", both, ("copies_any", "x=q", "y=r"))
    ensemble("inside", "x:FP32:1", "p:FP32:1 r:FP32:1", ("direct", "x=x", "p=p q=m"), ("copies", "x=m", "y=r"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("repository")
    write_all(repository)
    with serving(repository, *FLAGS) as served:
        yield served


Answered = tuple[Mapping[str, Any], Mapping[str, Any]]  # what the model was told, and the response's parameters
Ask = Callable[..., Answered]  # of a server, a model and the names of outputs


def message_of(model: str, outputs: Sequence[str]) -> pb.ModelInferRequest:
    one = np.ones(1, np.float32)
    parameters = {**PARAMETERS, "timeout": 9_000_000, "priority": 2}
    return ways.request_of(model, {"b": one, "a": one}, outputs, "id 7", **parameters)


def by(way: ways.Way) -> Ask:
    def ask(served: Served, model: str, outputs: Sequence[str], user: str = "me") -> Answered:
        for _ in range(2):  # a request like one before takes another way
            response = way(served.server, message_of(model, outputs), {"x-user": user})
        return json.loads(response.raw_output_contents[0][4:]), ways.parameters_of(response)

    return ask


def by_generate(served: Served, model: str, outputs: Sequence[str]) -> Answered:
    body = {"id": "id 7", "b": 1, "a": 1, **PARAMETERS, "timeout": 9_000_000, "priority": 2}
    answer = ask_http(served.server.http_url, "POST", f"/v2/models/{model}/generate", body, {"x-user": "me"})
    assert answer.status == 200
    content = answer.content
    return json.loads(content.pop("told")), content


WAYS: Mapping[str, Ask] = {**{name: by(way) for name, way in ways.WAYS.items()}, "generate": by_generate}
# By model: the inputs in the order in which it sees them.
MODELS = {
    "tells": ["b", "a"],
    "sends": ["b", "a"],
    "passes_on": ["b", "a"],
    "one_step": ["a", "b"],
    "second_step": ["a", "b"],
    "nested": ["a", "b"],
    "step_passes_on": ["a", "b"],
}


@pytest.mark.parametrize(
    ("model", "way"),
    [(model, way) for model in MODELS for way in WAYS if model != "sends" or way in ("stream", "generate")],
)
def test_all_of_a_request_reaches_the_model(served: Served, model: str, way: str) -> None:
    told, given = WAYS[way](served, model, ["told"])
    assert told["parameters"] == {**PARAMETERS, "x-user": "me"}
    assert (told["id"], told["timeout"], told["priority"]) == ("id 7", 9_000_000, 2)
    assert told["inputs"] == MODELS[model]
    if way != "generate" or model not in ("tells", "sends"):  # it names no outputs
        assert told["wanted"] == ["told"]
    assert given["by"] == "tells" and given["count"] == 3 and given["half"] == 0.5
    assert given.get("first", False) == (model in ("second_step", "nested"))


@pytest.mark.parametrize("way", [way for way in WAYS if way != "generate"])
@pytest.mark.parametrize(
    ("model", "asked", "wanted"),
    [
        ("tells", [], ["told", "more"]),
        ("tells", ["told", "more"], ["told", "more"]),
        ("one_step", [], ["told"]),
        ("maps_both", ["told"], ["told", "more"]),
        ("maps_both", [], ["told", "more"]),
    ],
)
def test_a_model_is_asked_for_what_is_wanted(
    served: Served, model: str, asked: list[str], wanted: list[str], way: str
) -> None:
    assert WAYS[way](served, model, asked)[0]["wanted"] == wanted


def test_headers_count_for_the_response_cache(served: Served) -> None:
    def told(user: str) -> str:
        return str(by(ways.by_grpc)(served, "cached", ["told"], user)[0]["parameters"]["x-user"])

    assert [told(user) for user in ("one", "two", "one", "two")] == ["one", "two", "one", "two"]


def answer(served: Served, model: str, value: float, outputs: Sequence[str]) -> dict[str, float]:
    found = served.over("gRPC", model, outputs, x=np.full(1, value, np.float32))
    return {name: float(array[0]) for name, array in found.items()}


@pytest.mark.parametrize(
    ("model", "value", "outputs", "expected"),
    [
        ("leaves_away", 0, [], {"p": 0}),
        ("leaves_away", 1, [], {"p": 1, "q": 1}),
        ("leaves_away", 0, ["q"], {}),
        ("direct", 0, [], {"p": 0}),
        ("direct", 1, [], {"p": 1, "q": 1}),
        ("direct", 0, ["q"], {}),
        ("needs", 1, [], {"p": 1, "r": 1}),
        ("needs", 0, ["p"], {"p": 0}),
        ("may_need", 0, [], {"p": 0, "r": -1}),
        ("may_need", 1, [], {"p": 1, "r": 1}),
        ("inside", 0, ["p"], {"p": 0}),
        ("inside", 1, [], {"p": 1, "r": 1}),
    ],
)
def test_an_output_that_is_left_away_is_missed_by_who_needs_it(
    served: Served, model: str, value: float, outputs: list[str], expected: dict[str, float]
) -> None:
    assert answer(served, model, value, outputs) == expected


@pytest.mark.parametrize(("model", "step"), [("needs", "step 1 ('copies')"), ("inside", "step 1 ('copies')")])
@pytest.mark.parametrize("outputs", [[], ["r"], ["p", "r"]])
def test_a_step_that_needs_what_is_missing_fails(served: Served, model: str, step: str, outputs: list[str]) -> None:
    with pytest.raises(ways.RefusedError) as raised:
        answer(served, model, 0, outputs)
    assert raised.value.status == "INVALID_ARGUMENT"
    assert raised.value.message == f"in ensemble '{model}', {step}: {MISSING}"
