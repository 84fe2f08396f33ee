"""What clients in other languages send and expect, as files: serialised messages, and the model that answers them.

The programs in `programs` send the bytes of `NAME.request` and expect those of `NAME.answer`, as grpcio got them.
"""

import json
import textwrap
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from benchmarks.differential.asked import GRPC, Request, texts
from benchmarks.differential.kinds.all import all_models
from benchmarks.differential.models import Model, config_of, ensemble_of
from benchmarks.differential.wire import grpc_message
from gangway.clients.connection import SERVICE
from gangway.protos import grpc_service_pb2 as pb
from testing.load import raw_channel

LARGE_BYTES = 16 << 20
MOST_BYTES = 32 << 20  # of a message
HUGE_BYTES = 64 << 20  # refused by its head, while most of it is to come
SMALL_BYTES = 64
IDLE_S = 11.0  # longer than the time after which the programs ping
SLOW_S = 2.0
UNKNOWN = "nöbody"  # whose name is percent-encoded in the trailers
CONFIG = """
backend: "python"
max_batch_size: 0
input { name: "x" data_type: TYPE_UINT8 dims: [-1] }
output { name: "y" data_type: TYPE_UINT8 dims: [-1] }
instance_group { count: 4 kind: KIND_CPU }
"""
MODEL = """
import json
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            end = time.monotonic() + json.loads(request.parameters()).get("milliseconds", 0) / 1000
            while time.monotonic() < end and not request.is_cancelled():
                time.sleep(0.02)
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x)]))
        return responses
"""


# Of `benchmarks.differential`: bytes that are no text, errors, parameters, streams, batches, and ensembles of these.
PYTHON_MODELS = (
    *("adds", "adds_rows", "lengths", "raises", "sees", "streams", "tokens"),
    *("chain_bytes", "chain_raises", "chain_rows", "chain_streams", "token_chain"),
)
SIZES = """
def execute(self, requests):
    sizes = [len(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()[0]) for request in requests]
    return [answer(pb_utils.Tensor("size", np.array([size], np.int64))) for size in sizes]
"""
MORE_MODELS = (
    Model("picture", SIZES, config_of("x:STRING:1", "size:INT64:1")),
    Model("chain_picture", "", ensemble_of("x:STRING:1", "size:INT64:1", [("picture", "x=x", "size=size")])),
)
FORWARDED = ("--grpc-header-forward-pattern=x-.*", "--http-header-forward-pattern=x-.*")
PICTURE = b"\xff\xd8\xff\xe0\x00\x10JFIF"


def write_python_models(folder: Path) -> Path:
    """Write PYTHON_MODELS and MORE_MODELS; return the folder."""
    for model in (*(each for each in all_models() if each.name in PYTHON_MODELS), *MORE_MODELS):
        model.write(folder)
    return folder


def write_repository(folder: Path) -> Path:
    """Write the repository with the model `echo`, and those for Python's models; return it."""
    write_python_models(folder)
    version = folder / "echo" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(CONFIG)
    (version / "model.py").write_text(textwrap.dedent(MODEL))
    return folder


def request(size_bytes: int = SMALL_BYTES, wait_s: float = 0.0, model: str = "echo") -> pb.ModelInferRequest:
    """Return a request for the bytes that it has."""
    made = pb.ModelInferRequest(
        model_name=model, id="7", raw_input_contents=[bytes(range(256)) * (size_bytes // 256 or 1)]
    )
    made.inputs.add(name="x", datatype="UINT8", shape=[len(made.raw_input_contents[0])])
    if wait_s:
        made.parameters["milliseconds"].int64_param = round(wait_s * 1000)
    return made


def write_http(folder: Path, url: str) -> None:
    """Write bodies with a tensor behind JSON, how long the JSON is, and the bodies of the answers."""
    for name, size in (("small", 256), ("large", LARGE_BYTES)):
        given = {"name": "x", "shape": [size], "datatype": "UINT8", "parameters": {"binary_data_size": size}}
        text = json.dumps({"inputs": [given], "parameters": {"binary_data_output": True}}).encode()
        body = text + bytes(range(256)) * (size // 256)
        headers = {"Inference-Header-Content-Length": str(len(text)), "Content-Type": "application/octet-stream"}
        (folder / f"{name}.body").write_bytes(body)
        (folder / f"{name}.json-bytes").write_text(str(len(text)))
        asked = urllib.request.Request(f"http://{url}/v2/models/echo/infer", body, headers)
        with urllib.request.urlopen(asked) as answer:
            (folder / f"{name}.reply").write_bytes(answer.read())


def python_request(model: str, name: str, *elements: str | bytes) -> pb.ModelInferRequest:
    """Return a request of a Python model that takes one input of BYTES."""
    return grpc_message(Request(model, [texts(name, *elements)], id="7"), GRPC)


def write_messages(folder: Path, url: str) -> None:
    """Write all messages, with the answers of the server at `url`."""
    requests: Mapping[str, pb.ModelInferRequest] = {
        "small": request(),
        "large": request(LARGE_BYTES),
        "slow": request(wait_s=SLOW_S),
        "idle": request(wait_s=IDLE_S),
    }
    with raw_channel(url) as channel:
        infer = channel.unary_unary(f"{SERVICE}ModelInfer")
        stream = channel.stream_stream(f"{SERVICE}ModelStreamInfer")
        for name, message in requests.items():
            sent = message.SerializeToString()
            (folder / f"{name}.request").write_bytes(sent)
            message.ClearField("parameters")
            (folder / f"{name}.answer").write_bytes(infer(message.SerializeToString()))
        (answer,) = stream(iter([requests["small"].SerializeToString()]))
        (folder / "stream.answer").write_bytes(answer)
        for model, name in (("lengths", "x"), ("chain_bytes", "x")):
            sent = python_request(model, name, PICTURE, b"").SerializeToString()
            (folder / f"{model}.request").write_bytes(sent)
            (folder / f"{model}.answer").write_bytes(infer(sent))
        for model, name in (("streams", "do"), ("chain_streams", "x")):
            sent = python_request(model, name, "five").SerializeToString()
            (folder / f"{model}.request").write_bytes(sent)
            for number, each in enumerate(stream(iter([sent]))):
                (folder / f"{model}.{number}.answer").write_bytes(each)
    (folder / "raises.request").write_bytes(python_request("raises", "do", "value error").SerializeToString())
    (folder / "huge.request").write_bytes(request(HUGE_BYTES).SerializeToString())
    (folder / "huge.text").write_text("larger than max")
    (folder / "unknown.request").write_bytes(request(model=UNKNOWN).SerializeToString())
    (folder / "unknown.text").write_text(f"Request for unknown model: '{UNKNOWN}' is not found")
