"""Models whose responses a request prescribes, and clients that take any number of them over each protocol."""

import json
from collections.abc import Iterator, Sequence
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

from gangway.protos import grpc_service_pb2 as pb
from tests.helpers.python_models import TEXTS, config_of, write
from tests.helpers.raw_stream import RawStream

HELPERS = """import time
import numpy as np
import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def text(request, name="x"):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy().reshape(-1)[0].decode()


def answer(value):
    return pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array([value.encode()], dtype=object))])


def error(message):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(message))


"""
# Word by word: a response, `!message` an error, `~seconds` a pause, `*n` a response of n characters, `raise`. A `$`
# before a response or an error makes it the last one; without it an empty last one follows.
SCRIPT = """
    def execute(self, requests):
        for request in requests:
            sender, ended = request.get_response_sender(), False
            for word in text(request).split():
                if request.is_cancelled():
                    print("noticed that it is cancelled")
                    return
                if word == "raise":
                    raise ValueError("raised")
                if word.startswith("~"):
                    time.sleep(float(word[1:]))
                    continue
                ended, word = word.startswith("$"), word.lstrip("$")
                if word.startswith("*"):
                    word = "x" * int(word[1:])
                response = error(word[1:]) if word.startswith("!") else answer(word)
                sender.send(response, FINAL if ended else 0)
            if not ended:
                sender.send(flags=FINAL)
"""
# Asks the model that the first word names for any number of responses, and answers with all of them.
RELAY = """
    def execute(self, requests):
        found = []
        for request in requests:
            name, _, script = text(request).partition(" ")
            x = pb_utils.Tensor("x", np.array([script.encode()], dtype=object))
            words = []
            for response in pb_utils.InferenceRequest(model_name=name, inputs=[x]).exec(decoupled=True):
                if response.has_error():
                    words.append("!" + response.error().message())
                elif response.output_tensors():
                    words.append(response.output_tensors()[0].as_numpy()[0].decode())
            found.append(answer(" ".join(words)))
        return found
"""
DECOUPLED = "model_transaction_policy { decoupled: true }"
NOT_ONE = (
    "generate expects model to produce exactly 1 response, use generate stream for model that generates various number"
    " of responses"
)


class Script(NamedTuple):
    """What a model is told, what a client gets of it (`!`: an error), and whether the last of that says so."""

    text: str
    responses: Sequence[str]
    is_marked: bool = False


SCRIPTS = (
    Script("a", ["a"]),
    Script("a b c", ["a", "b", "c"]),
    Script("a $b", ["a", "b"], True),
    Script("$a", ["a"], True),
    Script("", []),
    Script("!e", ["!e"]),
    Script("a !e b", ["a", "!e", "b"]),
    Script("!e a", ["!e", "a"]),
    Script("!e !f", ["!e", "!f"]),
    Script("a !e", ["a", "!e"]),
    Script("a $!e", ["a", "!e"], True),
    Script("$!e", ["!e"], True),
    Script("a raise", ["a", "!ValueError: raised"], True),
    Script("raise", ["!ValueError: raised"], True),
)


def write_text_model(repository: Path, name: str, body: str, inputs: str = TEXTS[0], more: str = "") -> None:
    """A model whose body knows `text`, `answer` and `error`."""
    write(repository, name, body, config_of(inputs, TEXTS[1], more=more), head=HELPERS)


class Response(NamedTuple):
    """`word`: as a script has it, "" for an empty one. `is_final`: as the response says."""

    word: str
    is_final: bool


def text_request(
    model: str, text: str, name: str = "x", identity: str = "1", **parameters: Any
) -> pb.ModelInferRequest:
    """A request with one text."""
    request = pb.ModelInferRequest(model_name=model, id=identity)
    for key, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param"}[type(value)]
        setattr(request.parameters[key], kind, value)
    request.inputs.add(name=name, datatype="BYTES", shape=[1])
    request.raw_input_contents.append(len(text.encode()).to_bytes(4, "little") + text.encode())
    return request


def streamed(url: str, *requests: pb.ModelInferRequest, **metadata: str) -> list[Response]:
    """All responses to these requests of one stream of gRPC. Raises grpc.RpcError where it does not end well."""
    with RawStream(url, list(metadata.items())) as stream:
        for request in requests:
            stream.send(request)
        stream.half_close()
        return [response_of(each) for each in stream.call]


def response_of(answer: pb.ModelStreamInferResponse) -> Response:
    """Return what an answer of a stream says."""
    response = answer.infer_response
    is_final = response.parameters["triton_final_response"].bool_param
    if answer.error_message:
        return Response(f"!{answer.error_message}", is_final)
    words = [content[4:].decode() for content in response.raw_output_contents]
    return Response(" ".join(words), is_final)


class Events(NamedTuple):
    """What `generate_stream` has answered: words of the events, if it has answered by events."""

    status: int
    words: list[str]
    is_stream: bool
    content: Any


def generated(http_url: str, model: str, text: str, path: str = "generate_stream", **members: Any) -> Events:
    """Ask by Triton's generate extension."""
    with closing(HTTPConnection(http_url, timeout=20)) as connection:
        connection.request("POST", f"/v2/models/{model}/{path}", json.dumps({"x": text, **members}))
        response = connection.getresponse()
        body = response.read()
    if "event-stream" not in response.headers["content-type"]:
        return Events(response.status, [], False, json.loads(body))
    return Events(response.status, list(words_of(body)), True, None)


def words_of(body: bytes) -> Iterator[str]:
    """Yield the word of each event."""
    for event in body.split(b"\n\n")[:-1]:
        assert event.startswith(b"data: ")
        content = json.loads(event[6:])
        yield f"!{content['error']}" if "error" in content else content["y"]
