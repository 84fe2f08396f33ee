"""What a Python model starts ends with its instance, however both end, and the model answers again at once."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import requests
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from testing.live_server import LiveServer, live_server
from testing.processes import children_of, descendants_of
from testing.waiting import until
from tests.helpers.python_models import ADD, HEAD, TEXTS, config_of, executes, four, write
from tests.helpers.served import TIMEOUT_S, Served, serving
from tests.helpers.whole_server import alive

pytestmark = pytest.mark.long

AGAIN_S = 3  # an instance starts within a second; others use the machine, too

# Each has a process of its own write its number, and sleep, as an expression for the model to execute.
NOTE = "open(folder + '/' + str(os.getpid()), 'w').close()"
SLEEP = "import time; time.sleep(600)"
SHELL = "['sh', '-c', 'touch {0}/$$; trap \"\" TERM; sleep 600'.format(folder)]"
WAYS = {
    "fork": f"pid = os.fork()\nif pid == 0:\n    {NOTE}\n    {SLEEP}",
    "fork that ignores signals": (
        f"if os.fork() == 0:\n    import signal\n    signal.signal(15, signal.SIG_IGN)\n    {NOTE}\n    {SLEEP}"
    ),
    "double fork": (
        f"if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        {NOTE}\n        {SLEEP}\n    os._exit(0)"
    ),
    "multiprocessing, fork": "import multiprocessing as m\nkept.append(m.get_context('fork').Process(target=rest))"
    "\nkept[-1].start()",
    "multiprocessing, pool": "import multiprocessing as m\nkept.append(m.get_context('fork').Pool(2, rest))",
    "subprocess": f"import subprocess\nkept.append(subprocess.Popen({SHELL}))",
    "session": f"import subprocess\nkept.append(subprocess.Popen({SHELL}, start_new_session=True, close_fds=False))",
    "no environment": f"import subprocess\nkept.append(subprocess.Popen({SHELL}, env={{'PATH': os.environ['PATH']}}))",
}
BODY = executes('"folder": FOLDER, "os": os, "kept": kept, "rest": rest')


def model(folder: Path) -> str:
    return f"""
import os
import time
import numpy as np
import triton_python_backend_utils as pb_utils

FOLDER, kept = {str(folder)!r}, []


def rest(*_):
    open(FOLDER + "/" + str(os.getpid()), "w").close()
    time.sleep(600)


"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes of the model note their numbers."""
    return tmp_path_factory.mktemp("started")


