"""The start of a server that compiles, as those see it who watch: HTTP, `gangway top`, the page in a real browser."""

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from testing.live_server import reserved_port
from testing.repository import GANGWAY
from testing.waiting import until
from tests.helpers import onnx_text
from tests.helpers.browser import CHROMIUM, browser
from tests.helpers.http_requests import ask_http
from tests.helpers.python_models import ADD, write
from tests.helpers.whole_server import TIMEOUT_SECONDS, started

pytestmark = pytest.mark.long

CONVOLUTIONS = 80
HANGS = """
    def initialize(self, args):
        import os, time
        while os.path.exists("{gate}"):
            time.sleep(0.01)
"""


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    (tmp_path / "gate").touch()
    return tmp_path / "gate"


@pytest.fixture
def url(tmp_path: Path, gate: Path) -> Iterator[str]:
    """Of a server with two models that no cache has, and one that is not ready while the gate is there."""
    for name, channels in {"a": 3, "b": 4}.items():
        shapes = {f"w{number}": (channels + number + 1, channels + number, 3, 3) for number in range(CONVOLUTIONS)}
        last = channels + CONVOLUTIONS
        nodes = onnx_text.convolutions(CONVOLUTIONS)
        graph = f"(float[N, {channels}, 9, 9] x) => (float[N, {last}, 9, 9] t) {{ {nodes} }}"
        onnx_text.save(tmp_path / "models", name, graph, **onnx_text.weights_of(channels, shapes))
    write(tmp_path / "models", "hangs", HANGS.format(gate=gate) + ADD)
    with reserved_port() as port:
        flags = ["--grpc-port=0", "--model-load-thread-count=1", f"--http-port={port}"]
        with started(tmp_path / "models", tmp_path / "cache", *flags):
            until(lambda: accepts(port))
            yield f"127.0.0.1:{port}"


def accepts(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def start_of(url: str) -> Any:
    return ask_http(url, "GET", "/v2/gangway/state").content["start"]


def test_a_start_is_seen_before_the_server_is_ready(url: str, gate: Path, tmp_path: Path) -> None:
    assert ask_http(url, "GET", "/v2/health/live").status == 200
    seen = [start_of(url)]
    while seen[-1]["models_done"] < 2:
        seen.append(start_of(url))
    assert ask_http(url, "GET", "/v2/health/ready").status == 400
    assert {each["models"] for each in seen} == {3}
    assert [each["models_done"] for each in seen] == sorted(each["models_done"] for each in seen)
    assert seen[0]["left_s"] is None
    counted = [each for each in seen if each["kernels"] > 1]
    assert counted and all(each["kernels_done"] <= each["kernels"] for each in counted)
    assert any(f"; kernels {each['kernels_done']} of {each['kernels']}; some " in each["text"] for each in counted)

    command = [*GANGWAY, "top", url, "--once"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    assert "\nstarting: 2 of 3 models" in shown.stdout
    if CHROMIUM.exists():
        with browser(tmp_path / "profile") as page:
            page.open(f"http://{url}/")
            assert page.until("document.getElementById('start').innerText").startswith("The server starts: 2 of 3")
            gate.unlink()
            page.until("document.getElementById('start').hidden")
            assert not page.faults
    gate.unlink(missing_ok=True)
    until(lambda: ask_http(url, "GET", "/v2/health/ready").status == 200)
    assert start_of(url) is None
