"""`gangway client MODEL --snippet`: what it prints works as pasted."""

import subprocess
import sys
from pathlib import Path

import pytest

from testing.live_server import LiveServer
from testing.repository import GANGWAY


@pytest.mark.parametrize("model", ["mlp", "simple", "mobilenetv2"])
def test_snippets_work(gangway_server: LiveServer, tmp_path: Path, model: str) -> None:
    command = [*GANGWAY, "client", model, "--url", gangway_server.url, "--snippet"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    program, _, curl = printed.partition("\n\ncurl ")
    (tmp_path / "program.py").write_text(program)
    ran = subprocess.run(
        [sys.executable, tmp_path / "program.py"], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout
    assert bool(curl) == (model != "mobilenetv2")  # whose input no command line holds
    if curl:
        at_server = f"curl --fail --silent {curl}".replace("127.0.0.1:8000", gangway_server.http_url)
        assert (
            '"outputs"'
            in subprocess.run(at_server, shell=True, capture_output=True, text=True, timeout=60, check=True).stdout
        )
