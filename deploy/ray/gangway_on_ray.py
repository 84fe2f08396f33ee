"""Keep one `gangway serve` per replica of a Ray Serve deployment. Clients call the servers, or `gangway route`.

    python gangway_on_ray.py /models --replicas 2 --cores 8

It prints the servers as flags of `gangway route` and `gangway place`, and goes on until a signal ends it. Ray starts a
server again that ends. It needs `ray[serve]`; no call goes through Ray.
"""

# Ray is in an environment of its own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import argparse
import contextlib
import fcntl
import itertools
import os
import shlex
import signal
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from typing import IO

import ray
from ray import serve

GRPC_PORT, HTTP_PORT, METRICS_PORT = 8001, 8000, 8002
PORT_STEP = 10  # between servers of one machine
START_SECONDS = 60
STOP_SECONDS = 60
CHECK_SECONDS = 1.0


def _first_free_place() -> tuple[int, IO[str]]:
    """Return a number that no other server of this machine has, and the lock that keeps it until this process ends.

    Ray's own ranks do not serve: who replaces an ended server gets another rank, and routers would not find it.
    """
    for number in itertools.count():
        place = open(f"{tempfile.gettempdir()}/gangway-on-ray-{number}.lock", "w")  # noqa: SIM115
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return number, place
        place.close()
    raise AssertionError


@serve.deployment(health_check_period_s=CHECK_SECONDS, graceful_shutdown_timeout_s=STOP_SECONDS)
class GangwayServer:
    """A server on this machine, with cores and ports of its own."""

    def __init__(self, repository: str, cores: int, command: str) -> None:
        self.number, self.place = _first_free_place()
        ports = [port + PORT_STEP * self.number for port in (GRPC_PORT, HTTP_PORT, METRICS_PORT)]
        own = sorted(os.sched_getaffinity(0))[cores * self.number : cores * (self.number + 1)]
        if len(own) < cores:
            raise ValueError(f"server {self.number} of this machine wants {cores} cores, and {len(own)} are left")
        flags = [f"--cores={','.join(map(str, own))}", "--model-control-mode=explicit", "--exit-delay-secs=2"]
        flags += [f"--{name}-port={port}" for name, port in zip(("grpc", "http", "metrics"), ports, strict=True)]
        # The server must not outlive a replica that is killed: it would keep the ports of the next one.
        start = ["setpriv", "--pdeathsig=TERM", *shlex.split(command)]
        self.server = subprocess.Popen([*start, "serve", f"--model-repository={repository}", *flags])
        host = ray.util.get_node_ip_address()
        self.address = f"{host}-{self.number}={host}:{','.join(map(str, ports))}"
        self._wait_until_live(f"http://127.0.0.1:{ports[1]}/v2/health/live")

    def _wait_until_live(self, url: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            self.check_health()
            try:
                with urllib.request.urlopen(url, timeout=1):
                    return
            except (urllib.error.URLError, TimeoutError):
                time.sleep(0.1)
        raise RuntimeError(f"gangway serve does not answer within {START_SECONDS} s")

    def check_health(self) -> None:
        """Tell Ray that the server has ended: Ray makes a new replica."""
        if self.server.poll() is not None:
            self.place.close()  # for the next replica, which starts before this one ends
            raise RuntimeError(f"gangway serve ended with status {self.server.returncode}")

    def server_flag(self) -> str:
        """Return the server as `gangway route` and `gangway place` take it."""
        return f"--server={self.address}"

    def __del__(self) -> None:
        self.server.terminate()
        self.server.wait(STOP_SECONDS)


def start(repository: str, replicas: int, cores: int, command: str = "gangway") -> list[str]:
    """Run the deployment without Ray's proxy; return each server as a flag. Raises what a replica raised."""
    serve.start(proxy_location="Disabled")
    deployment = GangwayServer.options(num_replicas=replicas, ray_actor_options={"num_cpus": cores})
    servers = serve.run(deployment.bind(os.path.abspath(repository), cores, command), route_prefix=None)
    flags: set[str] = set()
    while len(flags) < replicas:  # Ray asks any replica
        flags.add(servers.server_flag.remote().result(timeout_s=START_SECONDS))
    return sorted(flags)


def main() -> None:
    """Start, print the flags, and stop with a signal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("repository")
    parser.add_argument("--replicas", type=int, default=1, metavar="N", help="servers (1)")
    parser.add_argument("--cores", type=int, default=1, metavar="N", help="cores of a server (1)")
    parser.add_argument("--command", default="gangway", help="how a server is started on its machine (gangway)")
    options = parser.parse_args()
    ray.init(log_to_driver=False)
    ended = threading.Event()
    try:
        print(*start(options.repository, options.replicas, options.cores, options.command), flush=True)
        # Handled, not blocked: what Ray starts would inherit that.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, lambda *_: ended.set())
        ended.wait()
    finally:
        serve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
