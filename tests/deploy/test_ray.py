"""Servers on Ray as deploy/ray starts them: called directly and by a router, killed, placed, and ended.

`make ray-test` runs this; it takes Ray (testing/fetch/ray.py) and HAProxy.
"""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton

from gangway.zoo import write_model
from testing.fetch.haproxy import missing_haproxy
from testing.fetch.ray import missing_ray
from testing.live_router import LiveRouter, live_router
from testing.live_server import is_ready
from testing.on_ray import OnRay, on_ray
from testing.processes import descendants_of
from testing.repository import GANGWAY
from testing.waiting import until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(missing_ray()), reason=missing_ray()),
    pytest.mark.skipif(bool(missing_haproxy()), reason=missing_haproxy()),
]

PLACED_WITHIN_S = 60
VALUES = np.arange(16, dtype=np.int32)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    write_model(folder / "models", "simple")
    return folder


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[OnRay]:
    with on_ray(folder / "models", folder / "ray.log", ["--replicas=2"]) as running:
        yield running


@pytest.fixture(scope="module")
def router(folder: Path, servers: OnRay) -> Iterator[LiveRouter]:
    with live_router(folder, servers.flags) as running:
        yield running


@pytest.fixture(scope="module")
def _placed(folder: Path, servers: OnRay, router: LiveRouter) -> Iterator[None]:
    """`gangway place` as the control plane: it loads what is loaded nowhere."""
    command = [*GANGWAY, "place", *servers.flags, "--model=*", f"--route={router.folder}", "--every=2"]
    with (folder / "place.log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as place:
        yield
        place.send_signal(signal.SIGINT)


def infer(url: str) -> np.ndarray:
    inputs = [triton.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
    for tensor in inputs:
        tensor.set_data_from_numpy(VALUES)
    with triton.InferenceServerClient(url) as client:
        return client.infer("simple", inputs, client_timeout=20).as_numpy("OUTPUT0")


def wait_until_answered(url: str, what: str) -> None:
    def answers():
        try:
            return (infer(url) == 2 * VALUES).all()
        except triton.InferenceServerException:
            return False

    until(answers, lambda: what, PLACED_WITHIN_S)


def test_the_end_leaves_no_process(folder, tmp_path):
    """First, because the servers of the other tests take both places of the machine."""
    with on_ray(folder / "models", tmp_path / "ray.log") as running:
        (server,) = running.servers()
        below = descendants_of(running.process.pid)
        assert server in below
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in below), timeout_s=PLACED_WITHIN_S)
    assert running.process.returncode == 0


@pytest.mark.usefixtures("_placed")
def test_clients_call_around_ray_what_place_has_loaded(servers, router):
    assert len(servers.urls) == len(set(servers.urls)) == len(servers.servers()) == 2
    wait_until_answered(router.url, "nobody loads the model")
    assert all(map(is_ready, servers.urls))


@pytest.mark.usefixtures("_placed")
def test_a_killed_server_is_started_again_at_its_address(servers, router):
    wait_until_answered(router.url, "nobody loads the model")
    before = set(servers.servers())
    killed = min(before)
    for pid in (*descendants_of(killed), killed):
        os.kill(pid, signal.SIGKILL)
    until(lambda: all(map(is_ready, servers.urls)), lambda: "Ray does not start it again", PLACED_WITHIN_S)
    assert len(set(servers.servers()) - before) == 1
    wait_until_answered(router.url, "nobody loads the model again")
