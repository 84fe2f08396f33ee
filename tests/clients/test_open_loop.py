"""Open-loop load against real servers: gangway's, and grpcio's with handlers that misbehave."""

import hashlib
import itertools
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
import numpy as np
import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import RequestReceived

from gangway.clients.connection import SERVICE, UNLIMITED_MESSAGES, ServerConnection
from gangway.clients.errors import UnreachableError
from gangway.clients.inputs import infer_request, random_tensors
from gangway.clients.open_loop import CLIENTS, drive, run_open_loop
from gangway.protos import grpc_service_pb2 as pb
from gangway.workload.arrivals import Arrivals, poisson
from gangway.workload.mix import Mix, MixModel
from testing.live_server import LiveServer, free_port, reserved_port
from tests.helpers.sampled import sampled

Handler = Callable[[bytes, grpc.ServicerContext], bytes]


def request_of(model: str, *contents: bytes) -> bytes:
    return pb.ModelInferRequest(model_name=model, raw_input_contents=contents).SerializeToString()


REQUEST = request_of("m")

# A process that answers ModelInfer after 100 ms and prints its port.
MORTAL_SERVER = """
import itertools, os, signal, threading, time
from tests.clients.test_open_loop import serving
answers = itertools.count(1)
def slow(request, context):
    time.sleep(0.1)
    if next(answers) == 30:
        os.kill(os.getpid(), signal.SIGKILL)
    return b""
with serving(slow, threads=40) as url:
    print(url.rpartition(":")[2], flush=True)
    threading.Event().wait()
"""


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@contextmanager
def serving(
    handler: Handler, options: Sequence[tuple[str, int]] = (), port: int = 0, threads: int = 8, grace_s: float = 0
) -> Iterator[str]:
    """Serve ModelInfer on raw bytes with a handler of the test's."""
    method = grpc.unary_unary_rpc_method_handler(handler)
    with ThreadPoolExecutor(threads) as pool:
        server = grpc.server(pool, options=[*UNLIMITED_MESSAGES, ("grpc.so_reuseport", 0), *options])
        name = SERVICE.strip("/")
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, {"ModelInfer": method}),))
        url = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
        server.start()
        try:
            yield url
        finally:
            server.stop(grace_s).wait()


def evenly(count: int, gap_ms: float, models: int = 1) -> Arrivals:
    return Arrivals(np.arange(count) * gap_ms * 1000.0, np.arange(count) % models)


def test_a_real_server_answers_all_and_latency_is_counted_from_the_schedule(gangway_server: LiveServer, client: str):
    names = ("mlp", "simple", "mobilenetv2")
    with ServerConnection(gangway_server.url, 10) as connection:
        requests = {}
        for name in names:
            inputs = connection.model_metadata(name).inputs
            values = random_tensors(inputs, 1, 0)
            tensors = {tensor.name: (tensor.datatype, values[tensor.name]) for tensor in inputs}
            requests[name] = infer_request(name, "", tensors).SerializeToString()
        before = [connection.model_statistics(name).model_stats[0].inference_stats.success.count for name in names]
        mix = Mix("three", tuple(MixModel(name, weight) for name, weight in zip(names, (5, 4, 1), strict=True)))
        arrivals = poisson(mix, 400, 150, seed=1)
        run = drive(gangway_server.url, requests, arrivals, timeout_s=20, client=client)
        after = [connection.model_statistics(name).model_stats[0].inference_stats.success.count for name in names]
    outcomes = run.outcomes
    assert (outcomes.names, outcomes.statuses, run.messages) == (names, ("OK",), {})
    assert outcomes.answered.all()
    assert [b - a for a, b in zip(before, after, strict=True)] == np.bincount(arrivals.models).tolist()
    assert (run.lag_us >= 0).all()
    assert (outcomes.latency_us > run.lag_us).all()
    assert run.seconds > arrivals.times_us[-1] / 1e6


