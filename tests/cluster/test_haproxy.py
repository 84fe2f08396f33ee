"""A real HAProxy without servers: started, replaced and ended at once."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gangway.cluster.haproxy import STOP_TIMEOUT_S, Haproxy, RouterError, command
from gangway.cluster.haproxy_config import RouteOptions, configuration, maps
from gangway.cluster.server_address import parse_server
from testing.fetch.haproxy import missing_haproxy, with_haproxy
from testing.live_server import reserved_port
from testing.processes import children_of
from testing.waiting import until
from tests.helpers.whole_server import alive

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(missing_haproxy()), reason=missing_haproxy())]

ROUNDS = 8  # the moment at which HAProxy's master loses a signal is short


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RouteOptions:
    """The configuration of a router whose only server does not answer, written where it says."""
    monkeypatch.setenv("PATH", with_haproxy()["PATH"])
    with reserved_port() as grpc_port, reserved_port() as http_port, reserved_port() as nobody:
        options = RouteOptions(tmp_path, "127.0.0.1", grpc_port, http_port)
        server = parse_server(f"away=127.0.0.1:{nobody},{nobody}")
    for protocol, text in maps(["mlp"]).items():
        options.map(protocol).write_text(text)
    options.config.write_text(configuration(["mlp"], [server], options))
    return options


@pytest.mark.parametrize("reloads", [0, 1, 3])
def test_it_ends_as_soon_as_it_answers(options: RouteOptions, reloads: int) -> None:
    before = set(children_of(os.getpid()))
    for _ in range(ROUNDS):
        haproxy = Haproxy(options.config)
        while not answers(options):
            haproxy.look()
        for _ in range(reloads):
            haproxy.reload()
        begin = time.monotonic()
        haproxy.stop()
        assert time.monotonic() - begin < STOP_TIMEOUT_S / 3
        assert not alive(set(children_of(os.getpid())) - before)


ROUTER = """import pathlib, sys
from gangway.cluster.haproxy import Haproxy

haproxy = Haproxy(pathlib.Path(sys.argv[1]))
for _ in range(int(sys.argv[2])):
    haproxy.reload()
print(flush=True)
input()
"""


@pytest.mark.parametrize("reloads", [0, 2])
def test_none_outlives_a_router_that_is_killed(options: RouteOptions, reloads: int) -> None:
    command_line = [sys.executable, "-c", ROUTER, str(options.config), str(reloads)]
    with subprocess.Popen(command_line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as router:
        assert router.stdout is not None and router.stdout.readline()
        haproxies = children_of(router.pid)
        assert haproxies
        router.kill()
        until(lambda: not alive(haproxies))


def test_what_cannot_listen_says_so_at_once(options: RouteOptions) -> None:
    elsewhere(options)
    with pytest.raises(RouterError, match="cannot bind"):
        Haproxy(options.config)


def test_a_configuration_that_cannot_listen_leaves_the_former_one(options: RouteOptions) -> None:
    good = options.config.read_text()
    haproxy = Haproxy(options.config)
    try:
        elsewhere(options)
        with pytest.raises(RouterError, match="cannot bind"):
            haproxy.reload()
        haproxy.look()
        with socket.create_connection(("127.0.0.1", options.http_port)):
            assert answers(options)
        options.config.write_text(good)
        haproxy.reload()
    finally:
        haproxy.stop()


def elsewhere(options: RouteOptions) -> None:
    """Configure addresses that this machine does not have: those for documentation."""
    options.config.write_text(options.config.read_text().replace("bind 127.0.0.1:", "bind 192.0.2.1:"))


def answers(options: RouteOptions) -> bool:
    """Whether a process takes commands."""
    try:
        return "Pid:" in command(options.socket, "show info")
    except RouterError:
        return False
