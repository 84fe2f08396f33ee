"""What the corpus asks over HTTP."""

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tests.wire.corpus import SEGMENT, Case, Step, pack
from tests.wire.grpc_requests import LARGE_BYTES, A, B, strings
from tests.wire.mutations import mutated_messages

Headers = Sequence[str]
INFER = "/v2/models/simple/infer"
IDENTITY = "/v2/models/simple_identity/infer"
LARGE = 40_000  # of strings that are sent as JSON


def sent(
    verb: str, path: str, body: Any = b"", headers: Headers = (), length: bool = True, version: str = "1.1"
) -> bytes:
    """Return a request; a body that is no bytes is sent as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body, separators=(",", ":")).encode()
    lines = [f"{verb} {path} HTTP/{version}", "host: localhost", *headers]
    if length and (content or verb == "POST"):
        lines.append(f"content-length: {len(content)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + content


def ask(verb: str, path: str, body: Any = b"", headers: Headers = (), **more: Any) -> list[Step]:
    """Return the steps of one request."""
    return [["send", pack(sent(verb, path, body, headers, **more))], ["read", 1, verb]]


def post(path: str, body: Any = b"", headers: Headers = (), **more: Any) -> list[Step]:
    """Return the steps of one that has a body."""
    return ask("POST", path, body, headers, **more)


def get(path: str, headers: Headers = ()) -> list[Step]:
    """Return the steps of one that has none."""
    return ask("GET", path, b"", headers)


def bytes_sent(data: bytes) -> list[Step]:
    """Return the steps of bytes after which the server closes."""
    return [["send", pack(data)], ["closed"]]


def tensor(
    name: str, data: Any = None, shape: Sequence[int] = (1, 16), datatype: str = "INT32", **parameters: Any
) -> dict[str, Any]:
    """Return a tensor of a request."""
    content = {"name": name, "shape": list(shape), "datatype": datatype}
    return content | ({"parameters": parameters} if parameters else {}) | ({} if data is None else {"data": data})


def simple(**more: Any) -> dict[str, Any]:
    """Return the request of Triton's first example."""
    return {"inputs": [tensor("INPUT0", A.tolist()), tensor("INPUT1", B.tolist())], **more}


def binary(content: Any, *tensors: bytes, headers: Headers = ()) -> tuple[bytes, Headers]:
    """Return a body with binary tensors and its headers."""
    text = json.dumps(content, separators=(",", ":")).encode()
    return text + b"".join(tensors), (f"Inference-Header-Content-Length: {len(text)}", *headers)


RAWS = (A.tobytes(), B.tobytes())
BINARY = {"inputs": [tensor("INPUT0", binary_data_size=64), tensor("INPUT1", binary_data_size=64)]}


def cases() -> Iterator[Case]:
    """Yield all cases, in the order in which they are sent."""
    for server, kinds in (
        ("plain", (inferences, generate, memory, errors, methods, paths, connections, bodies, fuzz)),
        ("strict", (strict,)),
    ):
        for kind in kinds:
            for name, steps in kind().items():
                yield Case(f"{kind.__name__}: {name}", server, steps)


