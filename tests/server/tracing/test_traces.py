"""Traces of a real server in mode triton: its settings by a real client, and the file that it writes."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from gangway.base.json_codec import decode, encode
from gangway.executor.frames import join_strings
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.options.command_line import parse_options
from gangway.server.tracing.exporter import GrowingFile, TraceFile, text_of
from gangway.server.tracing.record import TensorRecord, TraceRecord
from gangway.server.tracing.settings import TraceConfig, trace_config_of
from testing.live_server import LiveServer, live_server
from testing.load import raw_channel, raw_infer
from testing.processes import running_below
from testing.reference import example_of
from testing.waiting import until
from tests.helpers.coming_and_going import coming_and_going
from tests.helpers.full_disk import files_of_at_most

TIMEOUT_S = 30
INSTANTS = [
    "GRPC_WAITREAD_START",
    "GRPC_WAITREAD_END",
    "REQUEST_START",
    "QUEUE_START",
    "SCHEDULE_START",
    "SCHEDULE_END",
    "COMPUTE_START",
    "COMPUTE_INPUT_END",
    "COMPUTE_OUTPUT_START",
    "RESPONSE_START",
    "COMPUTE_END",
    "INFER_RESPONSE_COMPLETE",
    "REQUEST_END",
    "GRPC_SEND_START",
    "GRPC_SEND_END",
]
OFF: dict[str, Any] = dict.fromkeys(("trace_level", "trace_rate", "trace_count", "log_frequency"))


@dataclass
class Trace:
    """What the entries of one id say."""

    model: str = ""
    request_id: str = ""
    instants: list[tuple[str, int]] | None = None
    tensors: list[tuple[str, dict[str, str]]] | None = None


def entries_in(path: Path) -> list[dict[str, Any]]:
    """What a file lists; nothing where there is none yet, or it is read amid a write. It is never empty."""
    text = path.read_text() if path.exists() else "[]"
    assert text
    with suppress(json.JSONDecodeError):
        return list(json.loads(text))
    return []


def traces_in(path: Path) -> list[Trace]:
    traces: defaultdict[int, Trace] = defaultdict(Trace)
    for entry in entries_in(path):
        trace = traces[entry["id"]]
        if "model_name" in entry:
            assert entry["model_version"] == 1
            trace.model, trace.request_id = entry["model_name"], entry.get("request_id", "")
        elif "timestamps" in entry:
            trace.instants = (trace.instants or []) + [(stamp["name"], stamp["ns"]) for stamp in entry["timestamps"]]
        else:
            trace.tensors = [*(trace.tensors or []), (entry["activity"], entry["tensor"])]
    return list(traces.values())


@dataclass(frozen=True)
class Traced:
    """A server whose traces are off until a test wants them."""

    client: triton.InferenceServerClient
    url: str
    file: Path
    inputs: Callable[..., list[triton.InferInput]]

    def set(self, model: str = "", **settings: Any) -> dict[str, Any]:
        response = self.client.update_trace_settings(model or None, settings, as_json=True)
        return {name: value.get("value") for name, value in response["settings"].items()}

    def get(self, model: str = "") -> dict[str, Any]:
        response = self.client.get_trace_settings(model or None, as_json=True)
        return {name: value.get("value") for name, value in response["settings"].items()}

    def infer(self, request_id: str) -> None:
        self.client.infer("simple", self.inputs(), request_id=request_id)

    def await_traces(self, wanted: Callable[[Trace], bool], count: int, path: Path | None = None) -> list[Trace]:
        def found() -> list[Trace]:
            return [trace for trace in traces_in(path or self.file) if wanted(trace)]

        until(lambda: len(found()) >= count, lambda: str(found()))
        assert len(found()) == count
        return found()


@pytest.fixture(scope="module")
def traced_server(compiled_zoo: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, Path]]:
    file = tmp_path_factory.mktemp("traces") / "trace.json"
    flags = [f"--trace-config=triton,file={file}", "--trace-config=rate=7", f"--cache-dir={compiled_zoo.cache_dir}"]
    with live_server(compiled_zoo.repository, flags) as server:
        yield server, file


@pytest.fixture
def traced(traced_server: tuple[LiveServer, Path], simple_inputs: Any) -> Iterator[Traced]:
    server, file = traced_server
    with triton.InferenceServerClient(server.url) as client:
        made = Traced(client, server.url, file, simple_inputs)
        yield made
        made.set("simple", **OFF)
        made.set(**OFF)


@pytest.fixture
def exporter_pids(traced_server: tuple[LiveServer, Path]) -> Callable[[], list[int]]:
    supervisor = traced_server[0].process.pid
    return lambda: running_below(supervisor, "tracing.exporter")


def test_settings_fall_back_on_those_of_all_models_and_these_on_the_flags(traced: Traced) -> None:
    assert "trace" in traced.client.get_server_metadata().extensions
    flags = {
        "trace_level": ["OFF"],
        "trace_rate": ["7"],
        "trace_count": ["-1"],
        "log_frequency": ["0"],
        "trace_mode": ["triton"],
        "trace_file": [str(traced.file)],
    }
    assert traced.get() == traced.get("simple") == flags
    assert traced.set(trace_rate="5", trace_count="9") == {**flags, "trace_rate": ["5"], "trace_count": ["9"]}
    assert traced.get("simple")["trace_rate"] == ["5"]
    assert traced.set("simple", trace_rate="2")["trace_rate"] == ["2"]
    assert traced.get("simple")["trace_count"] == ["9"]
    assert traced.get()["trace_rate"] == traced.get("mlp")["trace_rate"] == ["5"]
    traced.set(trace_count="4")
    assert traced.get("simple")["trace_count"] == ["4"]
    assert traced.set("simple", trace_rate=None)["trace_rate"] == ["5"]
    assert traced.set(trace_rate=None, trace_count=None) == flags == traced.get("simple")


@pytest.mark.parametrize(
    "settings, code, message",
    [
        ({"trace_level": ["TIMESTAMPS", "OFF"]}, "INVALID_ARGUMENT", "only one trace level 'OFF'"),
        ({"trace_level": ["ALL"]}, "INVALID_ARGUMENT", "unknown trace level 'ALL'"),
        ({"trace_rate": "often"}, "INVALID_ARGUMENT", "Unable to parse 'trace_rate', got: often"),
        ({"trace_rate": "-1"}, "INVALID_ARGUMENT", "Unable to parse 'trace_rate', value is out of range"),
        ({"trace_rate": ["1", "2"]}, "INVALID_ARGUMENT", "expect only 1 value for 'trace_rate'"),
        ({"trace_level": "TIMESTAMPS", "trace_rate": "0"}, "INVALID_ARGUMENT", "sample rate must be non-zero"),
        ({"trace_count": "-2"}, "INVALID_ARGUMENT", "Unable to parse 'trace_count'"),
        ({"log_frequency": "1e3"}, "INVALID_ARGUMENT", "Unable to parse 'log_frequency'"),
        ({"trace_speed": "1"}, "INVALID_ARGUMENT", "unknown trace setting 'trace_speed'"),
        ({"trace_file": "/tmp/x"}, "UNIMPLEMENTED", "trace file location can not be updated"),
        ({"trace_mode": "opentelemetry"}, "UNIMPLEMENTED", "trace mode can not be updated"),
    ],
)
def test_what_cannot_be_set(traced: Traced, settings: dict[str, Any], code: str, message: str) -> None:
    before = traced.get()
    with pytest.raises(InferenceServerException, match=message) as caught:
        traced.set(**{"log_frequency": "3", **settings})
    assert caught.value.status() == f"StatusCode.{code}"
    assert traced.get() == before, "nothing of a wrong request holds"


def test_settings_of_an_unknown_model(traced: Traced) -> None:
    for ask in (traced.get, traced.set):
        with pytest.raises(InferenceServerException, match="unknown model: 'nobody'"):
            ask("nobody")


def test_instants_of_requests(traced: Traced) -> None:
    traced.infer("before")
    traced.set("simple", trace_level="TIMESTAMPS", trace_rate="1")
    begin_ns = time.monotonic_ns()
    for number in range(3):
        traced.infer(f"call {number}")
    end_ns = time.monotonic_ns()
    traced.set("simple", trace_level="OFF")
    traced.infer("after")
    found = traced.await_traces(lambda trace: trace.request_id.startswith("call"), 3)
    assert [trace.request_id for trace in found] == ["call 0", "call 1", "call 2"]
    for trace in found:
        assert trace.model == "simple"
        assert [name for name, _ in trace.instants or []] == INSTANTS
        times = [ns for _, ns in trace.instants or []]
        assert times == sorted(times)
        assert begin_ns < times[0] < times[-1] < end_ns
        at = dict(trace.instants or [])
        assert 0 < at["COMPUTE_OUTPUT_START"] - at["COMPUTE_INPUT_END"] < 1e9
        assert trace.tensors is None
    assert not [trace for trace in traces_in(traced.file) if trace.request_id in ("before", "after")]


def test_a_request_that_fails_has_a_trace(traced: Traced) -> None:
    traced.set("simple", trace_level="TIMESTAMPS", trace_rate="1")
    request = pb.ModelInferRequest(model_name="simple", id="wrong")
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype="INT32", shape=[1, 16])
        request.raw_input_contents.append(bytes(63))
    with raw_channel(traced.url) as channel, pytest.raises(grpc.RpcError, match="byte size mismatch"):
        raw_infer(channel)(request.SerializeToString(), timeout=TIMEOUT_S)
    (trace,) = traced.await_traces(lambda trace: trace.request_id == "wrong", 1)
    names = [name for name, _ in trace.instants or []]
    assert "REQUEST_START" in names
    assert "REQUEST_END" in names
    assert "COMPUTE_START" not in names


def test_every_nth_request_so_many_of_them_in_files_of_so_many(traced: Traced) -> None:
    traced.set("simple", trace_level="TIMESTAMPS", trace_rate="3", trace_count="4", log_frequency="2")
    for number in range(18):
        traced.infer(f"sampled {number}")
    assert traced.get("simple")["trace_count"] == ["0"]
    for index, numbers in enumerate([(2, 5), (8, 11)]):
        path = traced.file.with_name(f"trace.json.{index}")
        found = traced.await_traces(lambda trace: True, 2, path)
        assert [trace.request_id for trace in found] == [f"sampled {number}" for number in numbers]
    assert not traced.file.with_name("trace.json.2").exists()
    assert traced.set("simple", trace_count="4")["trace_count"] == ["4"], "as many again"


def test_a_file_may_be_taken_away_at_any_time(tmp_path: Path) -> None:
    path = tmp_path / "traces.json"
    file = GrowingFile(path)
    with coming_and_going(path):
        for _ in range(5000):
            file.take("{}")
            file.write()
    path.unlink(missing_ok=True)
    file.take('{"id": 1}')
    file.write()
    assert json.loads(path.read_text()) == [{"id": 1}]


def test_tensors(traced: Traced, compiled_zoo: Any) -> None:
    traced.set(trace_level=["TENSORS"], trace_rate="1")
    image = example_of("mobilenetv2", compiled_zoo.onnx_file("mobilenetv2"))
    request = pb.ModelInferRequest.FromString(image.request)
    request.id = "image"
    traced.infer("numbers")
    with raw_channel(traced.url) as channel:
        raw_infer(channel)(request.SerializeToString(), timeout=TIMEOUT_S)
    (trace,) = traced.await_traces(lambda trace: trace.request_id == "numbers", 1)
    assert trace.instants is None
    first, ones = np.arange(16), np.ones(16, int)
    wanted = {"INPUT0": first, "INPUT1": ones, "OUTPUT0": first + ones, "OUTPUT1": first - ones}
    for (activity, tensor), (name, values) in zip(trace.tensors or [], wanted.items(), strict=True):
        assert activity == ("TENSOR_QUEUE_INPUT" if name.startswith("INPUT") else "TENSOR_BACKEND_OUTPUT")
        assert tensor == {"name": name, "data": ",".join(map(str, values)), "shape": "1,16", "dtype": "INT32"}
    (trace,) = traced.await_traces(lambda trace: trace.request_id == "image", 1)
    assert [activity for activity, _ in trace.tensors or []] == ["TENSOR_BACKEND_OUTPUT"], "602 KB are left out"


def test_tensors_in_shared_memory_are_left_out(traced: Traced) -> None:
    traced.set(trace_level=["TENSORS"], trace_rate="1")
    key, outputs = f"/traces-test-{os.getpid()}", [triton.InferRequestedOutput(name) for name in ("OUTPUT0", "OUTPUT1")]
    handle = shm.create_shared_memory_region("traced", key, 64)
    try:
        traced.client.register_system_shared_memory("traced", key, 64)
        outputs[0].set_shared_memory("traced", 64)
        traced.client.infer("simple", traced.inputs(), request_id="in memory", outputs=outputs)
        traced.client.unregister_system_shared_memory("traced")
    finally:
        shm.destroy_shared_memory_region(handle)
    (trace,) = traced.await_traces(lambda trace: trace.request_id == "in memory", 1)
    assert [tensor["name"] for _, tensor in trace.tensors or []] == ["INPUT0", "INPUT1", "OUTPUT1"]


def test_elements_that_are_no_text_are_written_escaped() -> None:
    x = TensorRecord("TENSOR_QUEUE_INPUT", "x", "BYTES", (3,), join_strings([b"caf\xc3\xa9", b"\xff\xd8\0", b""]))
    record = TraceRecord(
        "m", 1, "", "GRPC", "", "", 0, 0, 0, 0, 0, "OK", "", 1, 0, 0.0, 0, 0, 0, 0, 0, 0, 0, False, (x,)
    )
    _, entry = json.loads(f"[{text_of(record, 1)}]")
    assert json.loads(f"[{entry['tensor']['data']}]") == ["caf\u00e9", "\\xff\\xd8\0", ""]


def test_a_killed_exporter_has_a_successor_that_goes_on(traced: Traced, exporter_pids: Callable[[], list[int]]) -> None:
    traced.set("simple", trace_level="TIMESTAMPS", trace_rate="1")
    traced.infer("first life")
    traced.await_traces(lambda trace: trace.request_id == "first life", 1)
    (pid,) = exporter_pids()
    os.kill(pid, signal.SIGKILL)
    traced.infer("second life")
    traced.await_traces(lambda trace: trace.request_id == "second life", 1)
    assert exporter_pids() != [pid]
    assert traced.await_traces(lambda trace: trace.request_id == "first life", 1), "the file goes on"


def test_flags(tmp_path: Path) -> None:
    texts = ["level=TIMESTAMPS", "level=TENSORS", "rate=3", "count=5", "mode=triton", f"triton,file={tmp_path}/t"]
    config = trace_config_of([*texts, "triton,log-frequency=50"])
    expected = {"level": ("TIMESTAMPS", "TENSORS"), "rate": 3, "count": 5, "log_frequency": 50}
    assert config == TraceConfig(file=f"{tmp_path}/t", **expected)
    assert decode(TraceConfig, encode(config), "config") == config
    batching = ["bsp_max_queue_size=9", "bsp_schedule_delay=8", "bsp_max_export_batch_size=7"]
    given = [f"opentelemetry,{text}" for text in ("url=collector:4318/v1/traces", "resource=a.b=c=d", *batching)]
    config = trace_config_of([*given, "mode=opentelemetry", "rate=0", "level=TIMESTAMPS"])
    assert config.url == "http://collector:4318/v1/traces"
    assert config.resource == (("a.b", "c=d"),)
    assert (config.bsp_max_queue_size, config.bsp_schedule_delay, config.bsp_max_export_batch_size) == (9, 8, 7)


@pytest.mark.parametrize(
    "words, levels",
    [
        (("off",), ()),
        (("False",), ()),
        (("timestamps",), ("TIMESTAMPS",)),
        (("Tensors", "true"), ("TIMESTAMPS", "TENSORS")),
        (("on",), ("TIMESTAMPS",)),
        (("MIN",), ("TIMESTAMPS",)),
        (("max", "OFF"), ()),
    ],
)
def test_words_of_levels(words: tuple[str, ...], levels: tuple[str, ...], tmp_path: Path) -> None:
    texts = [f"TRITON,file={tmp_path}/t", *(f"level={word}" for word in words)]
    assert trace_config_of(texts) == TraceConfig(file=f"{tmp_path}/t", level=levels)


@pytest.mark.parametrize(
    "texts, reason",
    [
        (["level"], "expected [MODE,]SETTING=VALUE"),
        (["level=HIGH"], "unknown trace level 'HIGH'"),
        (["rate=-1"], "out of range"),
        (["mode=zipkin"], "unknown mode"),
        (["triton,rate=1"], "unknown setting"),
        (["jaeger,url=x"], "unknown setting"),
        (["opentelemetry,resource=a"], "resource=KEY=VALUE"),
        (["opentelemetry,bsp_max_queue_size=0"], "out of range"),
        (["level=TIMESTAMPS"], "trace file name is not given"),
        (["triton,file=/no/folder/trace"], "cannot be written"),
        (["mode=opentelemetry", "level=TENSORS"], "not supported in mode opentelemetry"),
        (["mode=opentelemetry", "opentelemetry,bsp_max_queue_size=9"], "must not be larger than"),
    ],
)
def test_flags_that_make_no_sense(
    texts: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_options([f"--model-repository={tmp_path}", *(f"--trace-config={text}" for text in texts)])
    said = capsys.readouterr().err
    assert "argument --trace-config: " in said
    assert reason in said


def test_opentelemetry_without_its_packages_is_a_clear_error(tmp_path: Path) -> None:
    hidden = "import sys; sys.modules['opentelemetry'] = None; from gangway.server.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", hidden, "serve", f"--model-repository={tmp_path}", "--trace-config"]
    ended = subprocess.run([*command, "mode=opentelemetry"], capture_output=True, text=True, check=False, timeout=60)
    assert ended.returncode == 2
    assert "pip install 'gangway-serve[otel]'" in ended.stderr


RECORD = TraceRecord(*("m", 1, "", "GRPC", "", "", 1, 2, 3, 4, 5, "OK", "", 1, 0, 0.0, 1, 1, 1, 0, 0, 1, 0, True, []))


def test_a_trace_file_without_space_is_no_reason_to_stop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "folder" / "trace"
    file = TraceFile(path)
    for _ in range(3):
        file.take(RECORD)
        file.close()
    assert len(caplog.records) == 1
    assert "traces are lost from now on, because" in caplog.text
    path.parent.mkdir()
    file.take(RECORD)
    file.close()
    assert len(traces_in(path)) == 1
    assert "written again; 3 traces were lost" in caplog.text


@pytest.mark.parametrize("before", [0, 1, 5])
def test_a_disk_that_is_full_in_the_middle_of_a_trace(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: int
) -> None:
    path = tmp_path / "trace"
    file = TraceFile(path)
    for _ in range(before):
        file.take(RECORD)
    file.close()
    size = path.stat().st_size if before else 0
    for more in (1, 20, 100):  # bytes that fit
        with files_of_at_most(size + more):
            file.take(RECORD)
            file.close()
        assert path.exists() == bool(before)
        assert not before or len(traces_in(path)) == before
    assert len(caplog.records) == 1
    file.take(RECORD)
    file.close()
    assert len(traces_in(path)) == before + 1
