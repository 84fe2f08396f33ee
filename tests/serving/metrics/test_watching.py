"""What watchers of a real server see: the counts of the metrics, the cores' gangs, jobs; and who is kept out."""

import json
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc as triton

from gangway.server.serving.http.watching import MAX_BEHIND, MAX_WATCHERS
from testing.live_server import LiveServer, live_server
from testing.waiting import until
from tests.conftest import CompiledZoo
from tests.helpers.http_requests import ask_http
from tests.helpers.scraped_metrics import TIMEOUT_S, Scraped
from tests.helpers.tiny_model import orders_of, save_served

pytestmark = pytest.mark.long

STATE = "/v2/gangway/state"
EVENTS = "/v2/gangway/events"
TASK_US = 5000  # of `slow`: 2.4 s of computing
COUNTS = {
    "answered": "nv_inference_request_success",
    "refused": "gangway_requests_refused_total",
    "in_time": "gangway_qos_met_total",
    "late": "gangway_qos_missed_total",
    "waiting": "nv_inference_pending_request_count",
    "in_flight": "gangway_requests_in_flight",
}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory, compiled_zoo: CompiledZoo) -> tuple[Path, Path]:
    """`slow`, `mlp` and `hopeless`, which refuses late requests; and a cache for them."""
    folder, cache = tmp_path_factory.mktemp("watched"), tmp_path_factory.mktemp("cache")
    compiled_zoo.linked_cache(cache)
    save_served(folder, "slow", cache)
    configs = {"mlp": "10000", "hopeless": '50" } } parameters { key: "late" value { string_value: "reject'}
    for name, target in configs.items():
        (folder / name).mkdir()
        (folder / name / "1").symlink_to(compiled_zoo.repository / "mlp" / "1")
        text = f'max_batch_size: 8 parameters {{ key: "qos_ms" value {{ string_value: "{target}" }} }}'
        (folder / name / "config.pbtxt").write_text(text)
    return folder, cache


@pytest.fixture(scope="module")
def server(repository: tuple[Path, Path]) -> Iterator[LiveServer]:
    with live_server(repository[0], [f"--cache-dir={repository[1]}"]) as server:
        yield server


@contextmanager
def states(server: LiveServer) -> Iterator[Iterator[Any]]:
    """The stream of states, as the page and `gangway top` read it."""
    connection = HTTPConnection(server.http_url, timeout=TIMEOUT_S)
    connection.request("GET", EVENTS)
    response = connection.getresponse()
    try:
        assert response.status == 200
        assert response.getheader("content-type", "").startswith("text/event-stream")
        assert response.getheader("x-accel-buffering") == "no"  # else nginx keeps states until there are many
        yield (json.loads(line[6:]) for line in iter(response.readline, b"") if line.startswith(b"data: "))
    finally:
        connection.close()
        response.close()


def mlp_input() -> list[triton.InferInput]:
    tensor = triton.InferInput("input", [1, 16], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 16), np.float32))
    return [tensor]


def by_name(state: Any) -> dict[str, Any]:
    return {model["name"]: model for model in state["models"]}


def threads_of(server: LiveServer) -> int:
    (front_end,) = server.pids()["front end"]
    return psutil.Process(front_end).num_threads()


def test_counts_are_those_of_the_metrics(server: LiveServer) -> None:
    with triton.InferenceServerClient(server.url) as client, states(server) as following:
        begin = next(following)
        for number in range(40):
            client.infer("mlp", mlp_input())
            if number % 4 == 0:
                with pytest.raises(triton.InferenceServerException, match="Request timeout expired"):
                    client.infer("hopeless", mlp_input(), timeout=1)
        next(following)  # may have been made in the middle
        state = next(following)
        scraped = Scraped(server).scrape()
    models = by_name(state)
    assert set(models) == {"slow", "mlp", "hopeless"}
    for name, model in models.items():
        for key, metric in COUNTS.items():
            assert model[key] == scraped(metric, model=name), (name, key)
        failed = sum(scraped("nv_inference_request_failure", model=name, reason=reason) for reason in REASONS)
        assert model["failed"] == failed
    for core in state["cores"]:
        assert core["busy_seconds"] == scraped("gangway_core_busy_seconds_total", core=str(core["core"]))
    mlp, hopeless = models["mlp"], models["hopeless"]
    assert mlp["rate"] * state["window_s"] == pytest.approx(mlp["answered"] - by_name(begin)["mlp"]["answered"])
    assert mlp["answered"] == mlp["in_time"] >= 40
    assert mlp["target_ms"] == 10_000
    assert 0 < mlp["p50_ms"] <= mlp["p99_ms"] < 10_000
    assert mlp["in_time_share"] == 1.0
    assert hopeless["refused"] == 10
    assert hopeless["in_time_share"] == 0.0
    assert hopeless["p50_ms"] is None


REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")


def test_a_gang_is_seen_on_its_cores(server: LiveServer) -> None:
    tensor = triton.InferInput("orders", [1, 16], "INT32")
    tensor.set_data_from_numpy(orders_of(1, TASK_US))
    with (
        ThreadPoolExecutor() as pool,
        triton.InferenceServerClient(server.url) as client,
        states(server) as following,
    ):
        next(following)
        begin_s = time.monotonic()
        answer = pool.submit(client.infer, "slow", [tensor])
        seen = [next(state for state in following if any(core["gang"] for core in state["cores"]))]
        most_ms = (time.monotonic() - begin_s) * 1e3
        seen += [next(following) for _ in range(2)]
        answer.result(TIMEOUT_S)
    gangs = [core["gang"] for core in seen[0]["cores"] if core["gang"]]
    for gang in gangs:
        assert (gang["model"], gang["version"]) == ("slow", 1)
        assert gang["cores"] == len(gangs)
        assert gang["requests"] == 1
        assert 0 < gang["since_ms"] < most_ms
    place = [model["name"] for model in seen[0]["models"]].index("slow")
    for state in seen:
        timeline = state["timeline"]
        assert timeline["begin_s"] < timeline["end_s"]
        for runs in timeline["cores"]:
            assert sum(run[0] for run in runs) == timeline["samples"]
    looked = {run[1] for state in seen for runs in state["timeline"]["cores"] for run in runs}
    assert looked <= {place, -1}
    assert place in looked
    held = sum(by_name(state)["slow"]["cores"] for state in seen[:2])
    assert held > 0.5