def inferences() -> dict[str, list[Step]]:
    """Requests that Triton's examples send."""
    wanted = {"outputs": [{"name": "OUTPUT0", "parameters": {"binary_data": True}}, {"name": "OUTPUT1"}]}
    digits = [strings(*(str(each).encode() for each in side)) for side in (A, B)]
    texts = [
        tensor(name, [str(each) for each in side], datatype="BYTES") for name, side in (("INPUT0", A), ("INPUT1", B))
    ]
    binary_texts = {
        "inputs": [
            tensor(f"INPUT{place}", datatype="BYTES", binary_data_size=len(side)) for place, side in enumerate(digits)
        ]
    }
    image = np.zeros((1, 3, 64, 64), np.float32)
    image[0, 2] = 1
    classified = {
        "inputs": [tensor("IMAGE", shape=image.shape, datatype="FP32", binary_data_size=image.nbytes)],
        "outputs": [{"name": "COLOUR", "parameters": {"classification": 2}}],
    }
    words = {"inputs": [tensor("INPUT0", ["one", "", "zwölf \U0001f600", '\0\n"'], (1, 4), "BYTES")]}
    large = strings(b"x" * LARGE_BYTES)
    flags: Sequence[dict[str, Any]] = ({"sequence_start": True}, {}, {"sequence_end": True})
    sequence = [
        {"inputs": [tensor("INPUT", [place + 5], (1, 1))], "parameters": dict(each, sequence_id=66)}
        for place, each in enumerate(flags)
    ]
    return {
        "JSON": post(INFER, simple()),
        "JSON, a version": post("/v2/models/simple/versions/1/infer", simple(id="a-1")),
        "JSON, nested": post(
            INFER, {"inputs": [tensor("INPUT0", [A.tolist()]), tensor("INPUT1", B.reshape(4, 4).tolist())]}
        ),
        "JSON with blanks": post(INFER, json.dumps(simple(), indent=3).encode()),
        "one output": post(INFER, simple(outputs=[{"name": "OUTPUT1"}])),
        "binary": post(INFER, *binary(BINARY, *RAWS)),
        "binary in, binary out": post(INFER, *binary({**BINARY, "parameters": {"binary_data_output": True}}, *RAWS)),
        "JSON in, binary out": post(INFER, simple(parameters={"binary_data_output": True})),
        "a mix in": post(
            INFER,
            *binary({"inputs": [tensor("INPUT0", A.tolist()), tensor("INPUT1", binary_data_size=64)]}, B.tobytes()),
        ),
        "a mix out": post(INFER, *binary({**BINARY, **wanted}, *RAWS)),
        "parameters": post(
            INFER, simple(parameters={"own": "x", "priority": 1, "timeout": 10_000_000, "flag": True, "share": 0.5})
        ),
        "classification": post(INFER, simple(outputs=[{"name": "OUTPUT0", "parameters": {"classification": 3}}])),
        "classification with labels": post("/v2/models/simple_image/infer", *binary(classified, image.tobytes())),
        "classification as binary": post(
            INFER, simple(outputs=[{"name": "OUTPUT0", "parameters": {"classification": 3, "binary_data": True}}])
        ),
        "strings": post("/v2/models/simple_string/infer", {"inputs": texts}),
        "binary strings": post(
            "/v2/models/simple_string/infer",
            *binary({**binary_texts, "parameters": {"binary_data_output": True}}, *digits),
        ),
        "INT8": post(
            "/v2/models/simple_int8/infer",
            {"inputs": [tensor(name, side.tolist(), datatype="INT8") for name, side in (("INPUT0", A), ("INPUT1", B))]},
        ),
        "identity of strings": post(IDENTITY, words),
        "identity of a large string": post(
            IDENTITY,
            *binary(
                {
                    "inputs": [tensor("INPUT0", shape=(1, 1), datatype="BYTES", binary_data_size=len(large))],
                    "parameters": {"binary_data_output": True},
                },
                large,
            ),
        ),
        "identity of a large string in JSON": post(
            IDENTITY, {"inputs": [tensor("INPUT0", ["ü" * LARGE], (1, 1), "BYTES")]}
        ),
        "a raw body": post("/v2/models/sleepy/infer", np.int32(3).tobytes(), ("Inference-Header-Content-Length: 0",)),
        "a raw body of a batched model": post(
            "/v2/models/simple_sequence/infer", np.int32(3).tobytes(), ("Inference-Header-Content-Length: 0",)
        ),
        "Python": post("/v2/models/sleepy/infer", {"inputs": [tensor("x", [0], (1,))]}),
        "sequence": [step for content in sequence for step in post("/v2/models/simple_sequence/infer", content)],
        "content type": post(INFER, simple(), ("content-type: application/json",)),
        "another content type": post(INFER, simple(), ("content-type: text/plain",)),
        "a query": post(f"{INFER}?a=b", simple()),
    }


