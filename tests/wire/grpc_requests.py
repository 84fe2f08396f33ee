"""What the corpus asks over gRPC."""

import gzip
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from google.protobuf.message import Message

from gangway.protos import grpc_service_pb2 as pb
from gangway.protos import health_pb2
from tests.wire.corpus import SEGMENT, Case, Step, pack
from tests.wire.mutations import mutated_messages

Headers = Mapping[str, Any]
A, B = np.arange(16, dtype=np.int32), np.ones(16, np.int32)
ROW = A.tobytes()
LARGE_BYTES = 600_000
HEALTH = "/grpc.health.v1.Health/"


def strings(*texts: bytes) -> bytes:
    """Return a BYTES tensor as the protocol has it."""
    return b"".join(len(text).to_bytes(4, "little") + text for text in texts)


def request(
    model: str = "simple",
    tensors: Sequence[tuple[str, str, Sequence[int], Any]] = (),
    parameters: Mapping[str, Any] | None = None,
    outputs: Mapping[str, Mapping[str, Any]] | None = None,
    **more: Any,
) -> pb.ModelInferRequest:
    """Return a request with these tensors: bytes are sent raw, a mapping are parameters, a list is typed contents."""
    message = pb.ModelInferRequest(model_name=model, **more)
    for name, datatype, shape, content in tensors:
        tensor = message.inputs.add(name=name, datatype=datatype, shape=shape)
        if isinstance(content, bytes):
            message.raw_input_contents.append(content)
        elif isinstance(content, Mapping):
            put(tensor.parameters, content)
        elif content is not None:
            field = "bytes_contents" if datatype == "BYTES" else "int_contents"
            getattr(tensor.contents, field).extend(content)
    put(message.parameters, parameters or {})
    for name, given in (outputs or {}).items():
        put(message.outputs.add(name=name).parameters, given)
    return message


def put(target: Any, values: Mapping[str, Any]) -> None:
    """Set parameters by the types of their values."""
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for name, value in values.items():
        setattr(target[name], kinds[type(value)], value)


def simple(rows: int = 1, **more: Any) -> pb.ModelInferRequest:
    """Return the request of Triton's first example."""
    tensors = [("INPUT0", "INT32", [rows, 16], A.tobytes() * rows), ("INPUT1", "INT32", [rows, 16], B.tobytes() * rows)]
    return request(tensors=more.pop("tensors", tensors), **more)


def number(model: str, value: int, name: str = "x", **more: Any) -> pb.ModelInferRequest:
    """Return a request with one number."""
    return request(model, [(name, "INT32", more.pop("shape", [1]), np.int32(value).tobytes())], **more)


def place(offset: int, size: int = 64, region: str = "wire") -> dict[str, Any]:
    """Return the parameters of a tensor in shared memory."""
    sizes = {"shared_memory_byte_size": size, "shared_memory_offset": offset}
    return {"shared_memory_region": region, **(sizes if offset else {"shared_memory_byte_size": size})}


def encoded(message: Message | bytes) -> str:
    """Return a message packed."""
    return pack(message if isinstance(message, bytes) else message.SerializeToString(deterministic=True))


def call(method: str, message: Message | bytes, headers: Headers | None = None, flag: int = 0) -> list[Step]:
    """Return the steps of a call with one message."""
    return [["open", method, headers or {}], ["message", 0, encoded(message), flag], ["end", 0]]


def infer(message: Message | bytes, headers: Headers | None = None, flag: int = 0) -> list[Step]:
    """Return the steps of a plain inference."""
    return call("ModelInfer", message, headers, flag)


def stream(*messages: Message | bytes, headers: Headers | None = None, wait: bool = True) -> list[Step]:
    """Return the steps of a stream; each message but the last is sent when the one before it is answered."""
    steps: list[Step] = [["open", "ModelStreamInfer", headers or {}]]
    for count, message in enumerate(messages):
        steps += [["answers", 0, count]] if wait and count else []
        steps.append(["message", 0, encoded(message)])
    return [*steps, ["end", 0]]


LIVE = call("ServerLive", pb.ServerLiveRequest())


def then_live(number: int) -> list[Step]:
    """Return the steps of a further call of the connection, which shows that it lives."""
    return [["open", "ServerLive", {}], ["message", number, encoded(b"")], ["end", number]]


