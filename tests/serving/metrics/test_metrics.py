"""Metrics of a real server, scraped as Prometheus does, beside what ModelStatistics says.

The last test kills processes, so it stands at the end.
"""

import http.client
import json
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from gangway.protos import grpc_service_pb2 as pb
from testing.live_server import is_ready, live_server
from testing.load import raw_channel, raw_infer
from testing.waiting import until
from tests.conftest import CompiledZoo
from tests.helpers.scraped_metrics import TIMEOUT_S, Scraped
from tests.helpers.stopped_workers import stopped_workers
from tests.helpers.tiny_model import orders_of, save_served

HEAVY_ROWS = 8
QUEUE = 8
LONG_US = 5000  # of a task of `slow`: 2.4 s of computing
TEAM = 'blue\\ "green"\n'
MODELS = {
    "heavy": ("resnet50", "max_batch_size: 8"),
    "quick": ("mlp", 'max_batch_size: 8 metric_tags { key: "the team" value: TEAM } '
              'model_metrics { metric_control { '
              'metric_identifier { family: "nv_inference_first_response_histogram_ms" } '
              "histogram_options { buckets: [0.01, 1.5, 30000] } } } "
              'parameters { key: "qos_ms" value { string_value: "10000" } }'),
    "cached": ("mlp", "response_cache { enable: true }"),
    "hopeless": ("mlp", 'parameters { key: "qos_ms" value { string_value: "50" } } '
                 'parameters { key: "late" value { string_value: "reject" } }'),
}  # fmt: skip
TRITON_COUNTERS = (
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_request_duration_us",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_compute_output_duration_us",
)
TRITON_MODEL_GAUGES = ("nv_inference_pending_request_count", "nv_model_load_duration_secs")
TRITON_MACHINE_GAUGES = ("nv_cpu_utilization", "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes")
REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")


@dataclass(frozen=True)
class Served(Scraped):
    client: triton.InferenceServerClient

    def statistics(self, model: str) -> Any:
        return self.client.get_inference_statistics(model).model_stats[0]

    def infer(self, model: str, rows: int = 1, **options: Any) -> Any:
        return self.client.infer(model, inputs(model, rows), **options)

    def send(self) -> tuple[Any, "Future[None]"]:
        """Send a request that takes long; return what can cancel it, and its end."""
        end: Future[None] = Future()
        call = self.client.async_infer("slow", inputs("slow"), callback=lambda result, error: end.set_result(None))
        return call, end


def inputs(model: str, rows: int = 1) -> list[triton.InferInput]:
    if model == "slow":
        tensor = triton.InferInput("orders", [rows, 16], "INT32")
        tensor.set_data_from_numpy(orders_of(rows, LONG_US))
        return [tensor]
    shape = [rows, 3, 224, 224] if model == "heavy" else [rows, 16]
    tensor = triton.InferInput("input", shape, "FP32")
    tensor.set_data_from_numpy(np.zeros(shape, np.float32))
    return [tensor]