def generate() -> dict[str, list[Step]]:
    """Triton's generate extension."""
    numbers = {"INPUT0": A.tolist(), "INPUT1": B.tolist()}
    text = {"text_input": "laut é"}
    return {
        "numbers": post("/v2/models/simple/generate", numbers),
        "numbers of a version": post("/v2/models/simple/versions/1/generate", numbers),
        "a text": post("/v2/models/shouting/generate", text),
        "a text and parameters": post(
            "/v2/models/shouting/generate", {**text, "parameters": {"temperature": 0.5}, "stream": False}
        ),
        "an id": post("/v2/models/shouting/generate", {**text, "id": "7"}),
        "a stream": post("/v2/models/shouting/generate_stream", text),
        "a stream of numbers": post("/v2/models/simple/generate_stream", numbers),
        "a stream of an unknown model": post("/v2/models/nobody/generate_stream", text),
        "a decoupled model": post("/v2/models/counts/generate", {"x": 2}),
        "a stream of a decoupled model": [*post("/v2/models/counts/generate_stream", {"x": 2})],
        "without an input": post("/v2/models/shouting/generate", {"other": "x"}),
        "a wrong type": post("/v2/models/shouting/generate", {"text_input": {"a": 1}}),
        "no JSON": post("/v2/models/shouting/generate", b"{"),
        "GET": get("/v2/models/shouting/generate"),
    }


def memory() -> dict[str, list[Step]]:
    """Tensors in shared memory."""
    root = "/v2/systemsharedmemory"

    def place(offset: int, size: int = 64, region: str = "wire") -> dict[str, Any]:
        return {"shared_memory_region": region, "shared_memory_byte_size": size, "shared_memory_offset": offset}

    inside = {"inputs": [tensor("INPUT0", **place(0)), tensor("INPUT1", **place(64))]}
    outside = {
        "outputs": [{"name": "OUTPUT0", "parameters": place(128)}, {"name": "OUTPUT1", "parameters": place(192)}]
    }
    region = {"key": f"/{SEGMENT}", "offset": 0, "byte_size": 4096}
    return {
        "status of none": get(f"{root}/status"),
        "register": post(f"{root}/region/wire/register", region),
        "register twice": post(f"{root}/region/wire/register", region),
        "status": get(f"{root}/status"),
        "status of one": get(f"{root}/region/wire/status"),
        "status of an unknown one": get(f"{root}/region/nobody/status"),
        "outputs": [*post(INFER, simple(**outside)), ["remember", 128, 128]],
        "inputs": post(INFER, inside),
        "an unknown region": post(
            INFER, {"inputs": [tensor("INPUT0", **place(0, region="nobody")), tensor("INPUT1", B.tolist())]}
        ),
        "behind the end": post(INFER, {"inputs": [tensor("INPUT0", **place(4096)), tensor("INPUT1", B.tolist())]}),
        "a negative offset": post(INFER, {"inputs": [tensor("INPUT0", **place(-1)), tensor("INPUT1", B.tolist())]}),
        "no key": post(f"{root}/region/new/register", {"byte_size": 64}),
        "no JSON": post(f"{root}/region/new/register", b"[]"),
        "of a GPU": post(
            "/v2/cudasharedmemory/region/gpu/register",
            {"raw_handle": {"b64": "aGFuZGxl"}, "device_id": 0, "byte_size": 64},
        ),
        "of a GPU, no base64": post(
            "/v2/cudasharedmemory/region/gpu/register", {"raw_handle": {"b64": "?"}, "device_id": 0, "byte_size": 64}
        ),
        "status of those of GPUs": get("/v2/cudasharedmemory/status"),
        "unregister those of GPUs": post("/v2/cudasharedmemory/unregister"),
        "unregister": post(f"{root}/region/wire/unregister"),
        "unregister all": post(f"{root}/unregister"),
    }


