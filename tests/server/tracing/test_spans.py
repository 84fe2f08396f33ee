"""Traces of a real server in mode opentelemetry: the SDK's exporter talks to a collector that keeps what it gets."""

import json
import re
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import Any

import grpc
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.tracing.spans import closest_offset_ns
from testing.live_server import LiveServer, live_server, stop
from testing.load import raw_channel, raw_infer
from testing.otlp_collector import CollectedSpan, OtlpCollector
from testing.waiting import until
from tests.helpers.whole_server import small_repository

SERVER_KIND, ERROR_STATUS = 2, 2  # of OpenTelemetry's protocol
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
SPAN_ID = "b7ad6b7169203331"
NONSENSE = ["", "x", "0" * 4000, f"00-{TRACE_ID}-{SPAN_ID}"]
NONSENSE += [f"ff-{TRACE_ID}-{SPAN_ID}-01", f"00-{'0' * 32}-{SPAN_ID}-01"]


@dataclass(frozen=True)
class Traced:
    """A server that traces every request, and where its spans arrive."""

    server: LiveServer
    collector: OtlpCollector
    client: triton.InferenceServerClient
    log: Path
    inputs: Callable[..., list[triton.InferInput]]

    def infer(self, request_id: str, **headers: str) -> None:
        self.client.infer("simple", self.inputs(), request_id=request_id, headers=headers)

    def spans_of(self, request_id: str) -> dict[str, CollectedSpan]:
        """The three spans of a request, by name."""

        def found(spans: Sequence[CollectedSpan]) -> list[CollectedSpan]:
            own = [span for span in spans if span.attributes.get("triton.request_id") == request_id]
            return [span for span in spans if span.trace_id == own[0].trace_id] if own else []

        return {span.name: span for span in found(self.collector.wait_for(lambda spans: len(found(spans)) >= 3))}


@pytest.fixture(scope="module")
def running(compiled_zoo: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, ...]]:
    log = tmp_path_factory.mktemp("spans") / "server.log"
    with OtlpCollector() as collector:
        settings = ["mode=opentelemetry", "level=TIMESTAMPS", "rate=1", f"opentelemetry,url={collector.url}"]
        settings += ["opentelemetry,resource=service.name=shop", "opentelemetry,bsp_schedule_delay=100"]
        flags = [f"--trace-config={setting}" for setting in settings]
        flags += [f"--cache-dir={compiled_zoo.cache_dir}", f"--log-file={log}", "--log-format=json"]
        with live_server(compiled_zoo.repository, flags) as server, triton.InferenceServerClient(server.url) as client:
            yield server, collector, client, log


@pytest.fixture
def traced(running: tuple[Any, ...], simple_inputs: Any) -> Traced:
    return Traced(*running, inputs=simple_inputs)


def test_a_reading_of_two_clocks_in_which_the_process_had_no_core_counts_least() -> None:
    apart_ns, stall_ns = 10**18, 5 * 10**7
    before_wall = (0, apart_ns + stall_ns, stall_ns + 100)
    after_wall = (10**9, 10**9 + apart_ns, 10**9 + stall_ns)
    undisturbed = (2 * 10**9, 2 * 10**9 + apart_ns + 60, 2 * 10**9 + 120)
    for readings in permutations((before_wall, undisturbed, after_wall)):
        assert closest_offset_ns(readings) == apart_ns


def test_three_spans_say_what_became_of_a_request(traced: Traced) -> None:
    begin_ns = time.time_ns()
    traced.infer("plain")
    end_ns = time.time_ns()
    spans = traced.spans_of("plain")
    root, model, compute = (spans[name] for name in ("InferRequest", "simple", "compute"))
    assert (root.parent_id, model.parent_id, compute.parent_id) == ("", root.span_id, model.span_id)
    assert root.kind == SERVER_KIND
    assert root.resource["service.name"] == "shop"
    assert [name for name, _ in root.events] == [
        *("GRPC_WAITREAD_START", "GRPC_WAITREAD_END", "GRPC_SEND_START", "GRPC_SEND_END")
    ]
    assert [name for name, _ in model.events] == [
        *("REQUEST_START", "QUEUE_START", "SCHEDULE_START", "SCHEDULE_END", "RESPONSE_START"),
        *("INFER_RESPONSE_COMPLETE", "REQUEST_END"),
    ]
    assert [name for name, _ in compute.events] == [
        *("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")
    ]
    slack_ns = 10**7  # two clocks are compared
    assert begin_ns - slack_ns < root.start_ns <= model.start_ns <= compute.start_ns
    assert compute.end_ns <= model.end_ns <= root.end_ns < end_ns + slack_ns
    for span in (root, model, compute):
        assert all(span.start_ns <= ns <= span.end_ns for _, ns in span.events)
    assert model.attributes["triton.model_name"] == "simple"
    assert model.attributes["triton.model_version"] == 1
    assert model.attributes["gangway.status"] == "OK"
    assert model.attributes["gangway.ranks"] >= 1
    assert model.attributes["gangway.blocks"] >= 1
    assert model.attributes["gangway.preemptions"] >= 0
    assert 0 < model.attributes["gangway.queue_us"] < 1e6


def test_the_context_of_a_client_is_the_parent(traced: Traced) -> None:
    traced.infer("child", traceparent=f"00-{TRACE_ID}-{SPAN_ID}-01", tracestate="shop=cart")
    spans = traced.spans_of("child")
    assert {span.trace_id for span in spans.values()} == {TRACE_ID}
    assert spans["InferRequest"].parent_id == SPAN_ID
    assert spans["InferRequest"].trace_state == "shop=cart"


