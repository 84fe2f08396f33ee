"""What reaches a Python model of a request, and what of its answer comes back: alone, inside of ensembles, by BLS."""

import json
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from gangway.clients.connection import SERVICE
from gangway.protos import grpc_service_pb2 as pb
from testing.live_server import live_server
from tests.helpers import ensemble_configs
from tests.helpers.python_models import TIMEOUT_S, Array, Served, config_of, write

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
    flags = [f"--cache-dir={tmp_path_factory.mktemp('cache')}", *FLAGS]
    with live_server(repository, flags) as server, triton.InferenceServerClient(server.url) as client:
        yield Served(server, client, repository)


Answered = tuple[Mapping[str, Any], Mapping[str, Any]]  # what the model was told, and the response's parameters
Ask = Callable[[Served, str, Sequence[str]], Answered]


def message_of(model: str, outputs: Sequence[str], is_typed: bool = False) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, id="id 7")
    for name in ("b", "a"):
        tensor = request.inputs.add(name=name, datatype="FP32", shape=[1])
        if is_typed:
            tensor.contents.fp32_contents.append(1)
        else:
            request.raw_input_contents.append(np.ones(1, np.float32).tobytes())
    for name in outputs:
        request.outputs.add(name=name)
    kinds = {str: "string_param", int: "int64_param", bool: "bool_param", float: "double_param"}
    for key, value in {**PARAMETERS, "timeout": 9_000_000, "priority": 2}.items():
        kind = "uint64_param" if key == "large" else kinds[type(value)]
        setattr(request.parameters[key], kind, value)
    return request


def of_message(response: pb.ModelInferResponse) -> Answered:
    given = {
        key: getattr(value, str(value.WhichOneof("parameter_choice"))) for key, value in response.parameters.items()
    }
    return json.loads(response.raw_output_contents[0][4:]), given


def by_grpc(is_typed: bool) -> Ask:
    def ask(served: Served, model: str, outputs: Sequence[str]) -> Answered:
        with grpc.insecure_channel(served.server.url) as channel:
            call = channel.unary_unary(
                SERVICE + "ModelInfer", pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
            )
            message = message_of(model, outputs, is_typed)
            for _ in range(2):  # a request like one before takes another way
                answered = call(message, timeout=TIMEOUT_S, metadata=tuple(FORWARDED.items()))
        return of_message(answered)

    return ask


def by_stream(served: Served, model: str, outputs: Sequence[str]) -> Answered:
    with grpc.insecure_channel(served.server.url) as channel:
        call = channel.stream_stream(
            SERVICE + "ModelStreamInfer", pb.ModelInferRequest.SerializeToString, pb.ModelStreamInferResponse.FromString
        )
        answers = call(iter([message_of(model, outputs)]), timeout=TIMEOUT_S, metadata=tuple(FORWARDED.items()))
        (answered, *_) = list(answers)
    assert not answered.error_message
    return of_message(answered.infer_response)


def by_json(served: Served, model: str, outputs: Sequence[str]) -> Answered:
    body = {
        "id": "id 7",
        "inputs": [{"name": name, "datatype": "FP32", "shape": [1], "data": [1]} for name in ("b", "a")],
        "outputs": [{"name": name} for name in outputs],
        "parameters": {**PARAMETERS, "timeout": 9_000_000, "priority": 2},
    }
    url = f"http://{served.server.http_url}/v2/models/{model}/infer"
    request = urllib.request.Request(url, json.dumps(body).encode(), FORWARDED)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        content = json.loads(answer.read())
    return json.loads(content["outputs"][0]["data"][0]), content["parameters"]


def by_generate(served: Served, model: str, outputs: Sequence[str]) -> Answered:
    body = {"id": "id 7", "b": 1, "a": 1, **PARAMETERS, "timeout": 9_000_000, "priority": 2}
    url = f"http://{served.server.http_url}/v2/models/{model}/generate"
    request = urllib.request.Request(url, json.dumps(body).encode(), FORWARDED)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        content = json.loads(answer.read())
    return json.loads(content.pop("told")), content


WAYS: Mapping[str, Ask] = {
    "gRPC, raw": by_grpc(is_typed=False),
    "gRPC, typed": by_grpc(is_typed=True),
    "stream": by_stream,
    "JSON": by_json,
    "generate": by_generate,
}
HTTP_WAYS = ("JSON", "generate")
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
    header = "X-User" if way in HTTP_WAYS else "x-user"  # as urllib writes it
    assert told["parameters"] == {**PARAMETERS, header: "me"}
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
        message = message_of("cached", ["told"])
        with grpc.insecure_channel(served.server.url) as channel:
            call = channel.unary_unary(
                SERVICE + "ModelInfer", pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString
            )
            answered = call(message, timeout=TIMEOUT_S, metadata=(("x-user", user),))
        return str(of_message(answered)[0]["parameters"]["x-user"])

    assert [told(user) for user in ("one", "two", "one", "two")] == ["one", "two", "one", "two"]


def answer(served: Served, model: str, value: float, outputs: Sequence[str]) -> dict[str, float]:
    x = triton.InferInput("x", [1], "FP32")
    x.set_data_from_numpy(np.full(1, value, np.float32))
    wanted = [triton.InferRequestedOutput(name) for name in outputs] or None
    result = served.client.infer(model, [x], outputs=wanted, client_timeout=TIMEOUT_S)
    return {each.name: float(value_of(result.as_numpy(each.name))) for each in result.get_response().outputs}


def value_of(array: Array | None) -> Any:
    assert array is not None
    return array[0]


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
    with pytest.raises(InferenceServerException) as raised:
        answer(served, model, 0, outputs)
    assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert raised.value.message() == f"in ensemble '{model}', {step}: {MISSING}"