def errors() -> dict[str, list[Step]]:
    """The table of errors."""

    def first(**changes: Any) -> list[Step]:
        return post(INFER, {"inputs": [{**tensor("INPUT0", A.tolist()), **changes}, tensor("INPUT1", B.tolist())]})

    rows = {name: tensor(name, A.tolist() * 9, (9, 16)) for name in ("INPUT0", "INPUT1")}
    return {
        "unknown model": post("/v2/models/nobody/infer", simple()),
        "nearly the name": post("/v2/models/simpel/infer", simple()),
        "unknown version": post("/v2/models/simple/versions/7/infer", simple()),
        "a version that is no number": post("/v2/models/simple/versions/new/infer", simple()),
        "wrong datatype": first(datatype="FP32"),
        "unknown datatype": first(datatype="int32"),
        "no datatype": first(datatype=None),
        "wrong shape": first(shape=[1, 4, 4]),
        "a shape that is none": first(shape="16"),
        "a shape of fractions": first(shape=[1, 16.5]),
        "batch too large": post(INFER, {"inputs": list(rows.values())}),
        "too few numbers": first(data=A.tolist()[:-1]),
        "too large a number": first(data=[2**31, *A.tolist()[1:]]),
        "fractions": first(data=[0.5, *A.tolist()[1:]]),
        "texts": first(data=["1", *A.tolist()[1:]]),
        "no data": first(data=None),
        "another name": first(name="INPUT9"),
        "missing input": post(INFER, {"inputs": [tensor("INPUT0", A.tolist())]}),
        "no inputs": post(INFER, {"inputs": []}),
        "no word of inputs": post(INFER, {}),
        "unexpected output": post(INFER, simple(outputs=[{"name": "OUTPUT9"}])),
        "reserved parameter": post(INFER, simple(parameters={"triton_own": 1})),
        "an object as a parameter": post(INFER, simple(parameters={"own": {}})),
        "an id that is no text": post(INFER, simple(id=7)),
        "a list": post(INFER, b"[]"),
        "a number": post(INFER, b"7"),
        "no JSON": post(INFER, b"{"),
        "no UTF-8": post(INFER, b'{"inputs":"\xff"}'),
        "no body": post(INFER),
        "a name twice": post(INFER, b'{"id":"1","id":"2","inputs":[]}'),
        "deep": post(INFER, b"[" * 2000 + b"]" * 2000),
        "too little binary data": post(INFER, *binary(BINARY, RAWS[0], RAWS[1][:-1])),
        "too much binary data": post(INFER, *binary(BINARY, *RAWS, b"x")),
        "a wrong binary size": post(
            INFER,
            *binary(
                {"inputs": [tensor("INPUT0", binary_data_size=60), tensor("INPUT1", binary_data_size=64)]},
                RAWS[0][:60],
                RAWS[1],
            ),
        ),
        "a length beyond the body": post(INFER, simple(), ("Inference-Header-Content-Length: 99999",)),
        "a length that is none": post(INFER, simple(), ("Inference-Header-Content-Length: ten",)),
        "a negative length": post(INFER, simple(), ("Inference-Header-Content-Length: -1",)),
        "a raw body for two inputs": post(INFER, A.tobytes(), ("Inference-Header-Content-Length: 0",)),
        "no number": post(
            "/v2/models/simple_string/infer",
            {"inputs": [tensor(name, ["x"] * 16, datatype="BYTES") for name in ("INPUT0", "INPUT1")]},
        ),
        "a sequence that has not begun": post(
            "/v2/models/simple_sequence/infer",
            {"inputs": [tensor("INPUT", [1], (1, 1))], "parameters": {"sequence_id": 98}},
        ),
        "timeout of the request": post(
            "/v2/models/sleepy/infer", {"inputs": [tensor("x", [400], (1,))], "parameters": {"timeout": 50_000}}
        ),
        "a Python model's error": post("/v2/models/failing/infer", {"inputs": [tensor("x", [1], (1,))]}),
        "decoupled": post("/v2/models/counts/infer", {"inputs": [tensor("x", [1], (1,))]}),
    }


