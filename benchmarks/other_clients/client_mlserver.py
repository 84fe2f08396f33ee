"""MLServer's own client side: `python client_mlserver.py HTTP_HOST:PORT GRPC_HOST:PORT`, where mlserver is installed.

Its types and codecs over HTTP, its converters over gRPC, and its command `mlserver infer`.
"""

import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from client_checks import addresses, expect, run_checks
from mlserver.codecs import NumpyCodec, StringCodec  # pyright: ignore[reportMissingImports]
from mlserver.grpc import converters  # pyright: ignore[reportMissingImports]
from mlserver.grpc.dataplane_pb2_grpc import GRPCInferenceServiceStub  # pyright: ignore[reportMissingImports]
from mlserver.types import (  # pyright: ignore[reportMissingImports]
    InferenceRequest,
    InferenceResponse,
    MetadataModelResponse,
    MetadataServerResponse,
    RequestInput,
)

A, B = np.arange(16, dtype=np.int32).reshape(1, 16), np.ones((1, 16), np.int32)
HTTP, GRPC = addresses()
LINES = 5
TIMEOUT_S = 60


def request(number: int = 7) -> InferenceRequest:
    """Return a request that its codecs made."""
    inputs = [NumpyCodec.encode_input("INPUT0", A), NumpyCodec.encode_input("INPUT1", B)]
    return InferenceRequest(id=str(number), inputs=inputs)


def check(response: InferenceResponse) -> None:
    """Raise AssertionError unless it is the right answer."""
    found = {output.name: NumpyCodec.decode_output(output) for output in response.outputs}
    expect(np.array_equal(found["OUTPUT0"], A + B) and np.array_equal(found["OUTPUT1"], A - B), found)


def fetch(path: str, content: Any = None) -> bytes:
    """Return the body of an answer: of a GET, or of a POST with content."""
    body = None if content is None else content.model_dump_json().encode()
    asked = urllib.request.Request(f"http://{HTTP}{path}", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
        return bytes(answer.read())


def types() -> None:
    """Its types read the answer."""
    response = InferenceResponse.model_validate_json(fetch("/v2/models/simple/infer", request()))
    expect((response.model_name, response.model_version, response.id) == ("simple", "1", "7"), response)
    check(response)


def strings() -> None:
    """Its codec of strings reads one."""
    texts = [RequestInput(name=f"INPUT{side}", shape=[1, 16], datatype="BYTES", data=["3"] * 16) for side in (0, 1)]
    answered = fetch("/v2/models/simple_string/infer", InferenceRequest(inputs=texts))
    decoded = StringCodec.decode_output(InferenceResponse.model_validate_json(answered).outputs[0])
    expect(decoded == ["6"] * 16, decoded)


def metadata() -> None:
    """Its types read metadata."""
    server = MetadataServerResponse.model_validate_json(fetch("/v2"))
    expect(server.name == "gangway", server)
    model = MetadataModelResponse.model_validate_json(fetch("/v2/models/simple"))
    expect([tensor.name for tensor in model.inputs or []] == ["INPUT0", "INPUT1"], model)


def remote() -> None:
    """Its converters and its stub ask over gRPC."""
    with grpc.insecure_channel(GRPC) as channel:
        converted = converters.ModelInferRequestConverter.from_types(request(), "simple", None)
        answered = GRPCInferenceServiceStub(channel).ModelInfer(converted, timeout=TIMEOUT_S)
    response = converters.ModelInferResponseConverter.to_types(answered)
    expect((response.model_name, response.id) == ("simple", "7"), response)
    check(response)


def command(*flags: str) -> None:
    """Its command asks for each line of a file."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder) / "requests", Path(folder) / "responses"
        asked.write_text("".join(f"{request(number).model_dump_json()}\n" for number in range(LINES)))
        tool = Path(sys.executable).parent / "mlserver"
        call = [str(tool), "infer", "-u", HTTP, "-m", "simple", "-i", str(asked), "-o", str(answered), *flags]
        done = subprocess.run(call, check=False, capture_output=True, text=True, timeout=TIMEOUT_S)
        expect(done.returncode == 0, done.stderr[-300:])
        lines = [json.loads(line) for line in answered.read_text().splitlines()]
    expect(len(lines) == LINES, lines)
    for line in lines:
        check(InferenceResponse.model_validate(line))


CHECKS = (
    ("types and codecs, HTTP", types),
    ("strings, HTTP", strings),
    ("metadata, HTTP", metadata),
    ("converters, gRPC", remote),
    ("mlserver infer", command),
    ("mlserver infer, binary data", lambda: command("-b")),
    ("mlserver infer, micro-batches", lambda: command("-s", "3", "-w", "2")),
)

if __name__ == "__main__":
    sys.exit(run_checks(CHECKS))
