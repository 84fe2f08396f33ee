"""The HTTP translation without a server: real routes, JSON, compression and plans; answers are zeros.

What is fuzzed is what a client can reach: bytes choose path, method and headers, the rest is the body.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

from google.protobuf import message_factory
from google.protobuf.descriptor import MethodDescriptor

from gangway.artifact.format import Engine, TensorSpec
from gangway.protos import StatusCode
from gangway.protos import grpc_service_pb2 as pb
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.access import Ports
from gangway.server.control.repository.completed_config import complete_config, max_rows
from gangway.server.errors import RequestError
from gangway.server.messages import ModelReady
from gangway.server.models.served import Models
from gangway.server.models.tensors import item_bytes
from gangway.server.options.endpoints import HttpOptions
from gangway.server.requests.contents import Raws
from gangway.server.requests.validation import RequestPlan, make_plan
from gangway.server.serving.call import Call
from gangway.server.serving.http.call import Answering, HttpCall
from gangway.server.serving.http.replies import HttpError, Reply
from gangway.server.serving.http.routes import route_of, verbs_of
from gangway.server.serving.http.site import HttpService, HttpSite
from gangway.server.serving.limits import ConnectionLimit, Phase
from gangway.server.serving.pending import Offload
from gangway.server.serving.protocol import Method, Methods, at_once

MAX_BODY_BYTES: Final = 1 << 20
MAX_AT_ONCE: Final = 16
PATHS: Final = (
    b"/v2/models/simple/infer",
    b"/v2/models/text/infer",
    b"/v2/models/simple/generate",
    b"/v2/models/text/generate_stream",
    b"/v2/models/simple/versions/1/infer",
    b"/v2/repository/index",
    b"/v2/repository/models/m/load",
    b"/v2/repository/models/m/unload",
    b"/v2/systemsharedmemory/region/r/register",
    b"/v2/cudasharedmemory/region/r/register",
    b"/v2/models/simple/trace/setting",
    b"/v2/logging",
    b"",  # the body begins with one, up to a line's end
)
ENCODINGS: Final = (None, None, None, b"gzip", b"deflate", b"identity", b"x-gzip", b"br")
ACCEPTED: Final = (None, b"gzip", b"deflate;q=0.5, gzip;q=0.1", b"*")


def answer(data: bytes) -> Reply:
    """Return how such a request is answered. Bytes: path, encodings, length of the JSON (two; odd: not given)."""
    choices, body = data[:4].ljust(4, b"\0"), data[4:]
    path = PATHS[choices[0] % len(PATHS)]
    if not path:
        path, _, body = body.partition(b"\n")
    headers = {b"content-length": b"%d" % len(body)}
    for name, value in (
        (b"content-encoding", ENCODINGS[choices[1] % len(ENCODINGS)]),
        (b"accept-encoding", ACCEPTED[choices[1] // 16 % len(ACCEPTED)]),
        (b"inference-header-content-length", None if choices[2] % 2 else b"%d" % (choices[2] // 2 + 128 * choices[3])),
    ):
        if value is not None:
            headers[name] = value
    route = route_of(path)
    if route is None:
        return HttpError(404, "Not Found").reply
    connection = _Connection()
    call = HttpCall(connection)
    call.method, call.path, call.headers, call.length = verbs_of(route)[-1], path, headers, len(body)
    call.add(body)
    refused = site().open(call)
    if refused is not None:
        return refused
    site().begin(call)
    return connection.reply


@cache
def models() -> Models:
    """Return two models: `simple`, and `text`, which has strings of any number."""
    pair = [TensorSpec(f"INPUT{number}", "INT32", (-1, 16), 64) for number in range(2)]
    results = [TensorSpec(f"OUTPUT{number}", "INT32", (-1, 16), 64) for number in range(2)]
    known = Models().updated(_announced(0, "simple", pair, results, Engine.NATIVE))
    texts = [TensorSpec(name, "BYTES", (-1, -1), 0, ("N", "length")) for name in ("text_input", "text_output")]
    return known.updated(_announced(1, "text", texts[:1], texts[1:], Engine.ONNXRUNTIME))


def checked_plan(header: bytes, raws: Raws) -> RequestPlan:
    """Return the plan of a request whose contents are right for it. Raises RequestError."""
    plan = make_plan(models(), header, bool(raws))
    if plan.regions:
        raise RequestError(StatusCode.NOT_FOUND, "there are no regions")
    plan.contents(raws() if callable(raws) else raws)
    return plan


@cache
def site() -> HttpSite:
    """Return what answers, all of it at once."""
    inline = Offload(_call, _call, MAX_AT_ONCE, "")
    options = HttpOptions(max_body_bytes=MAX_BODY_BYTES)
    limit = ConnectionLimit(MAX_AT_ONCE)
    methods = Methods(_methods(), asyncio.new_event_loop(), inline, lambda: None)
    return HttpSite(HttpService(_answer_zeros, methods, models, options, Ports()), inline, limit)


def _call(function: Callable[..., object], *arguments: Any) -> None:
    function(*arguments)


class _Connection(Answering):
    """Keeps the reply."""

    phase, since_s = Phase.ANSWERING, 0.0
    reply: Reply

    def give_way(self) -> None:
        raise AssertionError("there is no other")

    def tell(self, function: Callable[..., object], *arguments: Any) -> None:
        function(*arguments)

    def finish(self, call: HttpCall, reply: Reply) -> None:
        self.reply = reply

    def begin_stream(self, call: HttpCall, content_type: bytes, status: int, closes: bool) -> asyncio.Transport:
        raise AssertionError("nobody watches, and no model is decoupled")

    def send(self, call: HttpCall, pieces: Sequence[bytes]) -> None:
        raise AssertionError("nobody watches, and no model is decoupled")


def _answer_zeros(header: bytes, request_id: bytes, raws: Raws, call: Call, arrival_ns: int) -> None:
    """In place of Inference: check a request as it does, and answer with zeros."""
    try:
        call.answer(_zeros(header, request_id, raws))
    except RequestError as error:
        call.answer(error)


def _zeros(header: bytes, request_id: bytes, raws: Raws) -> bytes:
    """Return an answer for one row. Raises RequestError."""
    plan = checked_plan(header, raws)
    response = pb.ModelInferResponse(model_name=plan.model.name, model_version="1", id=request_id.decode())
    for tensor in plan.model.outputs.values():
        size = item_bytes(tensor.datatype)
        response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=[1, 16])
        response.raw_output_contents.append(bytes(16 * (size or 4)))
    return response.SerializeToString()


def _methods() -> Mapping[str, Method[Any]]:
    """Return all methods of the service; each takes any request, and answers with nothing in it."""
    (described,) = pb.DESCRIPTOR.services_by_name.values()
    return {method.name: _method(method) for method in described.methods}


def _method(method: MethodDescriptor) -> Method[Any]:
    answered = message_factory.GetMessageClass(method.output_type)
    return Method(message_factory.GetMessageClass(method.input_type), at_once(lambda _: answered()))


def _announced(
    number: int, name: str, inputs: list[TensorSpec], outputs: list[TensorSpec], engine: Engine
) -> ModelReady:
    config = complete_config(ModelConfig(max_batch_size=8), name, inputs, outputs, True)
    encoded = config.SerializeToString()
    rows = max_rows(config, True)
    return ModelReady(number, name, 1, encoded, tuple(inputs), tuple(outputs), 8, rows, True, engine)
