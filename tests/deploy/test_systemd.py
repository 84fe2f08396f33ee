"""The unit of systemd, and what a service manager is told of a server."""

import os
import shlex
import signal
import socket
import subprocess
from configparser import RawConfigParser
from pathlib import Path

import pytest

from gangway.base.process import FRONT_END_NICE
from gangway.base.service_manager import ServiceManager
from gangway.server.options.command_line import parse_options
from testing.live_server import live_server
from testing.waiting import until
from tests.helpers.whole_server import small_repository

UNIT = Path(__file__).parents[2] / "deploy" / "systemd" / "gangway.service"
SIGN = "WATCHDOG=1"
ANALYZE = Path("/usr/bin/systemd-analyze")


@pytest.fixture
def service():
    parser = RawConfigParser(strict=False)
    parser.optionxform = str
    parser.read(UNIT)
    return parser["Service"]


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path):
    """A manager's socket, and what NOTIFY_SOCKET says of it."""
    name = "@gangway-" + tmp_path.name + str(os.getpid()) if request.param == "abstract" else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as received:
        received.bind(name.replace("@", "\0"))
        yield received, name


def told(received):
    """The messages that have come, each as its lines."""
    messages = []
    while True:
        try:
            messages.append(received.recv(4096).decode().splitlines())
        except BlockingIOError:
            return messages


def test_the_unit_starts_the_server(service, tmp_path):
    program, command, *flags = shlex.split(service["ExecStart"].replace("/srv/models", str(tmp_path)))
    assert (Path(program).name, command) == ("gangway", "serve")
    options = parse_options([flag.replace("%C", str(tmp_path)) for flag in flags])
    assert options.general.cache_dir == tmp_path / service["CacheDirectory"]
    assert int(service["LimitNICE"]) == FRONT_END_NICE


@pytest.mark.skipif(not ANALYZE.exists(), reason="there is no systemd here whose tool could check the unit")
def test_systemd_understands_the_unit(tmp_path):
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/gangway/bin/gangway", "/bin/true"))
    done = subprocess.run([ANALYZE, "verify", unit], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_manager_is_told_of_a_servers_life(manager, tmp_path, compiled_zoo):
    """Ready when clients find it ready, alive while it is, stopping with the time that it needs."""
    received, name = manager
    repository = small_repository(tmp_path / "models", compiled_zoo)
    variables = ["env", f"NOTIFY_SOCKET={name}", "WATCHDOG_USEC=900000"]
    flags = [f"--cache-dir={compiled_zoo.cache_dir}", "--exit-timeout-secs=7"]
    with live_server(repository, flags, prefix=variables) as server:
        messages = []
        until(lambda: messages.extend(told(received)) or [SIGN in each for each in messages].count(True) > 3)
        until(lambda: messages.extend(told(received)) or any("READY=1" in each for each in messages))
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
    messages += told(received)
    assert [each for each in messages if "READY=1" in each] == [["READY=1", "STATUS=models ready: 2"]]
    (last,) = [each for each in messages if "STOPPING=1" in each]
    assert any(line.startswith("EXTEND_TIMEOUT_USEC=27") for line in last)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"NOTIFY_SOCKET": ""},
        {"NOTIFY_SOCKET": "vsock-stream:2:1"},
        {"NOTIFY_SOCKET": "/nowhere/notify", "WATCHDOG_USEC": "1"},
        {"NOTIFY_SOCKET": "/" + "long/" * 40, "WATCHDOG_USEC": "x"},
    ],
    ids=str,
)
def test_no_manager_is_no_trouble(variables):
    manager = ServiceManager(variables)
    manager.ready("well")
    manager.alive()
    assert not variables, "a child process would take the socket for its own"


def test_a_manager_that_reads_nothing_delays_nothing(manager):
    _, name = manager
    told_often = ServiceManager({"NOTIFY_SOCKET": name})
    for _ in range(2000):
        told_often.ready("well")


def test_a_manager_that_reads_late_hears_that_the_server_is_ready(manager):
    received, name = manager
    telling = ServiceManager({"NOTIFY_SOCKET": name})
    for number in range(2000):
        telling.starting(f"{number} of 2000 models")
    telling.ready("well")
    assert ["READY=1", "STATUS=well"] not in told(received), "its socket was full"
    for _ in range(3):
        telling.alive()
    assert told(received) == [["READY=1", "STATUS=well"]]


def test_another_process_gives_no_sign_of_life(manager):
    received, name = manager
    ServiceManager({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "3", "WATCHDOG_PID": "1"}).alive()
    assert told(received) == []
