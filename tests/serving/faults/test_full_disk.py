"""A server whose files are on a full disk serves on; each file is whole, and grows again when there is room."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gangway.clients.inputs import infer_request
from testing.live_server import LiveServer, live_server
from testing.load import raw_channel, raw_infer
from testing.waiting import until
from tests.conftest import CompiledZoo
from tests.helpers.whole_server import small_repository

pytestmark = pytest.mark.long

DISK = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=16m none "$0" && exec "$@"')
VALUES = np.ones((1, 16), np.int32)
REQUEST = infer_request("simple", "", dict.fromkeys(("INPUT0", "INPUT1"), ("INT32", VALUES))).SerializeToString()
FILES = {"--log-file": "log", "--trace-decisions": "decisions", "--timeline": "timeline"}


@pytest.fixture
def served(compiled_zoo: CompiledZoo, tmp_path: Path) -> Iterator[tuple[LiveServer, Path]]:
    """A server, and the small disk that only it sees, by a path that leads there."""
    disk = tmp_path / "disk"
    disk.mkdir()
    prefix = [*DISK, str(disk)]
    if subprocess.run([*prefix, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    repository = small_repository(tmp_path / "models", compiled_zoo, "simple")
    flags = [f"--cache-dir={compiled_zoo.cache_dir}", f"--trace-config=triton,file={disk}/trace"]
    flags += ["--trace-config=level=TIMESTAMPS", "--trace-config=rate=1", "--log-verbose=1"]
    flags += [f"{flag}={disk}/{name}" for flag, name in FILES.items()]
    with live_server(repository, flags, prefix=prefix) as server:
        yield server, Path(f"/proc/{server.process.pid}/root{disk}")


def said(server: LiveServer, disk: Path) -> str:
    """The log, and those of its lines that found no space."""
    return (disk / "log").read_text() + server.log.read_text()


def traces(disk: Path) -> int:
    """How many requests have been traced; the file is whole whenever nobody writes it."""
    return len({entry["id"] for entry in json.loads((disk / "trace").read_text())})


def test_all_files_are_whole_when_the_disk_is_full(served: tuple[LiveServer, Path]) -> None:
    server, disk = served
    with raw_channel(server.url) as channel:
        infer = raw_infer(channel)

        def ask() -> None:
            for _ in range(50):
                assert infer(REQUEST, timeout=20)

        ask()
        until(lambda: (disk / "trace").exists() and traces(disk) == 50)
        with (disk / "fill").open("wb", buffering=0) as fill:
            for size_bytes in (1 << 20, 4096, 1):
                with pytest.raises(OSError, match="No space left"):
                    while True:
                        fill.write(bytes(size_bytes))
        until(lambda: ask() or "traces are lost from now on" in said(server, disk))
        before = traces(disk)
        for line in (disk / "decisions").read_text().splitlines():
            json.loads(line)
        assert (disk / "log").read_bytes().endswith(b"\n")
        (disk / "fill").unlink()
        until(lambda: ask() or traces(disk) > before)
        until(lambda: "the trace file is written again" in said(server, disk))
        assert said(server, disk).count("traces are lost from now on") == 1
