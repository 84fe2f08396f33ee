"""The end of `gangway serve`: by a signal at any time, or because its supervisor is killed."""

import os
import re
import signal
import subprocess
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import np_to_triton_dtype

from gangway.executor.launch import available_cores
from gangway.server.control.supervisor.supervisor import EXIT_GRACE_SECONDS
from testing.live_server import LiveServer, live_server
from testing.load import TOLERANCE, relative_error
from testing.processes import descendants_of
from testing.reference import example_of
from testing.repository import GANGWAY
from testing.waiting import until
from tests.helpers.start_time import back_within_s
from tests.helpers.steady_calls import simple_inputs
from tests.helpers.stopped_workers import stopped_workers
from tests.helpers.whole_server import TIMEOUT_SECONDS, alive, all_pids, names_of, small_repository, started

pytestmark = pytest.mark.long


@pytest.fixture
def repository(tmp_path, compiled_zoo):
    return small_repository(tmp_path / "models", compiled_zoo)


@pytest.fixture
def large_model(tmp_path, compiled_zoo):
    return small_repository(tmp_path / "models", compiled_zoo, "resnet50")


def sent(client, example, count):
    """Requests for a model; what becomes of each."""
    inputs = []
    for name, values in example.inputs.items():
        inputs.append(triton.InferInput(name, values.shape, np_to_triton_dtype(values.dtype)))
        inputs[-1].set_data_from_numpy(values)
    ends = [Future() for _ in range(count)]
    for end in ends:
        client.async_infer("resnet50", inputs, lambda result, error, end=end: end.set_result(error or result))
    return ends


def test_a_signal_lets_running_requests_finish(large_model, compiled_zoo):
    """Those that wait, too. What comes later is refused."""
    example = example_of("resnet50", compiled_zoo.onnx_file("resnet50"))
    with (
        live_server(large_model, [f"--cache-dir={compiled_zoo.cache_dir}"]) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        pids = all_pids(server)
        with stopped_workers(server):
            answers = sent(client, example, 4)
            until(lambda: server.busy_slots() == 4)
            server.process.send_signal(signal.SIGTERM)
            until(lambda: not client.is_server_ready())
            (refused,) = sent(client, example, 1)
            assert refused.result(TIMEOUT_SECONDS).status() == "StatusCode.UNAVAILABLE"
        for answer in answers:
            ((name, expected),) = example.outputs.items()
            assert relative_error(answer.result(TIMEOUT_SECONDS).as_numpy(name), expected) <= TOLERANCE
        assert server.process.wait(TIMEOUT_SECONDS) == 0
        text = server.log.read_text()
    assert re.search(r"resnet50, version 1, in all: 4 answered, .* latency targets met \d+, missed \d+ ", text), text
    assert not alive(pids) and not names_of(pids)


def test_a_server_that_leaves_says_so_and_still_serves(repository, compiled_zoo):
    """So that whoever distributes calls can send them elsewhere, before any is refused."""
    flags = [f"--cache-dir={compiled_zoo.cache_dir}", "--exit-delay-secs=2"]
    with live_server(repository, flags) as server, triton.InferenceServerClient(server.url) as client:
        server.process.send_signal(signal.SIGTERM)
        until(lambda: not client.is_model_ready("simple"))
        assert not client.is_server_ready()
        assert client.is_server_live()
        assert (client.infer("simple", simple_inputs()).as_numpy("OUTPUT0") == 2).all()
        assert server.process.wait(TIMEOUT_SECONDS) == 0


@pytest.mark.alone
@pytest.mark.parametrize("far", [False, True])
def test_a_signal_while_models_are_compiled(compiled_zoo, tmp_path, far):
    """At the very beginning, and when TVM is at work."""
    with started(compiled_zoo.repository, tmp_path) as process:
        assert process.stdout.readline()  # it logs: everything has been started
        if far:
            until(lambda: any("libtvm" in mapped(pid) for pid in descendants_of(process.pid)))
        pids = descendants_of(process.pid)
        process.terminate()
        begin = time.monotonic()
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
        took_s = time.monotonic() - begin
    assert process.returncode == 0, output
    assert took_s < 5 or took_s < back_within_s("gangway.server.serving.process", 5), "a job is not waited for"
    assert "Traceback" not in output
    until(lambda: not alive(pids))  # a job that is killed is not waited for
    assert not names_of(pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGQUIT, signal.SIGHUP])