@pytest.fixture(scope="module")
def served(compiled_zoo: CompiledZoo, model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("metrics")
    save_served(repository, "slow", model_cache)
    for name, (model, config) in MODELS.items():
        compiled_zoo.link(repository, name, model, config.replace("TEAM", json.dumps(TEAM)))
    flags = [f"--cache-dir={model_cache}", "--scheduler=model_fcfs", "--metrics-interval-ms=1"]
    flags += ["--metrics-config=histogram_latencies=true", "--metrics-config", "summary_latencies=false"]
    flags += ["--model-control-mode=explicit", "--load-model=*", "--cache-config=local,size=1048576"]
    with live_server(repository, flags) as server, triton.InferenceServerClient(server.url) as client:
        yield Served(server, client)


def test_counters_are_those_of_model_statistics(served: Served) -> None:
    for _ in range(5):
        served.infer("quick")
    for _ in range(2):
        served.infer("quick", rows=3)
    with pytest.raises(InferenceServerException, match="Request timeout expired"):
        served.infer("hopeless", timeout=1)
    with pytest.raises(InferenceServerException, match="UNAVAILABLE"):
        served.infer("hopeless", timeout=1)
    send_too_few_bytes(served, "quick")
    with pytest.raises(InferenceServerException, match="data-type"):  # it reaches no model, and counts for none
        tensor = triton.InferInput("input", [1, 16], "INT32")
        tensor.set_data_from_numpy(np.zeros((1, 16), np.int32))
        served.client.infer("quick", [tensor])
    served.infer("heavy")
    call, end = served.send()
    until(lambda: served.server.busy_slots(running=True) == 1)
    call.cancel()
    end.result(TIMEOUT_S)
    until(lambda: bool(served.statistics("slow").inference_stats.fail.count))

    scrape = served.scrape()
    expected = {
        "quick": (7, 11, 7, {"OTHER": 1}),
        "hopeless": (0, 0, 0, {"REJECTED": 2}),
        "heavy": (1, 1, 1, {}),
        "slow": (0, 0, 0, {"CANCELED": 1}),
    }
    for model, (success, rows, executions, failures) in expected.items():
        labels = {"model": model, "version": "1"}
        stats = served.statistics(model)
        assert scrape("nv_inference_request_success", **labels) == stats.inference_stats.success.count == success
        assert scrape("nv_inference_count", **labels) == stats.inference_count == rows
        assert scrape("nv_inference_exec_count", **labels) == stats.execution_count == executions
        found = {reason: scrape("nv_inference_request_failure", reason=reason, **labels) for reason in REASONS}
        assert found == {**dict.fromkeys(REASONS, 0), **failures}
        assert sum(found.values()) == stats.inference_stats.fail.count
        for part in ("queue", "compute_input", "compute_infer", "compute_output"):
            duration_us = scrape(f"nv_inference_{part}_duration_us", **labels)
            assert duration_us == getattr(stats.inference_stats, part).ns // 1000
            assert bool(duration_us) == bool(success)
        assert scrape("nv_inference_request_duration_us", **labels) == stats.inference_stats.success.ns // 1000
        for name in ("qos_met", "qos_missed", "blocks", "conflicts", "preemptions"):
            assert scrape(f"gangway_{name}_total", **labels) == stats.response_stats[f"gangway_{name}"].success.count
        refused = stats.response_stats["gangway_refused"].success.count
        assert scrape("gangway_requests_refused_total", **labels) == refused == failures.get("REJECTED", 0)
        assert scrape("nv_inference_pending_request_count", **labels) == 0
        assert scrape("gangway_requests_in_flight", **labels) == 0
        assert scrape("nv_model_load_duration_secs", **labels) > 0
    assert scrape("gangway_qos_met_total", model="quick") == 7
    assert scrape("gangway_qos_missed_total", model="hopeless") == 2


def send_too_few_bytes(served: Served, model: str) -> None:
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[b"few"])
    request.inputs.add(name="input", datatype="FP32", shape=[1, 16])
    with raw_channel(served.server.url) as channel, pytest.raises(grpc.RpcError) as caught:
        raw_infer(channel)(request.SerializeToString(), timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_names_types_and_labels_are_tritons(served: Served) -> None:
    response, body = served.get()
    assert response.getheader("Content-Type") == "text/plain; version=0.0.4; charset=utf-8"
    lines = body.decode().splitlines()
    for name in TRITON_COUNTERS:
        assert f"# TYPE {name} counter" in lines
    for name in (*TRITON_MODEL_GAUGES, *TRITON_MACHINE_GAUGES):
        assert f"# TYPE {name} gauge" in lines
    assert "# TYPE nv_inference_first_response_histogram_ms histogram" in lines
    for name in (*TRITON_COUNTERS, *TRITON_MODEL_GAUGES):
        of_model = [line for line in lines if line.startswith(f"{name}{{") and 'model="heavy"' in line]
        assert len(of_model) == (len(REASONS) if name == "nv_inference_request_failure" else 1)
        assert all('version="1"' in line for line in of_model)
    scrape = served.scrape()
    assert scrape("nv_inference_count", model="quick", version="1", _the_team=TEAM) >= 0
    until(lambda: 0 < served.scrape()("nv_cpu_utilization") <= 1)  # of the last second: it may have been idle
    assert 0 < scrape("nv_cpu_memory_used_bytes") < scrape("nv_cpu_memory_total_bytes")
    per_model = [line for line in lines if line.startswith("nv_cache") and "_per_model" in line]
    assert per_model and all('model="cached"' in line for line in per_model), "others have no cache"


def test_every_family_explains_itself_and_ours_are_named_as_prometheus_wants(served: Served) -> None:
    families = served.families()
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.documentation and family.type in ("counter", "gauge", "histogram"), family.name
        if family.name.startswith("gangway_") and family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)
        assert family.name.startswith(("nv_", "gangway_"))