@pytest.fixture(scope="module")
def repository(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    repository = tmp_path_factory.mktemp("repository")
    write(repository, "starter", BODY, config_of(*TEXTS), head=model(folder))
    return repository


@pytest.fixture(scope="module")
def served(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(repository, "--model-control-mode=explicit", "--load-model=*") as served:
        yield served


@pytest.fixture(autouse=True)
def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def start(served: Served, folder: Path, way: str) -> list[int]:
    """Have the model start something; return the processes."""
    answers(served)
    served.executed("starter", WAYS[way])
    until(lambda: list(folder.iterdir()))
    started = [int(path.name) for path in folder.iterdir()]
    assert alive(started)
    return started


def answers(served: Served) -> None:
    """Return when the model answers: as soon as an instance can."""
    begin = time.monotonic()
    while True:
        try:
            assert served.executed("starter", "found = 5") == "5"
        except InferenceServerException as error:
            assert "is started again" in str(error) or "was lost" in str(error), error
            assert time.monotonic() - begin < AGAIN_S, error
        else:
            break
        time.sleep(0.02)


def instance(served: Served) -> int:
    return int(served.executed("starter", "found = os.getpid()"))


@pytest.mark.parametrize("way", WAYS)
def test_what_an_instance_has_started_ends_with_it(served: Served, folder: Path, way: str) -> None:
    pid = instance(served)
    started = start(served, folder, way)
    os.kill(pid, signal.SIGKILL)
    answers(served)
    until(lambda: not alive(started))
    assert instance(served) != pid


@pytest.mark.parametrize("way", ["fork that ignores signals", "double fork", "session"])
def test_what_an_instance_has_started_ends_with_its_keeper(served: Served, folder: Path, way: str) -> None:
    pid = instance(served)
    started = start(served, folder, way)
    os.kill(parent_of(pid), signal.SIGKILL)
    until(lambda: not alive([pid, *started]))
    answers(served)
    until(lambda: not alive(started))


def test_an_unloaded_model_leaves_no_process(served: Served, folder: Path) -> None:
    started = [instance(served)]
    for way in WAYS:
        started += start(served, folder, way)
    served.client.unload_model("starter")
    until(lambda: not alive(started))
    served.client.load_model("starter")
    answers(served)


def test_models_can_end_what_they_have_started(served: Served, folder: Path) -> None:
    """The signals that an instance does not end by are its children's own matter."""
    start(served, folder, "multiprocessing, fork")
    code = "kept[-1].terminate(); kept[-1].join(5); found = kept[-1].exitcode"
    assert served.executed("starter", code) == f"-{signal.SIGTERM:d}"
    code = "import subprocess; p = subprocess.Popen(['sleep', '60']); p.terminate(); found = p.wait(5)"
    assert served.executed("starter", code) == f"-{signal.SIGTERM:d}"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_outlives_the_server(repository: Path, folder: Path, tmp_path: Path, number: signal.Signals) -> None:
    with live_server(repository, [f"--cache-dir={tmp_path}"]) as server:
        with triton.InferenceServerClient(server.url) as client:
            served = Served(server, client, repository)
            started = [pid for way in WAYS for pid in start(served, folder, way)]
        started += descendants_of(server.process.pid)
        server.process.send_signal(number)
        server.process.wait(TIMEOUT_S)
        until(lambda: not alive(started))


def test_processes_that_are_not_of_models_stay(repository: Path, folder: Path, tmp_path: Path) -> None:
    """Whoever starts the server by `exec` may have started others before, and these leave others to the server."""
    gate, late = tmp_path / "gate", tmp_path / "late"
    gate.mkdir()
    script = f"""
        sh -c 'while [ -e {gate} ]; do sleep 0.05; done; sleep 600 & echo $! > {late}' &
        exec "$0" "$@"
    """
    with live_server(repository, [f"--cache-dir={tmp_path / 'cache'}"], prefix=["sh", "-c", script]) as server:
        gate.rmdir()
        until(lambda: late.exists() and late.read_text())
        other = int(late.read_text())
        until(lambda: parent_of(other) == server.process.pid)
        with triton.InferenceServerClient(server.url) as client:
            served = Served(server, client, repository)
            started = start(served, folder, "session")
            os.kill(parent_of(instance(served)), signal.SIGKILL)
            until(lambda: not alive(started))
            answers(served)
        assert alive([other])
        os.kill(other, signal.SIGKILL)
        until(lambda: other not in children_of(server.process.pid))


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


WAITING = """
    def initialize(self, args):
        while os.path.exists(GATE):
            time.sleep(0.01)
"""
STEPS = """
platform: "ensemble"
input { name: "x" data_type: TYPE_FP32 dims: [4] }
output { name: "y" data_type: TYPE_FP32 dims: [4] }
ensemble_scheduling { step { model_name: "waiting" model_version: -1
  input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }
"""


def test_a_model_without_an_instance_is_not_ready(tmp_path: Path) -> None:
    gate, repository = tmp_path / "gate", tmp_path / "repository"
    head = f"import os, time\n{HEAD}GATE = {str(gate)!r}\n\n"
    write(repository, "waiting", WAITING + ADD, head=head)
    write(repository, "other")
    (repository / "whole" / "1").mkdir(parents=True)
    (repository / "whole" / "config.pbtxt").write_text(STEPS)
    flags = [f"--cache-dir={tmp_path / 'cache'}"]
    with live_server(repository, flags) as server, triton.InferenceServerClient(server.url) as client:
        served = Served(server, client, repository)
        assert states(client, server) == {"other": True, "waiting": True, "whole": True}
        for names in (("waiting", "whole"), ("waiting",)):
            gate.mkdir()
            (pid,) = served.instances("waiting")
            os.kill(pid, signal.SIGKILL)
            until(lambda: states(client, server) == {"other": True, "waiting": False, "whole": False})
            assert not client.is_server_ready()
            assert requests.get(f"http://{server.http_url}/v2/health/ready", timeout=TIMEOUT_S).status_code != 200
            for name in names:
                with pytest.raises(InferenceServerException, match=r"UNAVAILABLE.*is started again"):
                    served.infer(name, x=four(1))
            assert np.array_equal(served.infer("other", x=four(1))["y"], four(2))
            gate.rmdir()
            until(lambda: states(client, server) == {"other": True, "waiting": True, "whole": True})
            assert client.is_server_ready()
            for name in names:
                assert np.array_equal(served.infer(name, x=four(1))["y"], four(2))


def states(client: triton.InferenceServerClient, server: LiveServer) -> dict[str, bool]:
    """Which models are ready: the index, gRPC and HTTP say the same."""
    index = {model.name: model.state == "READY" for model in client.get_model_repository_index().models}
    url = f"http://{server.http_url}/v2/models"
    over_http = {name: requests.get(f"{url}/{name}/ready", timeout=TIMEOUT_S).status_code == 200 for name in index}
    over_grpc = {name: client.is_model_ready(name) for name in index}
    return index if index == over_http == over_grpc else {}