def methods() -> dict[str, list[Step]]:
    """All other methods; what they change is changed back."""
    load = "/v2/repository/models"
    return {
        "live": get("/v2/health/live"),
        "ready": get("/v2/health/ready"),
        "model ready": get("/v2/models/simple/ready"),
        "model not ready": get("/v2/models/nobody/ready"),
        "version not ready": get("/v2/models/simple/versions/7/ready"),
        "server": get("/v2"),
        "metadata": get("/v2/models/simple"),
        "metadata of a version": get("/v2/models/simple/versions/1"),
        "metadata of an unknown one": get("/v2/models/nobody"),
        "config": get("/v2/models/simple/config"),
        "one inference to count": post("/v2/models/counted_http/infer", simple()),
        "statistics": get("/v2/models/counted_http/stats"),
        "statistics of a version": get("/v2/models/counted_http/versions/1/stats"),
        "statistics of an unknown one": get("/v2/models/nobody/stats"),
        "index": post("/v2/repository/index"),
        "index of what is ready": post("/v2/repository/index", {"ready": True}),
        "index, a wrong type": post("/v2/repository/index", {"ready": "yes"}),
        "index of a repository": post("/v2/repository/other/index"),
        "load what is loaded": post(f"{load}/simple/load"),
        "load what is not there": post(f"{load}/nobody/load"),
        "load with a wrong config": post(f"{load}/simple/load", {"parameters": {"config": "{"}}),
        "load with a wrong file": post(f"{load}/simple/load", {"parameters": {"file:1/model.onnx": "?"}}),
        "unload": post(f"{load}/simple_int8/unload"),
        "load again": post(f"{load}/simple_int8/load"),
        "unload what is not there": post(f"{load}/nobody/unload"),
        "trace settings": get("/v2/trace/setting"),
        "trace settings of a model": get("/v2/models/simple/trace/setting"),
        "trace settings of an unknown one": get("/v2/models/nobody/trace/setting"),
        "change them": post("/v2/trace/setting", {"trace_rate": "7"}),
        "change them back": post("/v2/trace/setting", {"trace_rate": None}),
        "a wrong one": post("/v2/trace/setting", {"trace_level": {}}),
        "log settings": get("/v2/logging"),
        "change those": post("/v2/logging", {"log_verbose_level": 1}),
        "change those back": post("/v2/logging", {"log_verbose_level": 0}),
        "an unknown one": post("/v2/logging", {"log_nothing": True}),
        "page": [["send", pack(sent("GET", "/"))], ["read", 1, "GET", False]],
        "state": [["send", pack(sent("GET", "/v2/gangway/state"))], ["read", 1, "GET", False]],
        "metrics": [["at", "metrics"], ["send", pack(sent("GET", "/metrics"))], ["read", 1, "GET", False]],
        "metrics, HEAD": [["at", "metrics"], *ask("HEAD", "/metrics")],
        "metrics, another path": [["at", "metrics"], *get("/v2/health/live")],
        "metrics, POST": [["at", "metrics"], *post("/metrics")],
        "metrics, the root": [["at", "metrics"], *get("/")],
        "metrics compressed": [
            ["at", "metrics"],
            ["send", pack(sent("GET", "/metrics", headers=["accept-encoding: gzip"]))],
            ["read", 1, "GET", False],
        ],
    }


def paths() -> dict[str, list[Step]]:
    """Paths and verbs that there are not."""
    verbs = ("HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE")
    unknown = (
        "/v2/",
        "/v3",
        "/v2/models",
        "/v2/models/",
        "/v2/models//infer",
        "/v2/health",
        "/v2/health/dead",
        "/favicon.ico",
        "/v2/models/simple/versions",
        "/v2/models/simple/infer/",
        "/V2",
        "//v2",
        "/v2/models/simple/../simple",
        "/v2/models/%73imple",
        "/v2/models/simp%zz",
        "/v2/models/%ff",
        "/v2/models/%c3%a9",
        "/v2/models/a%2Fb",
        "/v2/models/a%00b",
        "/v2/models/" + "x" * 5000,
    )
    return {
        **{f"{verb} of an inference": ask(verb, INFER) for verb in ("GET", *verbs)},
        **{f"{verb} of health": ask(verb, "/v2/health/live") for verb in verbs},
        "POST of health": post("/v2/health/live"),
        "POST of metadata": post("/v2/models/simple"),
        "GET of the index": get("/v2/repository/index"),
        "an unknown verb": bytes_sent(sent("BREW", "/v2")),
        "a verb in small letters": bytes_sent(sent("get", "/v2")),
        "CONNECT": [["send", pack(b"CONNECT x:1 HTTP/1.1\r\nhost: x\r\n\r\n")], ["read", 1]],
        **{f"GET {path[:40]}": get(path) for path in unknown},
        "POST of an unknown path": post("/v2/nothing", simple()),
        "an absolute URL": get("http://localhost/v2/health/live"),
        "a fragment": get("/v2/health/live#part"),
        "a query": get("/v2/health/live?a=b&c"),
        "an asterisk": ask("OPTIONS", "*"),
    }