def test_a_real_servers_refusals_are_counted_by_status(gangway_server: LiveServer, client: str):
    with ServerConnection(gangway_server.url, 10) as connection:
        inputs = connection.model_metadata("mlp").inputs
    values = {tensor.name: (tensor.datatype, random_tensors(inputs, 1, 0)[tensor.name]) for tensor in inputs}
    requests = {
        "good": infer_request("mlp", "", values).SerializeToString(),
        "unknown": request_of("nothing"),
        "wrong": request_of("mlp"),
    }
    run = drive(gangway_server.url, requests, evenly(30, 2, models=3), timeout_s=20, client=client)
    named = [run.outcomes.statuses[status] for status in run.outcomes.status]
    assert named == ["OK", "NOT_FOUND", "INVALID_ARGUMENT"] * 10


@pytest.mark.alone  # it measures how punctual the machine is
def test_requests_leave_on_schedule_however_long_answers_take(client: str):
    """A sender that was late without saying so would show: the server, on the same clock, sees its requests later."""
    count, gap_ms = 40, 5.0
    seen_ns: list[int] = []
    all_came = threading.Event()

    def withholding(request: bytes, context: grpc.ServicerContext) -> bytes:
        seen_ns.append(time.monotonic_ns())
        if len(seen_ns) == count:
            all_came.set()
        all_came.wait(20)
        return b""

    with serving(withholding, threads=count) as url:
        run = drive(url, {"m": REQUEST}, evenly(count, gap_ms), client=client)
    assert run.outcomes.answered.all()
    assert all_came.is_set()
    assert 0 <= run.lag_us.min() <= np.median(run.lag_us) < gap_ms * 1000  # most have left before the next one was due
    transit_us = np.sort(seen_ns) / 1000 - run.outcomes.scheduled_us - run.lag_us  # and the moment of the first one
    assert np.median(transit_us) - transit_us.min() < gap_ms * 1000


def test_a_server_that_stands_still_is_charged_for_all_who_wait(client: str):
    first = threading.Semaphore(1)

    def stalled(request: bytes, context: grpc.ServicerContext) -> bytes:
        if first.acquire(blocking=False):
            time.sleep(0.25)
        return b""

    with serving(stalled, threads=1) as url:
        arrivals = evenly(20, 10)  # all are scheduled while it stands still
        outcomes = run_open_loop(url, {"m": REQUEST}, arrivals, client=client)
    # Nobody is spared by leaving late: who was scheduled at t has waited for at least what was left of the standstill.
    assert outcomes.answered.all()
    assert (outcomes.latency_us >= 250_000 - outcomes.scheduled_us).all()


def test_errors_are_counted_by_status_with_the_first_message(client: str):
    def refusing(request: bytes, context: grpc.ServicerContext) -> bytes:
        if request == request_of("good"):
            return b""
        context.abort(grpc.StatusCode.UNAVAILABLE, "100 % full: später")

    with serving(refusing) as url:
        run = drive(url, {"a": request_of("good"), "b": request_of("bad")}, evenly(20, 1, models=2), client=client)
    assert run.outcomes.statuses == ("OK", "UNAVAILABLE")
    assert run.outcomes.status.tolist() == [0, 1] * 10
    assert run.messages == {"UNAVAILABLE": "100 % full: später"}


def test_large_messages_pass_both_ways_unchanged_through_small_windows(client: str):
    seen = []

    def digest(request: bytes, context: grpc.ServicerContext) -> bytes:
        seen.append(hashlib.sha256(request).digest())
        return pb.ModelInferResponse(raw_output_contents=[bytes(3_000_000)]).SerializeToString()

    narrow = [
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 20_000),
        ("grpc.http2.max_frame_size", 16_384),
    ]
    generator = np.random.default_rng(0)
    requests = {
        name: request_of(name, generator.bytes(size)) for name, size in (("a", 5_000_001), ("b", 70_000), ("c", 0))
    }
    with serving(digest, narrow) as url:
        outcomes = run_open_loop(url, requests, evenly(12, 1, models=3), client=client)
    assert outcomes.answered.all()
    assert sorted(seen) == sorted([hashlib.sha256(request).digest() for request in requests.values()] * 4)


