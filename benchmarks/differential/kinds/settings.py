"""Shared memory, and settings of the log and of traces."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.differential.asked import Case, Http, Rpc, Shared, Wait, floats, texts
from benchmarks.differential.models import Model

MODELS: tuple[Model, ...] = ()
KEY = "/SEGMENT"
FLOATS = floats("x", 1, 2).content
TEXTS = texts("x", b"\xff\xd8", b"").content


def _register(name: str, offset: int = 0, size: int = 64, key: str = KEY) -> Http:
    body = {"key": key, "offset": offset, "byte_size": size}
    return Http("POST", f"/v2/systemsharedmemory/region/{name}/register", body)


def _unregister(name: str = "") -> Http:
    path = f"/region/{name}" if name else ""
    return Http("POST", f"/v2/systemsharedmemory{path}/unregister")


def _let_go(name: str) -> Wait:
    """Triton says that a region is in use for some time after the answer."""
    return Wait(_unregister(name), '"status": 200')


def _region(size: int, offset: int = 0, name: str = "r") -> dict[str, Any]:
    return {"shared_memory_region": name, "shared_memory_byte_size": size, "shared_memory_offset": offset}


def _infer(model: str, datatype: str, count: int, place: dict[str, Any], output: dict[str, Any] | None = None) -> Http:
    outputs = [{"name": "y", "parameters": output}] if output else [{"name": "y"}]
    inputs = [{"name": "x", "datatype": datatype, "shape": [count], "parameters": place}]
    return Http("POST", f"/v2/models/{model}/infer", {"inputs": inputs, "outputs": outputs})


def _rpc(model: str, datatype: str, count: int, place: dict[str, Any], output: dict[str, Any]) -> Rpc:
    def typed(given: dict[str, Any]) -> dict[str, Any]:
        return {
            key: {"string_param" if isinstance(value, str) else "int64_param": value} for key, value in given.items()
        }

    return Rpc(
        "ModelInfer",
        {
            "model_name": model,
            "inputs": [{"name": "x", "datatype": datatype, "shape": [count], "parameters": typed(place)}],
            "outputs": [{"name": "y", "parameters": typed(output)}],
        },
    )


def cases() -> Iterator[Case]:
    """Yield the cases."""
    floats_in, texts_in = FLOATS.ljust(64, b"\0"), TEXTS.ljust(64, b"\0")
    status = Http("GET", "/v2/systemsharedmemory/status")
    one: Mapping[str, Sequence[Http | Rpc]] = {
        "in": (_infer("adds", "FP32", 2, _region(8)),),
        "in and out": (_infer("adds", "FP32", 2, _region(8), _region(8, 32)),),
        "in and out over gRPC": (_rpc("adds", "FP32", 2, _region(8), _region(8, 32)),),
        "out is too small": (_infer("adds", "FP32", 2, _region(8), _region(4, 32)),),
        "in is too large": (_infer("adds", "FP32", 2, _region(12)),),
        "beyond the region": (_infer("adds", "FP32", 2, _region(8, 60)),),
        "an unknown region": (_infer("adds", "FP32", 2, _region(8, name="other")),),
        "an ensemble": (_infer("chain", "FP32", 2, _region(8), _region(8, 32)),),
        "status": (status, Rpc("SystemSharedMemoryStatus")),
    }
    for name, steps in one.items():
        yield Case(f"memory: {name}", [Shared(floats_in, [_register("r"), *steps, _let_go("r")])])
    for step in (_infer, _rpc):
        asked = step("lengths", "BYTES", 2, _region(len(TEXTS)), _region(16, 32))
        kind = "HTTP" if isinstance(asked, Http) else "gRPC"
        yield Case(f"memory: texts over {kind}", [Shared(texts_in, [_register("r"), asked, _let_go("r")])])
    regions: Mapping[str, Sequence[Http | Rpc]] = {
        "two regions": (_register("r", 0, 32), _register("s", 32, 32), status),
        "twice the same": (_register("r"), _register("r"), status),
        "the same name elsewhere": (_register("r", 0, 32), _register("r", 32, 32), status),
        "larger than the segment": (_register("r", 0, 65), status),
        "of no size": (_register("r", 0, 0), status),
        "an unknown key": (_register("r", key="/no-such-segment"), status),
        "not registered": (_unregister("r"), status),
    }
    for name, steps in regions.items():
        yield Case(f"memory: {name}", [Shared(floats_in, [*steps, _unregister()])])
    log: Mapping[str, Any] = {
        "read": None,
        "verbose": {"log_verbose_level": 1},
        "back": {"log_verbose_level": 0},
        "unknown": {"log_unknown": 1},
        "a wrong type": {"log_verbose_level": "much"},
        "a text for a flag": {"log_info": "yes"},
    }
    for name, body in log.items():
        yield Case(f"logging: {name}", [Http("POST" if body else "GET", "/v2/logging", body or b"")])
    traces: Mapping[str, Any] = {
        "read": None,
        "unknown": {"trace_unknown": "1"},
        "a wrong level": {"trace_level": ["LOUD"]},
        "rate": {"trace_rate": "100"},
        "rate is no number": {"trace_rate": "often"},
        "null": {"trace_rate": None},
    }
    for name, body in traces.items():
        for path in ("/v2/trace/setting", "/v2/models/adds/trace/setting"):
            yield Case(f"traces: {name}, {path}", [Http("POST" if body else "GET", path, body or b"")])