def connections() -> dict[str, list[Step]]:
    """How requests follow each other on a connection, and what is no request."""
    live, body = sent("GET", "/v2/health/live"), sent("POST", INFER, simple())
    last = sent("GET", "/v2/health/live", headers=["connection: close"])
    sleepy = sent("POST", "/v2/models/sleepy/infer", {"inputs": [tensor("x", [100], (1,))]})
    many = [f"x-{place}: y" for place in range(300)]
    return {
        "kept alive": [
            *get("/v2/health/live"),
            *post(INFER, simple()),
            *get("/v2/nothing"),
            ["send", pack(last)],
            ["closed"],
        ],
        "closed as asked": bytes_sent(last),
        "closed as asked after an inference": bytes_sent(sent("POST", INFER, simple(), ["connection: close"])),
        "HTTP/1.0": bytes_sent(sent("GET", "/v2/health/live", version="1.0")),
        "HTTP/1.0 kept alive": [
            *ask("GET", "/v2/health/live", headers=["connection: keep-alive"], version="1.0"),
            ["send", pack(last)],
            ["closed"],
        ],
        "HTTP/1.0 without a host": bytes_sent(b"GET /v2/health/live HTTP/1.0\r\n\r\n"),
        "HTTP/1.1 without a host": [["send", pack(b"GET /v2/health/live HTTP/1.1\r\n\r\n")], ["read", 1]],
        "pipelined": [["send", pack(live + body + live + body)], ["read", 4]],
        "pipelined behind one that takes long": [["send", pack(sleepy + live + body)], ["read", 3]],
        "pipelined with an error": [["send", pack(live + sent("GET", "/v2/nothing") + live)], ["read", 3]],
        "pipelined and closed": bytes_sent(live + last + live),
        "pipelined and half closed": [["send", pack(live + body)], ["half_close"], ["closed"]],
        "half closed": [["send", pack(body)], ["half_close"], ["closed"]],
        "half closed while it runs": [["send", pack(sleepy)], ["half_close"], ["closed"]],
        "half closed within the head": [["send", pack(body[:20])], ["half_close"], ["closed"]],
        "half closed within the body": [["send", pack(body[:-5])], ["half_close"], ["closed"]],
        "half closed at once": [["half_close"], ["closed"]],
        "in pieces": [["send", pack(body[:7])], ["pause"], ["send", pack(body[7:])], ["read", 1]],
        "empty lines before": [["send", pack(b"\r\n\r\n" + live)], ["read", 1]],
        "line ends without a return": [["send", pack(live.replace(b"\r\n", b"\n"))], ["read", 1]],
        "no HTTP": bytes_sent(b"hello\r\n\r\n"),
        "no version": bytes_sent(b"GET /v2/health/live\r\n\r\n"),
        "another version": bytes_sent(b"GET /v2/health/live HTTP/3.0\r\n\r\n"),
        "HTTP/1.2": [["send", pack(b"GET /v2/health/live HTTP/1.2\r\nhost: x\r\n\r\n")], ["pause"]],
        "a blank within the path": bytes_sent(b"GET /v2/health /live HTTP/1.1\r\nhost: x\r\n\r\n"),
        "bytes of TLS": bytes_sent(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40)),
        "a header without a colon": bytes_sent(b"GET /v2/health/live HTTP/1.1\r\nhost x\r\n\r\n"),
        "a header without a name": bytes_sent(b"GET /v2/health/live HTTP/1.1\r\n: x\r\n\r\n"),
        "a blank before the colon": bytes_sent(b"GET /v2/health/live HTTP/1.1\r\nhost : x\r\n\r\n"),
        "a folded header": bytes_sent(b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\na: b\r\n c\r\n\r\n"),
        "a byte 0 in a header": bytes_sent(b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\na: b\0c\r\n\r\n"),
        "Latin-1 in a header": [
            ["send", pack(b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\na: \xe9\r\n\r\n")],
            ["read", 1],
        ],
        "two hosts": [["send", pack(b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\nhost: y\r\n\r\n")], ["read", 1]],
        "too many headers": bytes_sent(sent("GET", "/v2/health/live", headers=many)),
        "a long header": [*ask("GET", "/v2/health/live", headers=["x: " + "y" * 30_000])],
        "an offer of HTTP/2": [
            *post(
                INFER,
                simple(),
                ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQCAAAAAAIAAAAA"),
            )
        ],
        "an offer of WebSocket": [
            *ask("GET", "/v2/health/live", headers=["connection: Upgrade", "upgrade: websocket"])
        ],
    }


def chunked(data: bytes, size: int, end: bytes = b"0\r\n\r\n", extension: bytes = b"") -> bytes:
    """Return a chunked body."""
    pieces = [data[at : at + size] for at in range(0, len(data), size)]
    return b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces) + end


def bodies() -> dict[str, list[Step]]:
    """How a body is sent, and how it and its answer are compressed."""
    text = json.dumps(simple(), separators=(",", ":")).encode()
    chunks = ("transfer-encoding: chunked",)
    expects = ("expect: 100-continue",)
    squeezed, deflated = gzip.compress(text, 6, mtime=0), zlib.compress(text)
    raw = zlib.compressobj(wbits=-15)
    bare = raw.compress(text) + raw.flush()
    head = sent("POST", INFER, text, expects)[: -len(text)]
    rows = {"inputs": [tensor(name, [1] * 128, (8, 16)) for name in ("INPUT0", "INPUT1")]}
    gzipped, deflates = ("content-encoding: gzip",), ("content-encoding: deflate",)

    def in_chunks(body: bytes, headers: Headers = chunks) -> list[Step]:
        return post(INFER, body, headers, length=False)

    def compressed(accept: str, content: Any = rows) -> list[Step]:
        return post(INFER, content, (f"accept-encoding: {accept}",))

    return {
        "chunked": in_chunks(chunked(text, 100)),
        "chunked by bytes": in_chunks(chunked(text, 1)),
        "chunked with extensions and trailers": in_chunks(chunked(text, 50, b"0\r\nx-trailer: y\r\n\r\n", b";a=b")),
        "chunked and a length": [
            [
                "send",
                pack(sent("POST", INFER, chunked(text, 50), (*chunks, f"content-length: {len(text)}"), length=False)),
            ],
            ["closed"],
        ],
        "chunked with a wrong size": bytes_sent(sent("POST", INFER, b"zz\r\n" + text, chunks, length=False)),
        "chunked without its end": [
            ["send", pack(sent("POST", INFER, chunked(text, 50, b""), chunks, length=False))],
            ["half_close"],
            ["closed"],
        ],
        "chunked within gzip": [*in_chunks(chunked(squeezed, 30), (*chunks, *gzipped))],
        "another transfer encoding": bytes_sent(
            sent("POST", INFER, text, ("transfer-encoding: gzip, chunked",), length=False)
        ),
        "two lengths": bytes_sent(sent("POST", INFER, text, (f"content-length: {len(text) + 1}",))),
        "a length that is none": bytes_sent(sent("POST", INFER, text, ("content-length: ten",), length=False)),
        "a negative length": bytes_sent(sent("POST", INFER, text, ("content-length: -1",), length=False)),
        "no length": [*post(INFER, b"", length=False)],
        "a length that is too large": post(INFER, b"", (f"content-length: {1 << 40}",), length=False),
        "a body of GET": [["send", pack(sent("GET", "/v2/health/live", b"body"))], ["read", 1]],
        "expected": [["send", pack(head)], ["pause"], ["send", pack(text)], ["read", 1]],
        "expected and sent at once": [["send", pack(head + text)], ["read", 1]],
        "expected by an unknown model": [
            ["send", pack(head.replace(b"models/simple", b"models/nobody"))],
            ["pause"],
            ["send", pack(text)],
            ["read", 1],
        ],
        "expected and too large": [
            ["send", pack(sent("POST", INFER, b"", (*expects, f"content-length: {1 << 40}"), length=False))],
            ["closed"],
        ],
        "something else expected": [*post(INFER, text, ("expect: more",))],
        "gzip": post(INFER, squeezed, gzipped),
        "x-gzip": post(INFER, squeezed, ("content-encoding: x-gzip",)),
        "gzip in other letters": post(INFER, squeezed, ("content-encoding: GZIP",)),
        "deflate": post(INFER, deflated, deflates),
        "deflate without its header": post(INFER, bare, deflates),
        "identity": post(INFER, text, ("content-encoding: identity",)),
        "another encoding": post(INFER, text, ("content-encoding: br",)),
        "two encodings": post(INFER, squeezed, ("content-encoding: gzip, gzip",)),
        "gzip in two members": post(
            INFER, gzip.compress(text[:40], mtime=0) + gzip.compress(text[40:], mtime=0), gzipped
        ),
        "gzip and bytes behind it": post(INFER, squeezed + b"more", gzipped),
        "gzip that is cut off": post(INFER, squeezed[:-9], gzipped),
        "gzip that is damaged": post(INFER, b"\x1f\x8b\x08 no", gzipped),
        "gzip of nothing": post(INFER, b"", gzipped),
        "gzip of too much": post(INFER, gzip.compress(bytes(1 << 20), mtime=0), gzipped),
        "gzip of another method": post("/v2/repository/index", gzip.compress(b'{"ready":true}', mtime=0), gzipped),
        "an answer in gzip": compressed("gzip"),
        "an answer in deflate": compressed("deflate"),
        "an answer in the better one": compressed("gzip;q=0.5, deflate;q=0.8"),
        "an answer in none": compressed("gzip;q=0"),
        "an answer in anything": compressed("*"),
        "a short answer": compressed("gzip", simple()),
        "a binary answer in gzip": compressed("gzip", {**rows, "parameters": {"binary_data_output": True}}),
        "an error in gzip": compressed("gzip", {"inputs": []}),
        "metadata in gzip": get("/v2/models/simple/config", ("accept-encoding: gzip",)),
    }


def fuzz() -> dict[str, list[Step]]:
    """Bodies and heads that are nearly right."""
    text = json.dumps(
        {
            "id": "f",
            "inputs": [tensor("INPUT0", [1] * 16), tensor("INPUT1", [2] * 16, own=1)],
            "outputs": [{"name": "OUTPUT0"}],
        },
        separators=(",", ":"),
    ).encode()
    words = json.dumps(
        {"inputs": [tensor("INPUT0", ["ab", "é"], (1, 2), "BYTES")], "parameters": {"own": 1.5}}
    ).encode()
    bodies = {
        str(place): post(INFER if place % 2 == 0 else IDENTITY, body)
        for place, body in enumerate(mutated_messages([text, words], 80))
    }
    heads = mutated_messages([sent("GET", "/v2/models/simple/ready", headers=["accept: */*", "x-own: 5"])], 60)
    return bodies | {
        f"head {place}": [["send", pack(head + b"\r\n\r\n")], ["half_close"], ["closed"]]
        for place, head in enumerate(heads)
    }


def strict() -> dict[str, list[Step]]:
    """A server with restricted routes and small bodies, and without the page."""
    key, admin = ("infer-key: s3cret",), ("admin: 0ther",)
    large = {"inputs": [tensor("INPUT0", ["x" * 70_000], (1, 1), "BYTES")]}
    body = json.dumps(large).encode()
    return {
        "no key": post(INFER, simple()),
        "a wrong key": post(INFER, simple(), ("infer-key: s3cre",)),
        "the key of another": post(INFER, simple(), admin),
        "the key": post(INFER, simple(), key),
        "no key for generate": post("/v2/models/shouting/generate", {"text_input": "a"}),
        "no key for the index": post("/v2/repository/index"),
        "the key for the index": post("/v2/repository/index", {"ready": True}, admin),
        "no key for log settings": get("/v2/logging"),
        "live needs none": get("/v2/health/live"),
        "server": get("/v2"),
        "load": post("/v2/repository/models/simple/load", headers=admin),
        "page": get("/"),
        "state": get("/v2/gangway/state"),
        "a body that is too large": post(IDENTITY, large, key),
        "a chunked body that is too large": post(
            IDENTITY, chunked(body, 9000), (*key, "transfer-encoding: chunked"), length=False
        ),
        "a body that is too large once inflated": post(
            IDENTITY, gzip.compress(body, mtime=0), (*key, "content-encoding: gzip")
        ),
        "too large and expected": bytes_sent(
            sent("POST", IDENTITY, b"", (*key, "expect: 100-continue", "content-length: 70000"), length=False)
        ),
    }