def cases() -> Iterator[Case]:
    """Yield all cases, in the order in which they are sent."""
    for server, kinds in (
        ("plain", (inferences, memory, errors, methods, calls, messages, streams, fuzz)),
        ("strict", (strict,)),
    ):
        for kind in kinds:
            for name, steps in kind().items():
                yield Case(f"{kind.__name__}: {name}", server, steps)


def inferences() -> dict[str, list[Step]]:
    """Requests that Triton's examples send."""
    typed = [("INPUT0", "INT32", [1, 16], A.tolist()), ("INPUT1", "INT32", [1, 16], B.tolist())]
    digits = [strings(*(str(each).encode() for each in side)) for side in (A, B)]
    texts = [("INPUT0", "BYTES", [1, 16], digits[0]), ("INPUT1", "BYTES", [1, 16], digits[1])]
    typed_texts = [
        (name, "BYTES", [1, 16], [str(each).encode() for each in side]) for name, side in (("INPUT0", A), ("INPUT1", B))
    ]
    bytes8 = [(name, "INT8", [1, 16], side.astype(np.int8).tobytes()) for name, side in (("INPUT0", A), ("INPUT1", B))]
    image = np.zeros((1, 3, 64, 64), np.float32)
    image[0, 1] = 1
    words = strings(b"one", b"", "zwölf".encode(), b"\0\xff")
    large = strings(b"x" * LARGE_BYTES)
    sequence = {"sequence_id": 77}
    return {
        "raw": infer(simple()),
        "raw, eight rows": infer(simple(8)),
        "raw, an id and a version": infer(simple(id="a-1", model_version="1")),
        "typed": infer(simple(tensors=typed)),
        "one output": infer(simple(outputs={"OUTPUT1": {}})),
        "outputs in another order": infer(simple(outputs={"OUTPUT1": {}, "OUTPUT0": {}})),
        "inputs in another order": infer(
            simple(tensors=[("INPUT1", "INT32", [1, 16], B.tobytes()), ("INPUT0", "INT32", [1, 16], A.tobytes())])
        ),
        "parameters": infer(
            simple(parameters={"own": "x", "priority": 1, "timeout": 10_000_000, "flag": True, "share": 0.5})
        ),
        "classification": infer(simple(outputs={"OUTPUT0": {"classification": 3}})),
        "classification with labels": infer(
            request(
                "simple_image",
                [("IMAGE", "FP32", [1, 3, 64, 64], image.tobytes())],
                outputs={"COLOUR": {"classification": 1}},
            )
        ),
        "strings": infer(request("simple_string", texts)),
        "strings, typed": infer(request("simple_string", typed_texts)),
        "INT8": infer(request("simple_int8", bytes8)),
        "identity of strings": infer(request("simple_identity", [("INPUT0", "BYTES", [1, 4], words)])),
        "identity of none": infer(request("simple_identity", [("INPUT0", "BYTES", [1, 0], b"")])),
        "identity of a large one": infer(request("simple_identity", [("INPUT0", "BYTES", [1, 1], large)])),
        "Python": infer(number("sleepy", 0)),
        "Python, text": infer(request("shouting", [("text_input", "BYTES", [1], strings("laut é".encode()))])),
        "sequence": [
            step
            for place, flags in enumerate(({"sequence_start": True}, {}, {"sequence_end": True}))
            for step in (
                ["open", "ModelInfer", {}],
                [
                    "message",
                    place,
                    encoded(number("simple_sequence", place + 5, "INPUT", shape=[1, 1], parameters=sequence | flags)),
                ],
                ["end", place],
                ["wait", place],
            )
        ],
        "two calls at once": [
            *infer(simple(id="1")),
            ["open", "ModelInfer", {}],
            ["message", 1, encoded(simple(id="2"))],
            ["end", 1],
        ],
        "one call after the other": [
            *infer(simple(id="1")),
            ["wait", 0],
            ["open", "ModelInfer", {}],
            ["message", 1, encoded(simple(id="2"))],
            ["end", 1],
        ],
        "a faster one overtakes": [*infer(number("sleepy", 200)), *then_live(1)],
    }


