"""`gangway client MODEL --snippet`: what it prints works as pasted."""

import subprocess
import sys
from pathlib import Path

import pytest

from testing.live_server import LiveServer
from testing.repository import GANGWAY


@pytest.mark.parametrize("model", ["mlp", "simple", "mobilenetv2"])
def test_snippets_work(gangway_server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    def printed(kind: str) -> "subprocess.CompletedProcess[str]":
        command = [*GANGWAY, "client", model, "--url", gangway_server.url, "--snippet", kind]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    (tmp_path / "program.py").write_text(printed("python").stdout)
    ran = subprocess.run(
        [sys.executable, tmp_path / "program.py"], capture_output=True, text=True, timeout=60, check=True
    )
    assert ran.stdout
    command = printed("curl")
    if model == "mobilenetv2":
        assert (command.returncode, command.stdout) == (1, "")
        assert "the values of this model are too many for a snippet" in command.stderr
    else:
        curl = command.stdout.partition("curl ")[2]
        at_server = f"curl --fail --silent {curl}".replace("127.0.0.1:8000", gangway_server.http_url)
        monkeypatch.setenv("GANGWAY_HTTP_PORT", gangway_server.http_url.rpartition(":")[2])
        named = printed("curl")
        assert (named.stdout, named.stderr) == (command.stdout.replace("127.0.0.1:8000", gangway_server.http_url), "")
        assert (
            '"outputs"'
            in subprocess.run(at_server, shell=True, capture_output=True, text=True, timeout=60, check=True).stdout
        )