def test_decisions_are_told_with_their_reasons(server: LiveServer) -> None:
    tensor = triton.InferInput("orders", [1, 16], "INT32")
    tensor.set_data_from_numpy(orders_of(1, TASK_US // 4))
    with (
        ThreadPoolExecutor() as pool,
        triton.InferenceServerClient(server.url) as client,
        states(server) as following,
    ):
        for _ in range(2):  # the scheduler has seen that it is watched
            next(following)
        begin_s = time.time()
        answers = [pool.submit(client.infer, "slow", [tensor]) for _ in range(4)]
        with pytest.raises(triton.InferenceServerException, match="Request timeout expired"):
            client.infer("hopeless", mlp_input(), timeout=1)
        for answer in answers:
            answer.result(TIMEOUT_S)
        state = next(
            state for state in following if {"start", "refuse"} <= {each["decision"] for each in state["decisions"]}
        )
    cores = {core["core"] for core in state["cores"]}
    told = [each for each in state["decisions"] if each["time_s"] > begin_s]
    assert [each["time_s"] for each in told] == sorted(each["time_s"] for each in told)
    starts = [each for each in told if (each["decision"], each["model"]) == ("start", "slow")]
    assert starts
    for each in starts:
        assert each["cores"]
        assert cores.issuperset(each["cores"])
        assert each["reason"]
        assert each["text"].startswith("start 1 row on core")
        assert each["slack_ms"] is None
    (refusal,) = [each for each in told if each["decision"] == "refuse"]
    assert refusal["model"] == "hopeless"
    assert "certain to miss its deadline" in refusal["text"]


def test_it_is_looked_at_while_somebody_watches(server: LiveServer) -> None:
    """Without a thread for that; what begins to watch later sees nothing from before."""
    unwatched = threads_of(server)
    with states(server) as following, states(server) as others:
        while next(following)["window_s"] < 2:
            next(others)
        assert threads_of(server) == unwatched
    until(lambda: ask_http(server.http_url, "GET", STATE).content["window_s"] < 2)


def test_a_model_that_is_compiled_is_a_job(compiled_zoo: CompiledZoo, tmp_path: Path) -> None:
    shutil.copytree(compiled_zoo.repository / "mlp", tmp_path / "models" / "mlp")
    flags = [f"--cache-dir={tmp_path / 'cache'}", "--model-control-mode=explicit"]
    with (
        live_server(tmp_path / "models", flags) as own,
        ThreadPoolExecutor() as pool,
        triton.InferenceServerClient(own.url) as client,
        states(own) as following,
    ):
        assert next(following)["jobs"] == []
        load = pool.submit(client.load_model, "mlp")
        state = next(state for state in following if state["jobs"])
        (job,) = state["jobs"]
        assert (job["kind"], job["model"]) == ("compile", "mlp")
        assert abs(job["since_s"] - state["time_s"]) < TIMEOUT_S
        (entry,) = state["unavailable"]
        assert (entry["name"], entry["state"]) == ("mlp", "LOADING")
        state = next(state for state in following if state["models"])
        assert list(by_name(state)) == ["mlp"]
        assert state["unavailable"] == state["jobs"] == []
        load.result(TIMEOUT_S)


def test_a_watcher_that_does_not_read_is_dropped(server: LiveServer) -> None:
    """It takes the kernel's buffers of both ends to fill; they are as small as they can be."""
    host, port = server.http_url.split(":")
    (front_end,) = server.pids()["front end"]
    with socket.socket() as silent, states(server) as following:
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        silent.connect((host, int(port)))
        silent.sendall(f"GET {EVENTS} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        own = silent.getsockname()

        def is_connected() -> bool:
            return any(each.raddr == own for each in psutil.Process(front_end).net_connections("tcp"))

        until(is_connected)
        deadline = time.monotonic() + 3 * TIMEOUT_S
        while is_connected():
            assert next(following)["models"]  # the other one gets every state
            assert time.monotonic() < deadline
    assert MAX_BEHIND < TIMEOUT_S


def test_the_number_of_watchers_is_bounded(server: LiveServer) -> None:
    for _ in range(2):  # the first state is sent to watchers of other tests, by which the server learns that they left
        assert ask_http(server.http_url, "GET", STATE).status == 200
    with ExitStack() as stack:
        watching = [stack.enter_context(states(server)) for _ in range(MAX_WATCHERS)]
        for path in (EVENTS, STATE):
            answer = ask_http(server.http_url, "GET", path)
            assert answer.status == 503
            assert answer.content == {"error": f"{MAX_WATCHERS} clients watch already, which is the limit"}
        assert ask_http(server.http_url, "GET", "/").status == 200
        assert len({json.dumps(next(each)) for each in watching}) <= 2  # all get the same ones
    until(lambda: ask_http(server.http_url, "GET", STATE).status == 200)


def test_flags_and_restrictions(repository: tuple[Path, Path]) -> None:
    flags = [f"--cache-dir={repository[1]}"]
    with live_server(repository[0], [*flags, "--allow-page=false"]) as own:
        for path in ("/", STATE, EVENTS):
            for verb in ("GET", "POST"):
                answer = ask_http(own.http_url, verb, path)
                assert (answer.status, answer.content) == (404, {"error": "Not Found"})
    with live_server(repository[0], [*flags, "--http-restricted-api=statistics:key=secret"]) as own:
        for path in (STATE, EVENTS):
            for headers in ({}, {"key": "wrong"}):
                answer = ask_http(own.http_url, "GET", path, headers=headers)
                assert answer.status == 403
                assert "expecting header 'key'" in answer.content["error"]
        assert ask_http(own.http_url, "GET", STATE, headers={"key": "secret"}).status == 200
        assert ask_http(own.http_url, "GET", "/").status == 200  # holds nothing of the server
        assert ask_http(own.http_url, "POST", STATE).status == 405


def test_each_front_end_shows_what_all_have_counted(repository: tuple[Path, Path]) -> None:
    flags = [f"--cache-dir={repository[1]}", "--front-ends=2"]
    with live_server(repository[0], flags) as own:
        for _ in range(12):  # each connection goes to one of them
            with triton.InferenceServerClient(own.url) as client:
                client.infer("mlp", mlp_input())
        with ThreadPoolExecutor() as pool:
            asked = [pool.submit(ask_http, own.http_url, "GET", STATE) for _ in range(12)]
        assert {by_name(each.result().content)["mlp"]["answered"] for each in asked} == {12}
