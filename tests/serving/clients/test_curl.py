"""The protocol by hand: the real curl against `gangway serve`, with the statuses and bodies that it must see."""

import gzip
import json
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testing.live_server import LiveServer

CURL = shutil.which("curl")
TIMEOUT_S = 20
A, B = np.arange(16, dtype=np.int32), np.ones(16, np.int32)
IMAGES = np.zeros((2, 3, 224, 224), np.float32)  # 1.2 MB: curl asks first whether it may send so much
SIMPLE = "/v2/models/simple"
INFER = f"{SIMPLE}/infer"
JSON = "application/json"


@dataclass(frozen=True)
class Answer:
    """What curl got. Names of headers are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


Curl = Callable[..., Answer]


@pytest.fixture
def curl(gangway_server: LiveServer, tmp_path: Path) -> Curl:
    """Runs curl with a path of the server and further arguments; `content` is what it sends, from a file."""
    assert CURL, "curl is needed: apt-get install curl"

    def run(path: str, *arguments: str, content: bytes | None = None) -> Answer:
        body, headers, sent = tmp_path / "body", tmp_path / "headers", tmp_path / "sent"
        body.write_bytes(b"")
        command = [CURL, "--silent", "--show-error", "--max-time", str(TIMEOUT_S)]
        command += ["--output", str(body), "--dump-header", str(headers)]
        if content is not None:
            sent.write_bytes(content)
            command += ["--data-binary", f"@{sent}"]
        command += ["--write-out", "%{http_code}", *arguments, f"http://{gangway_server.http_url}{path}"]
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=2 * TIMEOUT_S)
        lines = [line.partition(":") for line in headers.read_text().splitlines() if ":" in line]
        named = {name.lower(): value.strip() for name, _, value in lines}
        return Answer(int(done.stdout), named, body.read_bytes())

    return run


def compact(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def tensor(name: str, values: np.ndarray) -> dict[str, Any]:
    return {"name": name, "shape": [1, 16], "datatype": "INT32", "data": values.tolist()}


def header_of(body: bytes) -> list[str]:
    return ["-H", f"Inference-Header-Content-Length: {len(body)}"]


REQUEST = compact({"id": "7", "inputs": [tensor("INPUT0", A), tensor("INPUT1", B)]})
RESULT = compact(
    {
        "id": "7",
        "model_name": "simple",
        "model_version": "1",
        "outputs": [
            {"name": "OUTPUT0", "datatype": "INT32", "shape": [1, 16], "data": (A + B).tolist()},
            {"name": "OUTPUT1", "datatype": "INT32", "shape": [1, 16], "data": (A - B).tolist()},
        ],
    }
)
GENERATED = compact(
    {"model_name": "simple", "model_version": "1", "OUTPUT0": (A + B).tolist(), "OUTPUT1": (A - B).tolist()}
)
TEXTS = compact({"INPUT0": A.tolist(), "INPUT1": B.tolist()})


@dataclass(frozen=True)
class Case:
    """One call. `body` is all that comes back, `kind` its content type."""

    path: str
    body: bytes
    status: int = 200
    arguments: Sequence[str] = ()
    content: bytes | None = None
    kind: str = JSON


def error(message: str) -> bytes:
    return compact({"error": message})


CASES: dict[str, Case] = {
    "live": Case("/v2/health/live", b'{"live":true}'),
    "ready": Case("/v2/health/ready", b'{"ready":true}'),
    "model ready": Case(f"{SIMPLE}/ready", b"", kind=""),
    "version not ready": Case(f"{SIMPLE}/versions/7/ready", b"", 400, kind=""),
    "infer": Case(INFER, RESULT, content=REQUEST),
    "infer, a version": Case(
        f"{SIMPLE}/versions/1/infer", RESULT, arguments=["-H", f"Content-Type: {JSON}"], content=REQUEST
    ),
    "infer, chunked": Case(INFER, RESULT, arguments=["-H", "Transfer-Encoding: chunked"], content=REQUEST),
    "infer, gzip": Case(INFER, RESULT, arguments=["-H", "Content-Encoding: gzip"], content=gzip.compress(REQUEST)),
    "infer, offered HTTP/2": Case(INFER, RESULT, arguments=["--http2"], content=REQUEST),
    "infer, HTTP/1.0": Case(INFER, RESULT, arguments=["--http1.0"], content=REQUEST),
    "infer, a query string": Case(f"{INFER}?a=b", RESULT, content=REQUEST),
    "generate": Case(f"{SIMPLE}/generate", GENERATED, content=TEXTS),
    "generate_stream": Case(
        f"{SIMPLE}/generate_stream",
        b"data: " + GENERATED + b"\n\n",
        arguments=["--no-buffer"],
        content=TEXTS,
        kind="text/event-stream; charset=utf-8",
    ),
    "unknown model": Case(
        "/v2/models/nobody/infer", error("Request for unknown model: 'nobody' is not found"), 404, content=REQUEST
    ),
    "unknown version": Case(
        f"{SIMPLE}/versions/7", error("Request for unknown model: 'simple' version 7 is not found"), 404
    ),
    "unknown path": Case("/v2/modells", error("Not Found"), 404),
    "wrong method": Case(INFER, error("Method Not Allowed, only POST"), 405),
    "wrong datatype": Case(
        INFER,
        error("inference input 'INPUT0' data-type is 'INT64', but model 'simple' expects 'INT32'"),
        400,
        content=REQUEST.replace(b'"INT32"', b'"INT64"', 1),
    ),
    "unknown encoding": Case(
        INFER,
        error("Content-Encoding 'br' is not supported, only gzip and deflate"),
        415,
        ["-H", "Content-Encoding: br"],
        REQUEST,
    ),
    "load where it is not allowed": Case(
        "/v2/repository/models/simple/load",
        error(
            "explicit model load / unload is not allowed if polling is enabled: start the server with"
            " --model-control-mode=explicit"
        ),
        503,
        content=b"",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_call(curl: Curl, name: str) -> None:
    case = CASES[name]
    answer = curl(case.path, *case.arguments, content=case.content)
    assert (answer.status, answer.body) == (case.status, case.body)
    assert answer.headers.get("content-type", "") == case.kind
    assert answer.headers["content-length"] == str(len(case.body))


def test_binary_tensors(curl: Curl) -> None:
    inputs = [{"name": name, "shape": [1, 16], "datatype": "INT32"} for name in ("INPUT0", "INPUT1")]
    for given in inputs:
        given["parameters"] = {"binary_data_size": 64}
    text = compact({"inputs": inputs, "parameters": {"binary_data_output": True}})
    answer = curl(INFER, *header_of(text), content=text + A.tobytes() + B.tobytes())
    at = int(answer.headers["inference-header-content-length"])
    assert (answer.status, answer.headers["content-type"]) == (200, "application/octet-stream")
    assert answer.body[at:] == (A + B).tobytes() + (A - B).tobytes()
    outputs = json.loads(answer.body[:at])["outputs"]
    assert [output["parameters"] for output in outputs] == [{"binary_data_size": 64}] * 2


def test_a_large_body_is_asked_for(curl: Curl) -> None:
    """curl sends `Expect: 100-continue`, and waits a second for the answer to it."""
    given = {"name": "input", "shape": [2, 3, 224, 224], "datatype": "FP32"}
    text = compact({"inputs": [{**given, "parameters": {"binary_data_size": IMAGES.nbytes}}]})
    answer = curl("/v2/models/mobilenetv2/infer", *header_of(text), content=text + IMAGES.tobytes())
    assert answer.status == 200
    assert json.loads(answer.body)["outputs"][0]["shape"] == [2, 1000]
    refused = curl("/v2/models/nobody/infer", *header_of(text), content=text + IMAGES.tobytes())
    assert (refused.status, refused.body) == (404, error("Request for unknown model: 'nobody' is not found"))


def test_a_compressed_answer(curl: Curl) -> None:
    answer = curl(
        "/v2/models/mlp/infer",
        "--compressed",
        content=compact({"inputs": [{**tensor("input", A), "datatype": "FP32"}]}),
    )
    assert (answer.status, "content-encoding" in answer.headers) == (200, False)  # it is too short to be worth it
    rows = {"name": "input", "shape": [64, 16], "datatype": "FP32", "data": [0.5] * 1024}
    answer = curl("/v2/models/mlp/infer", "--compressed", content=compact({"inputs": [rows]}))
    assert (answer.status, answer.headers["content-encoding"] in ("gzip", "deflate")) == (200, True)
    assert len(json.loads(answer.body)["outputs"][0]["data"]) == 640


def test_what_there_is(curl: Curl) -> None:
    server = json.loads(curl("/v2").body)
    assert (list(server), server["name"]) == (["name", "version", "extensions"], "gangway")
    inputs, outputs = (
        [{"name": f"{side}{number}", "datatype": "INT32", "shape": [-1, 16]} for number in range(2)]
        for side in ("INPUT", "OUTPUT")
    )
    metadata = json.loads(curl(SIMPLE).body)
    assert (metadata["name"], metadata["versions"]) == ("simple", ["1"])
    assert (metadata["inputs"], metadata["outputs"]) == (inputs, outputs)
    config = json.loads(curl(f"{SIMPLE}/config").body)
    assert (config["name"], config["max_batch_size"]) == ("simple", 8)
    assert [given["data_type"] for given in config["input"]] == ["TYPE_INT32"] * 2
    (statistics,) = json.loads(curl(f"{SIMPLE}/stats").body)["model_stats"]
    assert (statistics["name"], statistics["version"]) == ("simple", "1")
    every = json.loads(curl("/v2/models/stats").body)["model_stats"]
    index = json.loads(curl("/v2/repository/index", "--request", "POST").body)
    assert {"name": "simple", "version": "1", "state": "READY"} in index
    assert {entry["name"] for entry in index} == {entry["name"] for entry in every}
    assert curl("/v2", "--head").status == 405
