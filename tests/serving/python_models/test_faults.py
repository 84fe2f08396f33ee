"""What a Python model does wrong costs its own requests only: exceptions, crashes, loops, leaks, killed processes."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from gangway.python_backend.messages import PREFIX
from testing.live_server import live_server
from testing.processes import descendants_of
from testing.waiting import until
from tests.helpers import adder_models
from tests.helpers.own_time import within
from tests.helpers.python_models import ADD, HEAD, config_of, four, parameter, write
from tests.helpers.served import TIMEOUT_S, Array, Served, inputs_of, serving
from tests.helpers.whole_server import alive

pytestmark = pytest.mark.long

# What x[0] asks for. Python's own names of errors are in the messages.
FAULTY = """
    def initialize(self, args):
        self.left = []

    def execute(self, requests):
        import ctypes, os, time
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            kind = int(x[0])
            if kind == 1:
                raise KeyError("no such thing")
            if kind == 2:
                os._exit(7)
            if kind == 3:
                ctypes.string_at(1)
            if kind == 4:
                while True:
                    pass
            if kind == 5:
                while True:
                    self.left.append(np.ones(1 << 20))
            if kind == 6:
                error = pb_utils.TritonError("not found", pb_utils.TritonError.NOT_FOUND)
                responses.append(pb_utils.InferenceResponse(error=error))
                continue
            if kind == 10:
                return []
            if kind == 11:
                responses.append("no response")
                continue
            if kind == 12:
                time.sleep(float(x[1]))
            if kind == 13:
                raise pb_utils.TritonModelException("x" * 100_000)
            if kind == 16:
                np.ones(1 << 40)
            if kind == 15:
                import sys
                os.write(int(sys.orig_argv[-5]), JUNK[int(x[1])])
            if kind == 14:
                import sys
                sys.exit(5)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x + np.float32(1))]))
        return responses

    def finalize(self):
        print("finalized well")