def memory() -> dict[str, list[Step]]:
    """Tensors in shared memory."""
    region = pb.SystemSharedMemoryRegisterRequest(name="wire", key=f"/{SEGMENT}", byte_size=4096)
    inside = [("INPUT0", "INT32", [1, 16], place(0)), ("INPUT1", "INT32", [1, 16], place(64))]
    both = {"OUTPUT0": place(128), "OUTPUT1": place(192)}
    gpu = pb.CudaSharedMemoryRegisterRequest(name="gpu", raw_handle=b"handle", byte_size=64)
    return {
        "status of none": call("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest()),
        "register": call("SystemSharedMemoryRegister", region),
        "register twice": call("SystemSharedMemoryRegister", region),
        "status": call("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest()),
        "status of one": call("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name="wire")),
        "status of an unknown one": call("SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusRequest(name="nobody")),
        "outputs": [*infer(simple(outputs=both)), ["wait", 0], ["remember", 128, 128]],
        "inputs": infer(simple(tensors=inside)),
        "inputs and one output": [
            *infer(simple(tensors=inside, outputs={"OUTPUT0": place(256), "OUTPUT1": {}})),
            ["wait", 0],
            ["remember", 256, 64],
        ],
        "an unknown region": infer(
            simple(tensors=[("INPUT0", "INT32", [1, 16], place(0, region="nobody")), inside[1]])
        ),
        "an offset behind the end": infer(simple(tensors=[("INPUT0", "INT32", [1, 16], place(4096)), inside[1]])),
        "a size behind the end": infer(simple(tensors=[("INPUT0", "INT32", [1, 16], place(4033)), inside[1]])),
        "a wrong size": infer(simple(tensors=[("INPUT0", "INT32", [1, 16], place(0, 63)), inside[1]])),
        "no room for an output": infer(simple(outputs={"OUTPUT0": place(128, 63)})),
        "no such segment": call(
            "SystemSharedMemoryRegister",
            pb.SystemSharedMemoryRegisterRequest(name="new", key="/nobody-has-this", byte_size=64),
        ),
        "a key that is a path": call(
            "SystemSharedMemoryRegister",
            pb.SystemSharedMemoryRegisterRequest(name="new", key="/../etc/passwd", byte_size=64),
        ),
        "beyond the segment": call(
            "SystemSharedMemoryRegister",
            pb.SystemSharedMemoryRegisterRequest(name="new", key=f"/{SEGMENT}", offset=4096, byte_size=64),
        ),
        "of a GPU": call("CudaSharedMemoryRegister", gpu),
        "status of those of GPUs": call("CudaSharedMemoryStatus", pb.CudaSharedMemoryStatusRequest()),
        "unregister those of GPUs": call("CudaSharedMemoryUnregister", pb.CudaSharedMemoryUnregisterRequest()),
        "unregister": call("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name="wire")),
        "unregister an unknown one": call(
            "SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest(name="nobody")
        ),
        "unregister all": call("SystemSharedMemoryUnregister", pb.SystemSharedMemoryUnregisterRequest()),
    }


def errors() -> dict[str, list[Step]]:
    """The table of errors."""

    def first(
        datatype: str = "INT32", shape: Sequence[int] = (1, 16), content: Any = ROW, name: str = "INPUT0"
    ) -> list[Step]:
        return infer(simple(tensors=[(name, datatype, shape, content), ("INPUT1", "INT32", [1, 16], B.tobytes())]))

    return {
        "unknown model": infer(simple(model="nobody")),
        "no model": infer(simple(model="")),
        "nearly the name": infer(simple(model="simpel")),
        "unknown version": infer(simple(model_version="7")),
        "a version that is no number": infer(simple(model_version="new")),
        "wrong datatype": first("FP32"),
        "unknown datatype": first("int32"),
        "wrong shape": first(shape=(1, 4, 4)),
        "negative size": first(shape=(-1, 16)),
        "no rows": first(shape=(0, 16), content=b""),
        "batch too large": infer(simple(9)),
        "batches that differ": infer(
            simple(tensors=[("INPUT0", "INT32", [1, 16], A.tobytes()), ("INPUT1", "INT32", [2, 16], 2 * B.tobytes())])
        ),
        "wrong size": first(content=A.tobytes()[:-4]),
        "missing input": infer(simple(tensors=[("INPUT0", "INT32", [1, 16], A.tobytes())])),
        "unexpected input": first(name="INPUT9"),
        "an input twice": infer(simple(tensors=[("INPUT0", "INT32", [1, 16], A.tobytes())] * 2)),
        "no inputs": infer(simple(tensors=[])),
        "unexpected output": infer(simple(outputs={"OUTPUT9": {}})),
        "raw and typed": infer(
            simple(tensors=[("INPUT0", "INT32", [1, 16], A.tobytes()), ("INPUT1", "INT32", [1, 16], B.tolist())])
        ),
        "too few typed": first(content=A.tolist()[:-1]),
        "reserved parameter": infer(simple(parameters={"triton_own": 1})),
        "wrong type of a parameter": infer(simple(parameters={"timeout": "soon"})),
        "classification of none": infer(simple(outputs={"OUTPUT0": {"classification": 0}})),
        "strings that end early": infer(request("simple_identity", [("INPUT0", "BYTES", [1, 1], b"\5\0\0\0ab")])),
        "too many strings": infer(request("simple_identity", [("INPUT0", "BYTES", [1, 1], strings(b"a", b"b"))])),
        "no number": infer(
            request("simple_string", [(name, "BYTES", [1, 16], strings(*[b"x"] * 16)) for name in ("INPUT0", "INPUT1")])
        ),
        "a sequence that has not begun": infer(
            number("simple_sequence", 1, "INPUT", shape=[1, 1], parameters={"sequence_id": 99})
        ),
        "no sequence": infer(number("simple_sequence", 1, "INPUT", shape=[1, 1])),
        "timeout of the request": infer(number("sleepy", 400, parameters={"timeout": 50_000})),
        "a Python model's error": infer(number("failing", 1)),
        "decoupled": infer(number("counts", 1)),
        "an id that is no UTF-8": infer(simple().SerializeToString() + b"\x1a\x02\xff\xfe"),
        "an empty message": infer(b""),
        "no protobuf": infer(b"\xff\xff\xff"),
        "cut off": infer(simple().SerializeToString()[:-1]),
        "an unknown field": infer(simple().SerializeToString() + b"\x9a\x06\x03abc"),
        "a field of another type": infer(simple().SerializeToString() + b"\x08\x01"),
    }


def methods() -> dict[str, list[Step]]:
    """All other methods; what they change is changed back."""
    load, unload = pb.RepositoryModelLoadRequest, pb.RepositoryModelUnloadRequest
    settings, log = pb.TraceSettingRequest(), pb.LogSettingsRequest()
    settings.settings["trace_rate"].value.append("7")
    log.settings["log_verbose_level"].uint32_param = 1
    back, log_back, wrong, log_wrong = (
        pb.TraceSettingRequest(),
        pb.LogSettingsRequest(),
        pb.TraceSettingRequest(),
        pb.LogSettingsRequest(),
    )
    back.settings["trace_rate"].Clear()
    log_back.settings["log_verbose_level"].uint32_param = 0
    wrong.settings["trace_level"].value.append("ALL")
    log_wrong.settings["log_nothing"].bool_param = True
    configured = load(model_name="simple")
    configured.parameters["config"].string_param = '{"max_batch_size": "many"}'
    model = {"name": "simple"}
    return {
        "live": LIVE,
        "ready": call("ServerReady", pb.ServerReadyRequest()),
        "model ready": call("ModelReady", pb.ModelReadyRequest(**model)),
        "model not ready": call("ModelReady", pb.ModelReadyRequest(name="nobody")),
        "version not ready": call("ModelReady", pb.ModelReadyRequest(name="simple", version="7")),
        "server": call("ServerMetadata", pb.ServerMetadataRequest()),
        "metadata": call("ModelMetadata", pb.ModelMetadataRequest(**model)),
        "metadata of an unknown one": call("ModelMetadata", pb.ModelMetadataRequest(name="nobody")),
        "config": call("ModelConfig", pb.ModelConfigRequest(**model)),
        "config of an unknown version": call("ModelConfig", pb.ModelConfigRequest(name="simple", version="x")),
        "one inference to count": infer(simple(model="counted_grpc")),
        "one failure to count": infer(simple(9, model="counted_grpc")),
        "statistics": call("ModelStatistics", pb.ModelStatisticsRequest(name="counted_grpc")),
        "statistics of a version": call("ModelStatistics", pb.ModelStatisticsRequest(name="counted_grpc", version="1")),
        "statistics of an unknown one": call("ModelStatistics", pb.ModelStatisticsRequest(name="nobody")),
        "index": call("RepositoryIndex", pb.RepositoryIndexRequest()),
        "index of what is ready": call("RepositoryIndex", pb.RepositoryIndexRequest(ready=True)),
        "index of a repository": call("RepositoryIndex", pb.RepositoryIndexRequest(repository_name="other")),
        "load what is loaded": call("RepositoryModelLoad", load(model_name="simple")),
        "load what is not there": call("RepositoryModelLoad", load(model_name="nobody")),
        "load with a wrong config": call("RepositoryModelLoad", configured),
        "unload": call("RepositoryModelUnload", unload(model_name="simple_int8")),
        "load again": call("RepositoryModelLoad", load(model_name="simple_int8")),
        "unload what is not there": call("RepositoryModelUnload", unload(model_name="nobody")),
        "trace settings": call("TraceSetting", pb.TraceSettingRequest()),
        "trace settings of a model": call("TraceSetting", pb.TraceSettingRequest(model_name="simple")),
        "trace settings of an unknown one": call("TraceSetting", pb.TraceSettingRequest(model_name="nobody")),
        "change them": call("TraceSetting", settings),
        "change them back": call("TraceSetting", back),
        "a wrong one": call("TraceSetting", wrong),
        "log settings": call("LogSettings", pb.LogSettingsRequest()),
        "change those": call("LogSettings", log),
        "change those back": call("LogSettings", log_back),
        "an unknown one": call("LogSettings", log_wrong),
        "no protobuf": call("ModelMetadata", b"\xff\xff"),
        "health": call(f"{HEALTH}Check", health_pb2.HealthCheckRequest()),
        "health of a service": call(
            f"{HEALTH}Check", health_pb2.HealthCheckRequest(service="inference.GRPCInferenceService")
        ),
        "health of an unknown service": call(f"{HEALTH}Check", health_pb2.HealthCheckRequest(service="nobody")),
        "watch health": [
            *call(f"{HEALTH}Watch", health_pb2.HealthCheckRequest()),
            ["answers", 0, 1],
            ["pause", 0],
            ["cancel", 0],
            *then_live(1),
        ],
        "watch an unknown service": [
            *call(f"{HEALTH}Watch", health_pb2.HealthCheckRequest(service="nobody")),
            ["answers", 0, 1],
            ["cancel", 0],
        ],
        "unknown method": call("NoMethod", b""),
        "unknown service": call("/no.Service/Method", b""),
    }


def calls() -> dict[str, list[Step]]:
    """What HTTP/2 and gRPC say around a message: headers, deadlines, cancellations."""
    live, ready = "ServerLive", pb.ServerReadyRequest()
    wrong_headers: dict[str, Headers] = {
        "content type with proto": {"content-type": "application/grpc+proto"},
        "content type with a parameter": {"content-type": "application/grpc;charset=utf-8"},
        "content type of JSON": {"content-type": "application/json"},
        "content type of gRPC-Web": {"content-type": "application/grpc-web"},
        "no content type": {"content-type": None},
        "no te": {"te": None},
        "another te": {"te": "gzip"},
        "no user agent": {"user-agent": None},
        "GET": {":method": "GET"},
        "PUT": {":method": "PUT"},
        "HEAD": {":method": "HEAD"},
        "OPTIONS": {":method": "OPTIONS"},
        "no method": {":method": None},
        "scheme https": {":scheme": "https"},
        "another scheme": {":scheme": "ftp"},
        "no scheme": {":scheme": None},
        "no authority": {":authority": None},
        "host instead of authority": {":authority": None, "host": "localhost"},
        "no path": {":path": None},
        "a path that is empty": {":path": ""},
        "a path without a slash": {":path": "inference.GRPCInferenceService/ServerLive"},
        "a path with one part": {":path": "/ServerLive"},
        "a path with a query": {":path": "/inference.GRPCInferenceService/ServerLive?a=b"},
        "a path that is quoted": {":path": "/inference.GRPCInferenceService%2FServerLive"},
        "a path in other letters": {":path": "/inference.grpcinferenceservice/serverlive"},
        "the path of HTTP": {":path": "/v2/health/live"},
        "own metadata": {"x-own": "value", "x-own-bin": "AQID"},
        "metadata several times": {"x-own": ["one", "two"]},
        "metadata of no base64": {"x-own-bin": "no base64!"},
        "metadata of much": {"x-own": "x" * 12_000},
        "metadata of many": {f"x-own-{place}": "value" for place in range(100)},
        "an upper-case name": {"X-Own": "value"},
        "a connection header": {"connection": "keep-alive"},
        "blanks around a value": {"x-own": " value "},
        "cookies": {"cookie": ["a=b", "c=d"]},
        "traceparent": {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"},
    }
    timeouts = (
        "1H",
        "1M",
        "10S",
        "10000m",
        "9999999u",
        "99999999n",
        "00000010S",
        "10",
        "S",
        "-1S",
        "1.5S",
        "123456789S",
        "10 S",
        "10s",
        "",
        "10X",
        "+10S",
        "1S1S",
    )
    sleepy = number("sleepy", 400)
    deadline = {"grpc-timeout": "100m"}
    return {
        **{name: call(live, ready, headers) for name, headers in wrong_headers.items()},
        "metadata of too much": [  # the bound may hold from the client's acknowledgement of settings on
            *LIVE,
            ["wait", 0],
            ["open", live, {"x-own": "x" * 20_000}],
            ["message", 1, encoded(ready)],
            ["end", 1],
            ["wait", 1],
            *then_live(2),
        ],
        **{f"grpc-timeout '{value}'": call(live, ready, {"grpc-timeout": value}) for value in timeouts},
        "grpc-timeout '10S' of an inference": infer(simple(), {"grpc-timeout": "10S"}),
        "grpc-timeout '1H' of an inference": infer(simple(), {"grpc-timeout": "1H"}),
        "a wrong grpc-timeout of an inference": infer(simple(), {"grpc-timeout": "soon"}),
        "deadline": infer(sleepy, deadline),
        "deadline in microseconds": infer(sleepy, {"grpc-timeout": "100000u"}),
        "deadline in nanoseconds": infer(sleepy, {"grpc-timeout": "99999999n"}),
        "many deadlines": [
            step
            for place in range(30)
            for step in (
                ["open", "ModelStreamInfer" if place % 2 else "ModelInfer", {"grpc-timeout": f"{100 + place % 7}m"}],
                ["message", place, encoded(sleepy)],
                ["end", place],
            )
        ],
        "deadline of a stream": stream(sleepy, headers=deadline),
        "deadline before the message": [["open", "ModelInfer", deadline]],
        "deadline before the end of the message": [
            ["open", "ModelInfer", deadline],
            ["data", 0, pack(b"\0\0\0\1\0half")],
        ],
        "deadline of a stream without messages": [["open", "ModelStreamInfer", deadline]],
        "cancelled": [*infer(sleepy), ["cancel", 0], *then_live(1)],
        "cancelled with another code": [*infer(sleepy), ["cancel", 0, 2], *then_live(1)],
        "cancelled without a message": [["open", "ModelInfer", {}], ["cancel", 0], *then_live(1)],
        "cancelled within a message": [
            ["open", "ModelInfer", {}],
            ["data", 0, pack(b"\0\0\0\1\0half")],
            ["cancel", 0],
            *then_live(1),
        ],
        "a stream cancelled": [
            ["open", "ModelStreamInfer", {}],
            ["message", 0, encoded(sleepy)],
            ["cancel", 0],
            *then_live(1),
        ],
        "a cancelled call and then the same": [
            *infer(simple()),
            ["cancel", 0],
            ["open", "ModelInfer", {}],
            ["message", 1, encoded(simple())],
            ["end", 1],
        ],
    }


def messages() -> dict[str, list[Step]]:
    """How a message is framed and compressed."""
    message = simple().SerializeToString(deterministic=True)
    framed = len(message).to_bytes(5) + message
    squeezed, deflated = gzip.compress(message, 6, mtime=0), zlib.compress(message)
    raw = zlib.compressobj(wbits=-15)
    bare = raw.compress(message) + raw.flush()

    def split(*sizes: int) -> list[Step]:
        steps: list[Step] = [["open", "ModelInfer", {}]]
        at = 0
        for size in (*sizes, len(framed) - sum(sizes)):
            steps.append(["data", 0, pack(framed[at : at + size])])
            at += size
        return [*steps, ["end", 0]]

    def zipped(data: bytes, encoding: str | None, flag: int = 1, **more: str) -> list[Step]:
        return infer(data, {"grpc-encoding": encoding, **more}, flag)

    return {
        "in one piece": split(),
        "prefix and message": split(5),
        "a prefix in pieces": split(1, 1, 1, 1),
        "byte by byte": split(*[1] * (len(framed) - 1)),
        "without an end": split()[:-1],
        "no message": [["open", "ModelInfer", {}], ["end", 0]],
        "headers that end the call": [["open", "ModelInfer", {}, True]],
        "no message of another method": [["open", "ServerLive", {}], ["end", 0]],
        "no message of a metadata method": [["open", "ModelMetadata", {}], ["end", 0]],
        "two messages": [
            ["open", "ModelInfer", {}],
            ["message", 0, encoded(message)],
            ["message", 0, encoded(message)],
            ["end", 0],
        ],
        "two messages of another method": [
            ["open", "ModelMetadata", {}],
            *[["message", 0, encoded(pb.ModelMetadataRequest(name="simple"))]] * 2,
            ["end", 0],
        ],
        "half a prefix": [["open", "ModelInfer", {}], ["data", 0, pack(framed[:3])], ["end", 0]],
        "half a message": [["open", "ModelInfer", {}], ["data", 0, pack(framed[:50])], ["end", 0]],
        "a message and bytes": [["open", "ModelInfer", {}], ["data", 0, pack(framed + b"\0\0")], ["end", 0]],
        "half a message that is completed": [
            ["open", "ModelInfer", {}],
            ["data", 0, pack(framed[:50])],
            ["pause", 0],
            ["data", 0, pack(framed[50:])],
            ["end", 0],
        ],
        "longer than it may be": [
            ["open", "ModelInfer", {}],
            ["data", 0, pack(b"\0\x7f\xff\xff\xff" + message)],
            ["end", 0],
        ],
        "longer than there is": [["open", "ModelInfer", {}], ["data", 0, pack(b"\0\0\1\0\0" + message)], ["end", 0]],
        "gzip": zipped(squeezed, "gzip"),
        "deflate": zipped(deflated, "deflate"),
        "deflate without its header": zipped(bare, "deflate"),
        "identity": zipped(message, "identity", 0),
        "identity that says it is compressed": zipped(message, "identity"),
        "compressed without saying how": zipped(squeezed, None),
        "gzip announced and not used": zipped(message, "gzip", 0),
        "another encoding": zipped(message, "br"),
        "another encoding that is not used": zipped(message, "br", 0),
        "encoding in other letters": zipped(squeezed, "GZIP"),
        "gzip and bytes behind it": zipped(squeezed + b"more", "gzip"),
        "gzip in two members": zipped(
            gzip.compress(message[:40], mtime=0) + gzip.compress(message[40:], mtime=0), "gzip"
        ),
        "gzip that is cut off": zipped(squeezed[:-9], "gzip"),
        "gzip without its trailer": zipped(squeezed[:-8], "gzip"),
        "gzip that is damaged": zipped(b"\x1f\x8b\x08 and nothing of gzip", "gzip"),
        "gzip with a wrong sum": zipped(squeezed[:-8] + bytes(8), "gzip"),
        "gzip of nothing": zipped(b"", "gzip"),
        "deflate that is gzip": zipped(squeezed, "deflate"),
        "a large one in gzip": zipped(
            gzip.compress(
                request(
                    "simple_identity", [("INPUT0", "BYTES", [1, 1], strings(b"y" * LARGE_BYTES))]
                ).SerializeToString(),
                mtime=0,
            ),
            "gzip",
        ),
        "answers that may be compressed": infer(message, {"grpc-accept-encoding": "identity,deflate,gzip"}),
    }


def streams() -> dict[str, list[Step]]:
    """ModelStreamInfer."""
    final = {"triton_enable_empty_final_response": True}
    sequence = [
        number("simple_sequence", value, "INPUT", shape=[1, 1], parameters={"sequence_id": 88, **flags})
        for value, flags in ((3, {"sequence_start": True}), (4, {}), (5, {"sequence_end": True}))
    ]
    return {
        "one": stream(simple(id="1")),
        "several": stream(simple(id="1"), simple(2, id="2"), simple(id="3")),
        "several at once": [*stream(*(simple(id=str(place)) for place in range(5)), wait=False), ["any_order", 0]],
        "none": [["open", "ModelStreamInfer", {}], ["end", 0]],
        "headers that end it": [["open", "ModelStreamInfer", {}, True]],
        "an error inside": stream(simple(id="1"), simple(id="2", model="nobody"), simple(id="3")),
        "only errors": stream(simple(id="1", model="nobody"), simple(9, id="2")),
        "an error of a Python model": stream(number("failing", 1, id="1"), simple(id="2")),
        "a message that is no request": stream(simple(id="1"), b"\xff\xff", simple(id="3")),
        "a decoupled model": stream(number("counts", 3, id="1")),
        "a decoupled model without responses": stream(number("counts", 0, id="1"), simple(id="2"), wait=False),
        "a decoupled model and the final response": stream(number("counts", 2, id="1", parameters=final)),
        "no response but the final one": stream(number("counts", 0, id="1", parameters=final)),
        "a plain model and the final response": stream(simple(id="1", parameters=final)),
        "a sequence": stream(*sequence),
        "ended while one is under way": stream(number("sleepy", 100, id="1")),
        "without an end": [*stream(simple(id="1"))[:-1], ["answers", 0, 1], ["pause", 0], ["cancel", 0], *then_live(1)],
        "half a message": [["open", "ModelStreamInfer", {}], ["data", 0, pack(b"\0\0\0\1\0half")], ["end", 0]],
        "a request and half a message": [
            *stream(simple(id="1"))[:-1],
            ["answers", 0, 1],
            ["data", 0, pack(b"\0\0\0\1\0half")],
            ["end", 0],
        ],
        "gzip": [
            ["open", "ModelStreamInfer", {"grpc-encoding": "gzip"}],
            ["message", 0, encoded(gzip.compress(simple(id="1").SerializeToString(), mtime=0)), 1],
            ["answers", 0, 1],
            ["message", 0, encoded(simple(id="2"))],
            ["end", 0],
        ],
        "gzip that is damaged": [
            ["open", "ModelStreamInfer", {"grpc-encoding": "gzip"}],
            ["message", 0, encoded(b"\x1f\x8b\x08 no"), 1],
            ["end", 0],
        ],
        "large ones": stream(
            *(
                request("simple_identity", [("INPUT0", "BYTES", [1, 1], strings(b"z" * LARGE_BYTES))], id=str(place))
                for place in range(2)
            )
        ),
    }


def fuzz() -> dict[str, list[Step]]:
    """Requests that are nearly right."""
    identity = request("simple_identity", [("INPUT0", "BYTES", [1, 2], strings(b"ab", b"c"))], id="f")
    seeds = [
        simple(id="f", parameters={"own": 1}, outputs={"OUTPUT0": {"classification": 2}}),
        simple(tensors=[("INPUT0", "INT32", [1, 16], A.tolist()), ("INPUT1", "INT32", [1, 16], B.tolist())]),
        identity,
    ]
    found = mutated_messages([seed.SerializeToString(deterministic=True) for seed in seeds], 90)
    return {str(place): (stream if place % 5 == 0 else infer)(message) for place, message in enumerate(found)}


def strict() -> dict[str, list[Step]]:
    """A server with restricted methods, compressed answers and small messages."""
    key = {"triton-grpc-protocol-infer-key": "s3cret"}
    admin = {"triton-grpc-protocol-admin": "0ther"}
    both = {**key, "grpc-accept-encoding": "identity,deflate,gzip"}
    message = simple(8)
    large = request("simple_identity", [("INPUT0", "BYTES", [1, 1], strings(b"x" * 70_000))])
    fits = request("simple_identity", [("INPUT0", "BYTES", [1, 1], strings(b"x" * 60_000))])
    return {
        "no key": infer(message),
        "a wrong key": infer(message, {"triton-grpc-protocol-infer-key": "s3cre"}),
        "the key of another": infer(message, admin),
        "the key": infer(message, key),
        "no key for a stream": stream(message),
        "the key for a stream": stream(message, headers=key),
        "no key for the index": call("RepositoryIndex", pb.RepositoryIndexRequest()),
        "the key for the index": call("RepositoryIndex", pb.RepositoryIndexRequest(ready=True), admin),
        "no key for log settings": call("LogSettings", pb.LogSettingsRequest()),
        "live needs none": LIVE,
        "server": call("ServerMetadata", pb.ServerMetadataRequest()),
        "load": call("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="simple"), admin),
        "answers for who accepts gzip": infer(message, {**key, "grpc-accept-encoding": "gzip"}),
        "answers for who accepts deflate": infer(message, {**key, "grpc-accept-encoding": "deflate"}),
        "answers for who accepts both": infer(message, both),
        "answers for who accepts another": infer(message, {**key, "grpc-accept-encoding": "br"}),
        "answers of a stream": stream(message, message, headers=both),
        "an error is not compressed": infer(simple(model="nobody"), both),
        "metadata are not compressed": call("ModelMetadata", pb.ModelMetadataRequest(name="simple"), both),
        "a message that is too large": infer(large, key),
        "a message that just fits": infer(fits, key),
        "a message that is too large once inflated": infer(
            gzip.compress(large.SerializeToString(), mtime=0), {**key, "grpc-encoding": "gzip"}, 1
        ),
        "the same in deflate": infer(zlib.compress(large.SerializeToString()), {**key, "grpc-encoding": "deflate"}, 1),
        "one in a stream that is too large": stream(large, message, headers=key, wait=False),
    }
