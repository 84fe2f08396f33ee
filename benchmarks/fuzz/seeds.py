"""Where fuzzing begins: requests that are right, and some that are nearly so."""

import gzip
import json
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.fuzz.oracles import KINDS
from benchmarks.fuzz.service import ENCODINGS, PATHS
from gangway.protos.grpc_service_pb2 import ModelInferRequest

ROW = np.arange(16, dtype=np.int32)


def seeds_of(target: str) -> Sequence[bytes]:
    """Return the first inputs of a target."""
    return _SEEDS[target]()


def _message(**more: Any) -> ModelInferRequest:
    request = ModelInferRequest(model_name="simple", id="7", **more)
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype="INT32", shape=[1, 16])
    return request


def _wire() -> list[bytes]:
    raw = _message(raw_input_contents=[ROW.tobytes(), ROW.tobytes()])
    raw.parameters["timeout"].int64_param = 5
    raw.outputs.add(name="OUTPUT0").parameters["classification"].int64_param = 3
    typed = _message(model_version="1")
    for tensor in typed.inputs:
        tensor.contents.int_contents.extend(ROW)
    shared = _message()
    for tensor in shared.inputs:
        tensor.parameters["shared_memory_region"].string_param = "r"
        tensor.parameters["shared_memory_byte_size"].int64_param = 64
    text = ModelInferRequest(model_name="text", raw_input_contents=[b"\3\0\0\0one\0\0\0\0"])
    text.inputs.add(name="text_input", datatype="BYTES", shape=[1, 2])
    return [message.SerializeToString() for message in (raw, typed, shared, text)]


def _tensor(name: str, **values: Any) -> dict[str, Any]:
    return {"name": name, "shape": [1, 16], "datatype": "INT32", **values}


def _requests() -> list[Any]:
    """Bodies of inference requests."""
    data = {"inputs": [_tensor("INPUT0", data=ROW.tolist()), _tensor("INPUT1", data=[ROW.tolist()])], "id": "7"}
    binary = {"binary_data_size": 64}
    outputs = [{"name": "OUTPUT0", "parameters": {"binary_data": True}}, {"name": "OUTPUT1"}]
    region = {"shared_memory_region": "r", "shared_memory_byte_size": 64}
    kinds = {
        "FP32": [0.5, float("nan"), float("inf"), -1],
        "FP64": [1e300, 2**70, -0.0, 5e-324],
        "UINT64": [2**64 - 1, 0, 1, 2],
        "INT8": [-128, 127, 0, 1],
        "BOOL": [True, False, True, True],
        "BYTES": ["", "é", "\U0001f600", "\0"],
    }
    each = [_tensor("x", shape=[4], datatype=name, data=values) for name, values in kinds.items()]
    return [
        data,
        {"inputs": [_tensor(f"INPUT{number}", parameters=binary) for number in range(2)], "outputs": outputs},
        {"inputs": [_tensor(f"INPUT{number}", parameters=region) for number in range(2)]},
        {**data, "parameters": {"timeout": 1000, "priority": 1, "own": "x", "binary_data_output": True}},
        *({"inputs": [tensor]} for tensor in each),
        {"inputs": [_tensor("text_input", shape=[1, 2], datatype="BYTES", data=["one", "two"])]},
    ]


def _text(content: Any) -> bytes:
    return json.dumps(content, separators=(",", ":")).encode()


def _output() -> list[bytes]:
    found = [bytes([number]) + ROW.tobytes() for number in range(len(KINDS))]
    floats = np.array([np.nan, np.inf, -np.inf, 0.1, 1e-45], np.float32).tobytes()
    strings = struct.pack("<I", 2) + b"ab" + struct.pack("<I", 0)
    return [*found, bytes([KINDS.index("FP32")]) + floats, bytes([KINDS.index("BYTES")]) + strings]


def _inflate() -> list[bytes]:
    body = _text(_requests()[0])
    raw = zlib.compressobj(wbits=-15)
    return [
        b"\0" + gzip.compress(body),
        b"\1" + zlib.compress(body),
        b"\1" + raw.compress(body) + raw.flush(),
        b"\0" + gzip.compress(bytes(1 << 16)),
    ]


def _http() -> list[bytes]:
    plain = b"\0\1\0"  # no encoding, no length of the JSON
    texts = [_text(request) for request in _requests()]
    found = [b"\0" + plain + text for text in texts]
    binary = texts[1]
    found.append(bytes([0, 0, 2 * (len(binary) % 128), len(binary) // 128]) + binary + 2 * ROW.tobytes())
    for number, encoding in enumerate(ENCODINGS):
        if encoding == b"gzip":
            found.append(bytes([0, number, 1, 0]) + gzip.compress(texts[0]))
    others = {
        b"generate": {"INPUT0": ROW.tolist(), "INPUT1": ROW.tolist(), "own": 1},
        b"generate_stream": {"text_input": ["one"], "parameters": {"timeout": 5}},
        b"load": {"parameters": {"config": "{}", "file:1/model.onnx": "b25ueA=="}},
        b"unload": {"parameters": {"unload_dependents": True}},
        b"index": {"ready": True},
        b"systemsharedmemory/region/r/register": {"key": "/k", "offset": 0, "byte_size": 64},
        b"cudasharedmemory/region/r/register": {"raw_handle": {"b64": "aA=="}, "device_id": 0, "byte_size": 64},
        b"trace/setting": {"trace_level": ["TIMESTAMPS"], "trace_rate": None},
        b"logging": {"log_info": True, "log_verbose_level": 1},
    }
    for ending, content in others.items():
        number = next(index for index, path in enumerate(PATHS) if path.endswith(ending))
        found.append(bytes([number, 0, 1, 0]) + _text(content))
    for path in (b"/v2", b"/v2/models/simple/versions/1/stats", b"/v2/models/%c3%a9/ready", b"/v2/health/ready"):
        found.append(bytes([PATHS.index(b""), 0, 1, 0]) + path + b"\n")
    return found


_SEEDS: Mapping[str, Callable[[], Sequence[bytes]]] = {
    "wire": _wire,
    "json": lambda: [_text(request) for request in _requests()],
    "output": _output,
    "inflate": _inflate,
    "http": _http,
}