"""
JUNK = (
    b"\xff" * 64,
    *(
        PREFIX.pack(len(text), 0) + text
        for text in (
            b"no json",
            b"[]",
            b"[" * 50_000,
            b"{}",
            b'{"config": "{}"}',
            b'{"ready": 1}',
            b'{"error": "x"}',
            b'{"release": 5}',
            b'{"release": ["metric", []]}',
            b'{"control": 1}',
            b'{"control": [], "call": 1}',
            b'{"control": "load model", "call": {}, "name": "two", "message": 1e400}',
            b'{"call": 1}',
            b'{"call": [], "family": 5}',
            b'{"call": 1, "family": [[], {}, []]}',
            b'{"call": 1, "metric": [[], {}, []]}',
        )
    ),
)
LIMITS = parameter("gangway_python_timeout_s", 1.5) + "\n" + parameter("gangway_python_memory_mib", 600)


def asks(kind: int, more: float = 0) -> Array:
    return np.array([kind, more, 0, 0], np.float32)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("repository")
    write(repository, "faulty", FAULTY, config_of(more=LIMITS), head=f"{HEAD}JUNK = {JUNK!r}\n\n")
    write(
        repository,
        "batched",
        FAULTY.replace("x[0]", "x[0, 0]").replace("x[1]", "x[0, 1]"),
        config_of(batch=8, more="dynamic_batching { }\n" + LIMITS),
    )
    write(repository, "other")
    adder_models.write(repository, "two", 2)
    with serving(repository, "--model-control-mode=explicit", "--load-model=*", cwd=repository.parent) as served:
        yield served


@pytest.fixture
def others(served: Served) -> Iterator[None]:
    """Nobody else notices: the server's processes and the other models' instances stay, and requests are answered."""
    before = served.server.pids(), served.instances("other")
    stop, failures, answers = threading.Event(), [], []

    def ask() -> None:
        with triton.InferenceServerClient(served.server.url) as client:
            while not stop.is_set():
                for name, number in (("other", 1), ("two", 2)):
                    try:
                        x = four(3) if name == "other" else four(3)[None]
                        y = client.infer(name, inputs_of({"x": x}), client_timeout=TIMEOUT_S).as_numpy("y")
                        answers.append(np.array_equal(y.ravel(), four(3 + number)))
                    except InferenceServerException as error:
                        failures.append(error)
                time.sleep(0.01)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    assert not failures
    assert answers
    assert all(answers)
    assert (served.server.pids(), served.instances("other")) == before


def works_again(served: Served, name: str = "faulty") -> None:
    """A model answers, after its instance was started again."""

    def answered() -> bool:
        try:
            return bool(
                np.array_equal(
                    served.infer(name, x=asks(0)[None] if name == "batched" else asks(0))["y"].ravel(), asks(0) + 1
                )
            )
        except InferenceServerException as error:
            assert "is started again" in str(error), error  # UNAVAILABLE until then
            return False

    until(answered)


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize(
    ("kind", "status", "message"),
    [
        (1, "INTERNAL", "instance 'faulty_0', message: KeyError: 'no such thing'"),
        (6, "NOT_FOUND", "not found"),
        (10, "INTERNAL", r"InferenceRequest\(s\) size is:1, and InferenceResponse\(s\) size is:0"),
        (11, "INTERNAL", "expected an InferenceResponse, got str"),
        (13, "INTERNAL", "xxxxxx"),
        (14, "INTERNAL", "instance 'faulty_0', message: SystemExit: 5"),
        (16, "INTERNAL", r"Unable to allocate 8.00 TiB .*600 MiB of data; .*gangway_python_memory_mib"),
    ],
)
def test_an_exception_is_its_requests_alone(served: Served, kind: int, status: str, message: str) -> None:
    before = served.instances("faulty")
    with pytest.raises(InferenceServerException, match=f"(?s){status}.*{message}"):
        served.infer("faulty", x=asks(kind))
    assert np.array_equal(served.infer("faulty", x=asks(0))["y"], asks(0) + 1)
    assert served.instances("faulty") == before


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize("kind", [2, 3])
def test_a_crash_ends_its_instance_alone(served: Served, kind: int) -> None:
    works_again(served)
    (before,) = served.instances("faulty")
    with pytest.raises(InferenceServerException, match=r"UNAVAILABLE.*an instance of model 'faulty' was lost"):
        served.infer("faulty", x=asks(kind))
    works_again(served)
    assert served.instances("faulty") != [before]
    assert not alive([before])


@pytest.mark.usefixtures("others")
def test_junk_for_the_supervisor_is_no_harm_to_others(served: Served) -> None:
    for number in range(len(JUNK)):
        works_again(served)
        with suppress(InferenceServerException):
            served.infer("faulty", x=asks(15, number))
    works_again(served)


@pytest.mark.usefixtures("others")
def test_a_loop_is_ended(served: Served) -> None:
    works_again(served)
    begin = time.monotonic()
    with pytest.raises(InferenceServerException, match=r"did not end within 1.5 s and was ended"):
        served.infer("faulty", x=asks(4))
    assert 1.4 < time.monotonic() - begin < 1.5 + 5
    works_again(served)


@pytest.mark.usefixtures("others")
def test_the_client_of_a_loop_gets_its_answer_in_time(served: Served) -> None:
    works_again(served)
    with within(1.4), pytest.raises(InferenceServerException, match=r"(?i)deadline"):
        served.infer("faulty", timeout_s=0.3, x=asks(4))
    works_again(served)


@pytest.mark.usefixtures("others")
def test_a_leak_is_bounded(served: Served) -> None:
    """Python raises MemoryError at the limit of the instance's data."""
    works_again(served)
    with pytest.raises(InferenceServerException, match=r"MemoryError|Unable to allocate|was lost"):
        served.infer("faulty", x=asks(5))
    for pid in served.instances("faulty"):
        os.kill(pid, signal.SIGKILL)  # what it holds stays its own until then
    until(lambda: served.instances("faulty"))
    works_again(served)


@pytest.mark.usefixtures("others")
def test_a_killed_instance_is_replaced(served: Served) -> None:
    works_again(served)
    for begun in (False, True):
        (pid,) = served.instances("faulty")
        if begun:
            answer = threading.Timer(0.3, os.kill, (pid, signal.SIGKILL))
            answer.start()
            with pytest.raises(InferenceServerException, match=r"UNAVAILABLE.*its process has ended"):
                served.infer("faulty", x=asks(12, 1.2))
        else:
            os.kill(pid, signal.SIGKILL)
        works_again(served)
        assert served.instances("faulty") != [pid]
        for _ in range(20):  # of which each worker has some
            served.infer("faulty", x=asks(0))