def test_each_signal_that_ends_processes_ends_well(repository, compiled_zoo, number):
    """Also where a terminal sends it to every process of the server."""
    with live_server(repository, [f"--cache-dir={compiled_zoo.cache_dir}"]) as server:
        pids = all_pids(server)
        for pid in (*pids[1:], pids[0]):
            os.kill(pid, number)
        assert server.process.wait(TIMEOUT_SECONDS) == 0
        text = server.log.read_text()
    assert f"{number.name}: the server stops" in text and "starting another" not in text
    assert not alive(pids) and not names_of(pids)


def test_the_end_of_a_terminal_ends_its_server(repository, compiled_zoo):
    ours, theirs = os.openpty()
    command = [*GANGWAY, "serve", repository, f"--cache-dir={compiled_zoo.cache_dir}", "--no-profile"]
    command += [f"--{name}-{what}" for name in ("grpc", "http", "metrics") for what in ("address=127.0.0.1", "port=0")]
    prefix = ["setsid", "--ctty"]  # a session of its own, which the terminal controls
    with subprocess.Popen([*prefix, *command], stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        text = ""
        while "ready: gRPC" not in text:
            text += os.read(ours, 4096).decode()
        pids = descendants_of(process.pid)
        os.close(ours)
        assert process.wait(TIMEOUT_SECONDS) == 0
    until(lambda: not alive(pids))


def test_nohup_keeps_a_server(repository, compiled_zoo):
    with live_server(repository, [f"--cache-dir={compiled_zoo.cache_dir}"], prefix=["nohup"]) as server:
        server.process.send_signal(signal.SIGHUP)
        with triton.InferenceServerClient(server.url) as client:
            assert (client.infer("simple", simple_inputs()).as_numpy("OUTPUT0") == 2).all()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(TIMEOUT_SECONDS) == 0
        assert "SIGHUP" not in server.log.read_text()


def test_workers_that_have_only_begun_hear_of_the_end(repository, compiled_zoo):
    """They drop what was meant for a predecessor."""
    with started(repository, compiled_zoo.cache_dir) as process:
        server = LiveServer("", process, Path(), 0)
        until(lambda: len(server.pids()["worker"]) == len(available_cores()))
        pids = server.pids()["worker"]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        process.terminate()
        until(lambda: not server.pids()["scheduler"])
        begin = time.monotonic()
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
        process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0
    assert time.monotonic() - begin < EXIT_GRACE_SECONDS, "they were killed"


def mapped(pid):
    """The files that a process has mapped."""
    try:
        return Path(f"/proc/{pid}/maps").read_text()
    except OSError:  # it has just ended
        return ""


def test_requests_that_take_too_long_do_not_hold_up_the_exit(large_model, compiled_zoo):
    example = example_of("resnet50", compiled_zoo.onnx_file("resnet50"))
    flags = [f"--cache-dir={compiled_zoo.cache_dir}", "--exit-timeout-secs=0.01"]
    with (
        live_server(large_model, flags) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        with stopped_workers(server):
            answers = sent(client, example, 8)
            until(lambda: server.busy_slots() == 8)
            server.process.send_signal(signal.SIGINT)  # the same as SIGTERM
            until(lambda: "requests unfinished" in server.log.read_text())
        assert server.process.wait(TIMEOUT_SECONDS) == 0
        assert {answer.result(TIMEOUT_SECONDS).status() for answer in answers} == {"StatusCode.UNAVAILABLE"}


def test_a_killed_supervisor_takes_everything_with_it(repository, compiled_zoo):
    flags = [f"--cache-dir={compiled_zoo.cache_dir}"]
    with live_server(repository, flags) as server:
        pids = all_pids(server)
        assert len(pids) == 3 + len(server.pids()["worker"])
        server.process.kill()
        server.process.wait(TIMEOUT_SECONDS)
        until(lambda: not alive(pids))
    assert not names_of(pids)
    with live_server(repository, flags) as server:
        assert triton.InferenceServerClient(server.url).is_model_ready("mlp")