@pytest.mark.parametrize(
    ("histogram", "unit", "counter"),
    [
        ("gangway_request_duration_seconds", 1e-6, "nv_inference_request_duration_us"),
        ("gangway_queue_duration_seconds", 1e-6, "nv_inference_queue_duration_us"),
        ("gangway_compute_duration_seconds", 1e-6, "nv_inference_compute_infer_duration_us"),
        ("gangway_batch_rows", 1, "nv_inference_count"),
        ("nv_inference_first_response_histogram_ms", 1e-3, "nv_inference_request_duration_us"),
    ],
)
def test_histograms_add_up(served: Served, histogram: str, unit: float, counter: str) -> None:
    served.infer("quick", rows=8)
    scrape = served.scrape()
    labels = {"model": "quick", "version": "1"}
    buckets = {
        float(dict(own)["le"]): value
        for (name, own), value in scrape.samples.items()
        if name == f"{histogram}_bucket" and labels.items() <= dict(own).items()
    }
    counts = [count for _, count in sorted(buckets.items())]
    assert counts == sorted(counts)
    assert counts[-1] == scrape(f"{histogram}_count", **labels) == scrape("nv_inference_request_success", **labels)
    total = scrape(f"{histogram}_sum", **labels)
    assert total == pytest.approx(scrape(counter, **labels) * unit, abs=2 * unit)
    assert sum(buckets) > total / counts[-1] > 0
    if histogram == "gangway_batch_rows":
        assert buckets[8] - buckets[4] >= 1


def test_requests_that_wait_and_run_are_seen(served: Served) -> None:
    sent = [served.send() for _ in range(QUEUE)]

    def some_wait() -> bool:
        scrape = served.scrape()
        waiting = scrape("nv_inference_pending_request_count", model="slow")
        in_flight = scrape("gangway_requests_in_flight", model="slow")
        return 0 < waiting < in_flight <= QUEUE and scrape("gangway_heap_used_bytes") > 0

    until(some_wait)
    for call, _ in sent:
        call.cancel()
    for _, end in sent:
        end.result(TIMEOUT_S)
    until(lambda: served.scrape()("gangway_requests_in_flight", model="slow") == 0)
    until(lambda: served.scrape()("gangway_request_slots_in_use") == 0)  # just after their ends


@pytest.mark.alone  # beside others a front end may not get the fifth of a core from which on it refuses
def test_calls_that_an_overloaded_server_refuses_unread_are_counted(served: Served) -> None:
    """It refuses them when reading takes too much CPU: so workers leave it the cores, and the calls cost us little."""
    assert served.scrape()("gangway_calls_refused_unread_total") == 0
    request = pb.ModelInferRequest(model_name="slow", raw_input_contents=[orders_of(1, LONG_US).tobytes()])
    request.inputs.add(name="orders", datatype="INT32", shape=[1, 16])
    message = request.SerializeToString()
    with raw_channel(served.server.url) as channel:
        infer = raw_infer(channel)
        with stopped_workers(served.server):
            calls = [infer.future(message) for _ in range(int(served.scrape()("gangway_request_slots")))]

            def refuses() -> bool:
                """Calls go on coming, since a busy machine lets the server read the first ones slowly."""
                calls.extend(infer.future(message) for _ in range(100))
                return served.scrape()("gangway_calls_refused_unread_total") > 0

            until(refuses)
            for call in calls:
                call.cancel()

    def lets_calls_in() -> bool:
        try:
            served.infer("quick")
        except InferenceServerException as refusal:
            assert "overloaded" in str(refusal)
            return False
        return True

    until(lets_calls_in)
    until(lambda: served.scrape()("gangway_request_slots_in_use") == 0)