def test_the_same_over_http(traced: Traced) -> None:
    url, trace_id = f"http://{traced.server.http_url}/v2/models/simple/infer", TRACE_ID[::-1]
    tensors = [{"name": name, "datatype": "INT32", "shape": [1, 16], "data": [1] * 16} for name in ("INPUT0", "INPUT1")]
    headers = {"Traceparent": f"00-{trace_id}-{SPAN_ID}-01", "Content-Type": "application/json"}
    body = json.dumps({"id": "over http", "inputs": tensors}).encode()
    with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=10) as answer:
        assert answer.status == 200
    root = traced.spans_of("over http")["InferRequest"]
    assert (root.trace_id, root.parent_id) == (trace_id, SPAN_ID)
    assert [name for name, _ in root.events] == [
        *("HTTP_RECV_START", "HTTP_RECV_END", "HTTP_SEND_START", "HTTP_SEND_END")
    ]


def test_who_comes_with_a_context_has_decided_already(traced: Traced) -> None:
    traced.client.update_trace_settings(settings={"trace_rate": "0"})
    traced.infer("without context")
    traced.infer("not sampled", traceparent=f"00-{TRACE_ID[::-1]}-{SPAN_ID[::-1]}-00")
    traced.infer("sampled", traceparent=f"00-{TRACE_ID[::-1]}-{SPAN_ID}-01")
    assert traced.spans_of("sampled")["InferRequest"].parent_id == SPAN_ID
    traced.client.update_trace_settings(settings={"trace_rate": None})
    ids = {span.attributes.get("triton.request_id") for span in traced.collector.spans}
    assert not ids & {"without context", "not sampled"}


@pytest.mark.parametrize("number, header", list(enumerate(NONSENSE)))
def test_a_context_that_makes_no_sense_is_ignored(traced: Traced, number: int, header: str) -> None:
    traced.infer(f"nonsense {number}", traceparent=header)
    spans = traced.spans_of(f"nonsense {number}")
    assert spans["InferRequest"].parent_id == ""
    assert spans["InferRequest"].trace_id != TRACE_ID


def test_a_request_that_fails_is_an_error(traced: Traced) -> None:
    request = pb.ModelInferRequest(model_name="simple", id="wrong")
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype="INT32", shape=[1, 16])
        request.raw_input_contents.append(bytes(63))
    with raw_channel(traced.server.url) as channel, pytest.raises(grpc.RpcError, match="byte size mismatch"):
        raw_infer(channel)(request.SerializeToString(), timeout=10)
    traced.collector.wait_for(lambda spans: any(span.attributes.get("triton.request_id") == "wrong" for span in spans))
    (model,) = (span for span in traced.collector.spans if span.attributes.get("triton.request_id") == "wrong")
    assert model.status_code == ERROR_STATUS
    assert "byte size mismatch" in model.status_message
    assert model.attributes["gangway.status"] == "INVALID_ARGUMENT"


def test_settings(traced: Traced) -> None:
    settings = traced.client.get_trace_settings(as_json=True)["settings"]
    shown = {name: value["value"] for name, value in settings.items()}
    assert shown == {
        "trace_level": ["TIMESTAMPS"],
        "trace_rate": ["1"],
        "trace_count": ["-1"],
        "trace_mode": ["opentelemetry"],
        "url": [traced.collector.url],
        "resource": ["service.name=shop"],
        "bsp_schedule_delay": ["100"],
    }
    for wrong in ({"trace_level": ["TENSORS"]}, {"log_frequency": "5"}):
        with pytest.raises(InferenceServerException, match="mode opentelemetry"):
            traced.client.update_trace_settings(settings=wrong)


def test_last_a_dead_collector_costs_spans_and_nothing_else(traced: Traced) -> None:
    traced.collector.close()
    for number in range(50):
        traced.infer(f"lost {number}")
    begin = time.monotonic()
    assert stop(traced.server.process) == 0
    assert time.monotonic() - begin < 10
    lines = [json.loads(line) for line in traced.log.read_text().splitlines()]
    (said,) = (line["message"] for line in lines if line["process"] == "trace exporter" and " of " in line["message"])
    lost = int(said.split()[0])
    assert "spans were dropped, because the collector" in said
    assert lost >= 150, "three for each request"
    assert sum("spans" in line["message"] for line in lines) <= 2, "not one line for each batch"


@pytest.mark.long  # it is tried again after 1, 2, 4 seconds
def test_an_exporter_that_never_starts_says_what_is_lost_and_is_tried_less_and_less(
    tmp_path: Path, compiled_zoo: Any, simple_inputs: Any
) -> None:
    (tmp_path / "requests.py").write_text("raise ImportError('half a package')")
    flags = [f"--trace-config={setting}" for setting in ("mode=opentelemetry", "level=TIMESTAMPS", "rate=1")]
    repository = small_repository(tmp_path / "models", compiled_zoo, "simple")
    prefix = ["env", f"PYTHONPATH={tmp_path}"]
    with (
        live_server(repository, [*flags, f"--cache-dir={compiled_zoo.cache_dir}"], prefix=prefix) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        until(lambda: "starting another in 8 s" in server.log.read_text())
        ends = re.findall(r"the trace exporter .* exited with status 1; starting another(.*)", server.log.read_text())
        assert client.infer("simple", simple_inputs(), request_id="still").get_response().id == "still"
    said = ", and until then traces are lost: the lines before say why; remove the cause, or turn tracing off"
    assert ends == ["", *(f" in {seconds} s{said}" for seconds in (1, 2, 4, 8))]