def test_a_servers_limit_of_streams_is_kept_by_the_raw_client():
    """grpcio keeps it, too, but fails a call whose stream is refused twice, by a server that counts ended streams."""
    lock, running, most = threading.Lock(), [0], [0]

    def watching(request: bytes, context: grpc.ServicerContext) -> bytes:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.002)
        with lock:
            running[0] -= 1
        return b""

    with serving(watching, [("grpc.max_concurrent_streams", 2)]) as url:
        outcomes = run_open_loop(url, {"m": REQUEST}, evenly(30, 0.1))
    assert outcomes.answered.all()
    assert most[0] <= 2


@pytest.mark.parametrize("client", sampled(CLIENTS, ["raw"]), indirect=True)
def test_what_gets_no_answer_in_time_is_an_error_and_others_go_on(client: str):
    release = threading.Event()

    def choosy(request: bytes, context: grpc.ServicerContext) -> bytes:
        if request == request_of("hang"):
            release.wait(10)
        return b""

    with serving(choosy) as url:
        requests = {"a": request_of("go"), "b": request_of("hang")}
        run = drive(url, requests, Arrivals(np.arange(20) * 10e3, np.arange(20) % 10 // 9), 0.6, client=client)
        release.set()
    assert run.outcomes.statuses == ("OK", "DEADLINE_EXCEEDED")
    assert np.flatnonzero(run.outcomes.status).tolist() == [9, 19]
    assert (run.outcomes.latency_us[[9, 19]] >= 0.6e6).all()


def test_a_server_that_hangs_ends_the_run(client: str):
    release = threading.Event()

    def hanging(request: bytes, context: grpc.ServicerContext) -> bytes:
        release.wait(10)
        return b""

    with serving(hanging) as url:
        begin = time.monotonic()
        with pytest.raises(UnreachableError, match=r"answered nothing for 0.2 s; \d+ requests wait"):
            run_open_loop(url, {"m": REQUEST}, evenly(1000, 10), timeout_s=0.2, client=client)
        assert time.monotonic() - begin < 5
        release.set()


def test_more_than_allowed_at_once_are_not_sent():
    first = threading.Semaphore(1)
    release = threading.Event()

    def hanging(request: bytes, context: grpc.ServicerContext) -> bytes:
        if first.acquire(blocking=False):
            threading.Timer(0.8, release.set).start()  # by then all are scheduled
        release.wait(10)
        return b""

    with serving(hanging) as url:
        run = drive(url, {"m": REQUEST}, evenly(10, 1), max_outstanding=4)
    assert run.outcomes.status.tolist() == [0] * 4 + [1] * 6
    assert run.outcomes.statuses[1] == "NOT_SENT"


@pytest.mark.parametrize("client", sampled(CLIENTS, ["raw"]), indirect=True)
def test_a_lost_server_costs_what_was_under_way_and_its_successor_is_found(client: str):
    started, stop = threading.Event(), threading.Event()
    seen = itertools.count(1)

    def mortal(request: bytes, context: grpc.ServicerContext) -> bytes:
        if next(seen) == 20:
            stop.set()
            context.abort(grpc.StatusCode.UNAVAILABLE, "going down")
        return b""

    def serve_twice(port: int) -> None:
        for _ in range(2):
            with serving(mortal, port=port):
                started.set()
                stop.wait(10)
                stop.clear()

    # Long pauses before and after it dies: nothing is under way then.
    times_us = [*range(0, 75_000, 5000), *range(400_000, 600_000, 5000), *range(2_000_000, 2_025_000, 5000)]
    arrivals = Arrivals(np.array(times_us, float), np.zeros(len(times_us), np.int64))
    with reserved_port() as port:
        thread = threading.Thread(target=serve_twice, args=(port,))
        thread.start()
        started.wait(10)
        run = drive(f"127.0.0.1:{port}", {"m": REQUEST}, arrivals, client=client)
        stop.set()
        thread.join(10)
    answered = run.outcomes.answered
    assert {"OK", "UNAVAILABLE"} <= set(run.outcomes.statuses) <= {"OK", "UNAVAILABLE", "CANCELLED"}
    assert answered[:15].all()
    assert not answered[15:-5].all()
    assert answered[-5:].all()


@pytest.mark.parametrize("client", sampled(CLIENTS, ["raw"]), indirect=True)
def test_a_server_that_is_killed_ends_the_run_on_schedule(client: str):
    with subprocess.Popen([sys.executable, "-c", MORTAL_SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        url = f"127.0.0.1:{int(server.stdout.readline())}"
        run = drive(url, {"m": REQUEST}, evenly(80, 10), timeout_s=20, client=client)
    answered = run.outcomes.answered
    assert answered[:10].all()
    assert not answered[-20:].any()
    assert run.outcomes.statuses == ("OK", "UNAVAILABLE")
    assert run.seconds < 10  # no call waited for its timeout


def test_calls_under_way_end_after_the_servers_goodbye(client: str):
    entered, leaving = threading.Event(), threading.Event()

    def slow(request: bytes, context: grpc.ServicerContext) -> bytes:
        entered.set()
        leaving.wait(10)
        time.sleep(0.1)  # the goodbye goes first
        return b""

    with ThreadPoolExecutor(1) as pool:
        with serving(slow, grace_s=10) as url:
            run = pool.submit(drive, url, {"m": REQUEST}, evenly(1, 1), client=client)
            assert entered.wait(10)
            leaving.set()
        assert run.result(10).messages == {}


def test_who_is_refused_with_a_reset_before_the_message_has_gone_costs_nobody_else():
    """As gRPC's core does it: the status, and at once the stream's end; the window lets a part of the message pass."""

    def refuse(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        http = H2Connection(H2Configuration(client_side=False))
        http.initiate_connection()
        with connection:
            connection.sendall(http.data_to_send())
            while received := connection.recv(1 << 16):
                for event in http.receive_data(received):
                    if isinstance(event, RequestReceived):
                        status = [(":status", "200"), ("grpc-status", "14"), ("grpc-message", "not now")]
                        http.send_headers(event.stream_id, status, end_stream=True)
                        http.reset_stream(event.stream_id, ErrorCodes.NO_ERROR)
                connection.sendall(http.data_to_send())

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        refusing = pool.submit(refuse, listener)
        run = drive(f"127.0.0.1:{listener.getsockname()[1]}", {"m": bytes(1 << 20)}, evenly(3, 20))
        refusing.result(10)
    assert run.messages == {"UNAVAILABLE": "not now"}


def test_nobody_listens(client: str):
    with pytest.raises(UnreachableError, match="no server answers at"):
        run_open_loop(f"127.0.0.1:{free_port()}", {"m": REQUEST}, evenly(1, 1), client=client)


def test_a_server_that_speaks_something_else_is_said_plainly(client: str):
    said = {"raw": "does not speak HTTP/2", "grpcio": "no server answers at .* connect an http1.x server"}

    def talk(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n")
            connection.recv(1000)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=talk, args=(listener,))
        thread.start()
        with pytest.raises(UnreachableError, match=said[client]):
            run_open_loop(f"127.0.0.1:{listener.getsockname()[1]}", {"m": REQUEST}, evenly(1, 1), client=client)
        thread.join(5)


def test_a_listener_that_says_nothing_is_given_up(client: str):
    said = {"raw": "does not speak HTTP/2", "grpcio": "no server answers at"}
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(UnreachableError, match=said[client]):
        run_open_loop(
            f"127.0.0.1:{listener.getsockname()[1]}", {"m": REQUEST}, evenly(1, 1), timeout_s=0.2, client=client
        )


def test_the_sender_goes_first_and_only_during_the_run(client: str):
    before = os.sched_getscheduler(0), os.sched_getparam(0)
    seen = []

    def noting(request: bytes, context: grpc.ServicerContext) -> bytes:
        seen.append(os.sched_getscheduler(main_thread))
        return b""

    main_thread = threading.get_native_id()
    with serving(noting) as url:
        run_open_loop(url, {"m": REQUEST}, evenly(3, 5), client=client)
    assert (os.sched_getscheduler(0), os.sched_getparam(0)) == before
    assert len(seen) == 3
    assert {policy & ~os.SCHED_RESET_ON_FORK for policy in seen} <= {os.SCHED_FIFO, before[0]}
