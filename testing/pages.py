"""Follows a page of the documents as a reader would: writes its files, starts its servers, runs its commands.

A comment in front of a block says what becomes of it: `<!-- file NAME -->`, `<!-- run -->`, `<!-- serve -->`. What
stands behind a colon must be in the output of the command. Blocks without such a comment are not executed.
"""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from testing.live_server import free_port

COMMENT = r"^<!-- (file|run|serve)(?: ([^:\n]+?))?(?:: ([^\n]+?))? -->\n"
BLOCK = re.compile(COMMENT + r"```\w*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PORTS = {"http": "8000", "grpc": "8001", "metrics": "8002"}
LOAD = ("--seconds 10", "--seconds 2")  # of the page, of the test
START_SECONDS = 240
COMMAND_SECONDS = 120


class Block(NamedTuple):
    """A block of a page that is executed: what to do with it, the name of the file, and what the output must have."""

    action: str
    name: str
    expected: str
    text: str


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page that are executed, in order."""
    for match in BLOCK.finditer(page.read_text()):
        yield Block(match[1], match[2] or "", match[3] or "", match[4])


class PageReader:
    """Follows a page in a folder of its own, at free ports and with less load than the page has."""

    def __init__(self, folder: Path, cache: Path, packages: str = "") -> None:
        """Read in this folder. `cache`: of compiled models. `packages`: a folder that Python's path begins with."""
        self._folder = folder
        self._ports: Mapping[str, int] = {name: free_port() for name in PORTS}
        self._server: subprocess.Popen[bytes] | None = None
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path, "XDG_CACHE_HOME": str(cache)}
        if packages:
            self._environment["PYTHONPATH"] = packages

    def follow(self, block: Block) -> None:
        """Do what a block says. Raises AssertionError where the page is wrong."""
        text = block.text.replace(*LOAD)
        for name, port in PORTS.items():
            text = text.replace(f"localhost:{port}", f"localhost:{self._ports[name]}")
        match block.action:
            case "file":
                path = self._folder / block.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
            case "run":
                self._run(text, block.expected)
            case "serve":
                self.close()
                self._serve(text)

    def close(self) -> None:
        """Stop the server as Ctrl-C does."""
        if self._server is not None:
            self._server.send_signal(signal.SIGINT)
            assert self._server.wait(30) == 0
            self._server = None

    def _run(self, command: str, expected: str) -> None:
        ran = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self._folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        assert ran.returncode == 0, f"{command}\n{ran.stdout}"
        assert expected in ran.stdout, f"{command}\n{ran.stdout}"

    def _serve(self, command: str) -> None:
        flags = " ".join(f"--{name}-port={port}" for name, port in self._ports.items())
        flags += " --no-profile"  # it would take a minute in the background
        log = self._folder / "server.log"
        with log.open("wb") as file:
            self._server = subprocess.Popen(
                ["bash", "-c", f"exec {command.strip()} {flags}"],
                cwd=self._folder,
                env=self._environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        end = time.monotonic() + START_SECONDS
        while not self._is_ready():
            assert self._server.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://localhost:{self._ports['http']}/v2/health/ready", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False