def test_what_scheduler_and_workers_know(served: Served) -> None:
    served.infer("heavy", HEAVY_ROWS)

    def at_rest() -> bool:  # the scheduler tells once a second
        scrape = served.scrape()
        idle = ("gangway_leases_in_use", "gangway_queue_length", "gangway_cores_busy", "gangway_arenas_in_use")
        heavy = [scrape(name, model="heavy") if name.startswith("gangway_arenas") else scrape(name) for name in idle]
        return not any(heavy) and scrape("gangway_layers_total", model="quick") > 0

    until(at_rest)
    scrape = served.scrape()
    assert scrape("gangway_layers_total", model="heavy") > 10
    assert scrape("gangway_arena_bytes", model="heavy") > 0
    assert scrape("gangway_weights_bytes", model="heavy") > 90e6
    assert scrape("gangway_version_requests_total", model="quick", kernel_version="0") > 0
    busy = [value for (name, _), value in scrape.samples.items() if name == "gangway_core_busy_seconds_total"]
    assert len(busy) == scrape("gangway_cores") == len(served.server.pids()["worker"])
    assert all(value > 0 for value in busy)
    cores = {int(dict(own)["core"]) for name, own in scrape.samples if name == "gangway_core_busy_seconds_total"}
    assert len(cores) == len(busy)
    assert cores <= os.sched_getaffinity(0)
    assert scrape("gangway_leases") >= 16
    assert 0 <= scrape("gangway_interference_level") <= 4
    assert time.time() - 600 < scrape("gangway_start_time_seconds") < time.time()
    (memory,) = served.statistics("heavy").memory_usage
    assert memory.type == "CPU"
    assert memory.byte_size == scrape("gangway_weights_bytes", model="heavy") + scrape(
        "gangway_arena_bytes", model="heavy"
    )


def test_the_response_cache(served: Served) -> None:
    for _ in range(3):
        served.infer("cached")
    scrape, stats = served.scrape(), served.statistics("cached").inference_stats
    counts = ("nv_inference_request_success", "nv_inference_count", "nv_inference_exec_count")
    assert [scrape(name, model="cached") for name in counts] == [3, 1, 1]
    assert scrape("nv_cache_num_hits_per_model", model="cached", version="1") == stats.cache_hit.count == 2
    assert scrape("nv_cache_num_misses_per_model", model="cached", version="1") == stats.cache_miss.count == 1
    assert scrape("nv_cache_hit_duration_per_model", model="cached") == stats.cache_hit.ns // 1000
    assert scrape("nv_cache_miss_duration_per_model", model="cached") == stats.cache_miss.ns // 1000
    counts = ("num_entries", "num_lookups", "num_hits", "num_misses", "num_evictions")
    assert [scrape(f"nv_cache_{name}") for name in counts] == [1, 3, 2, 1, 0]
    assert 0 < scrape("nv_cache_util") < 1
    assert scrape("nv_cache_lookup_duration") >= 0 and scrape("nv_cache_insertion_duration") >= 0


def test_a_model_that_is_unloaded_leaves_no_series(served: Served) -> None:
    def has_series() -> bool:
        return any(("model", "hopeless") in labels for _, labels in served.scrape().samples)

    served.client.unload_model("hopeless")
    until(lambda: not has_series())
    served.client.load_model("hopeless")
    until(has_series)
    scrape = served.scrape()
    assert scrape("nv_inference_request_failure", model="hopeless", reason="REJECTED") == 0
    assert scrape("nv_model_load_duration_secs", model="hopeless") > 0


def test_restarts_are_counted_and_a_new_front_end_goes_on_counting(served: Served) -> None:
    served.infer("quick")
    before, stats = served.scrape(), served.statistics("quick")
    for role in ("worker", "scheduler", "front end"):
        os.kill(served.server.pids()[role][0], signal.SIGKILL)
        until(lambda role=role: restarts_of(served, role) == 1)  # type: ignore[misc]
    until(lambda: is_ready(served.server.url))
    scrape = served.scrape()
    for (name, labels), value in before.samples.items():
        if name.startswith(("nv_inference", "gangway_request_duration", "gangway_qos")):
            assert scrape.samples[name, labels] == value
    assert scrape("nv_model_load_duration_secs", model="quick") > 0
    served.infer("quick", client_timeout=TIMEOUT_S)
    scrape, count = served.scrape(), stats.inference_stats.success.count + 1
    assert scrape("nv_inference_request_success", model="quick") == count
    after = served.statistics("quick")
    assert after.inference_stats.success.count == count
    assert [batch.batch_size for batch in after.batch_stats] == [batch.batch_size for batch in stats.batch_stats]
    assert {role: restarts_of(served, role) for role in ("worker", "scheduler", "front end")} == {
        "worker": 1,
        "scheduler": 1,
        "front end": 1,
    }


def restarts_of(served: Served, role: str) -> float:
    """What the metrics say; -1 while nobody answers."""
    try:
        return served.scrape()("gangway_process_restarts_total", process=role)
    except (OSError, http.client.HTTPException):
        return -1