def test_a_killed_worker_costs_a_retry_or_an_error_only(served: Served) -> None:
    """The instance goes on; its next requests come from the worker's successor."""
    works_again(served)
    instances = served.instances("faulty")
    workers = served.server.pids()["worker"]
    timer = threading.Timer(0.2, lambda: [os.kill(pid, signal.SIGKILL) for pid in workers])
    timer.start()
    assert np.array_equal(served.infer("faulty", x=asks(12, 0.6))["y"][1:], (asks(12, 0.6) + 1)[1:])
    works_again(served)
    assert served.instances("faulty") == instances


def test_one_of_a_batch_fails_alone_if_its_response_says_so(served: Served) -> None:
    works_again(served, "batched")
    results: list[str] = []

    def ask(kind: int) -> None:
        try:
            served.infer("batched", x=asks(kind)[None])
            results.append("answered")
        except InferenceServerException as error:
            results.append(str(error))

    threads = [threading.Thread(target=ask, args=(kind,)) for kind in (12, 0, 6, 0, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results.count("answered") == 3
    assert sum("not found" in text for text in results) == 2


def test_unload_while_it_runs(served: Served) -> None:
    works_again(served)
    answers: list[Array] = []
    thread = threading.Thread(target=lambda: answers.append(served.infer("faulty", x=asks(12, 0.8))["y"]))
    thread.start()
    time.sleep(0.2)
    (pid,) = served.instances("faulty")
    served.client.unload_model("faulty")
    thread.join()
    assert np.array_equal(answers[0][1:], (asks(12, 0.8) + 1)[1:])
    until(lambda: not alive([pid]))
    until(lambda: "finalized well" in served.log())
    with pytest.raises(InferenceServerException, match=r"not found|no available versions|not at ready"):
        served.infer("faulty", x=asks(0))
    served.client.load_model("faulty")
    works_again(served)


def test_a_model_is_loaded_again_with_other_code(served: Served) -> None:
    folder = write(served.repository, "changing")
    served.client.load_model("changing")
    (before,) = served.instances("changing")
    assert np.array_equal(served.infer("changing", x=four(1))["y"], four(2))
    write(served.repository, "changing", ADD.replace("np.float32(1)", "np.float32(5)"))
    served.client.load_model("changing")
    assert np.array_equal(served.infer("changing", x=four(1))["y"], four(6))
    until(lambda: not alive([before]))
    write(served.repository, "changing", "    def execute(self, requests) oops\n")
    with pytest.raises(InferenceServerException, match="SyntaxError"):
        served.client.load_model("changing")
    assert np.array_equal(served.infer("changing", x=four(1))["y"], four(6)), "what was served stays"
    assert folder.is_dir()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_server(tmp_path: Path, number: signal.Signals) -> None:
    write(tmp_path / "repository", "faulty", FAULTY)
    with live_server(tmp_path / "repository", [f"--cache-dir={tmp_path / 'cache'}"]) as server:
        pids = descendants_of(server.process.pid)
        server.process.send_signal(number)
        server.process.wait(TIMEOUT_S)
        until(lambda: not alive(pids))


def test_hostile_bytes_and_strangers_at_the_socket_of_an_instance(served: Served) -> None:
    """Bytes that are no message cost their connection; another user gets nothing."""
    works_again(served)
    (instance,) = served.instances("faulty")
    names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines() if "@gangway-" in line]
    addresses = {f"\0{name[1:]}" for name in names if f"-{served.server.process.pid}-" in name}
    assert addresses
    prefix = PREFIX.pack(10, 0)
    hostile = (b"x" * 100, prefix + b"[" * 10, PREFIX.pack(1 << 60, 0), prefix + b'{"run": 1}', prefix[:5])
    hostile += tuple(
        PREFIX.pack(len(text), 0) + text
        for text in (
            b'{"run": [{}], "memory_bytes": 4096, "core": 0}',
            b'{"attach": 9, "request": 1}',
            b'{"result": 3}',
        )
    )
    for address in addresses:
        for content in hostile:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(address)
                connection.sendall(content)
                connection.shutdown(socket.SHUT_WR)
                connection.settimeout(TIMEOUT_S)
                with suppress(ConnectionResetError):
                    while connection.recv(1 << 16):
                        pass
        if os.geteuid() == 0:
            told = subprocess.run([sys.executable, "-c", STRANGER, address[1:]], check=True, capture_output=True)
            assert told.stdout == b"0"
    works_again(served)
    assert served.instances("faulty") == [instance]


STRANGER = """
import os, socket, sys
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as connection:
    connection.connect("\\0" + sys.argv[1])
    try:
        print(len(connection.recv(100)), end="")
    except ConnectionError:
        print(0, end="")
"""
