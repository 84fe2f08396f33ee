"""A whole `gangway serve` for tests of its start and its end: it need not become ready, and nothing of it may stay."""

import shutil
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from testing.live_server import LiveServer
from testing.processes import shm_names
from testing.repository import GANGWAY
from tests.conftest import CompiledZoo

TIMEOUT_SECONDS = 60


def small_repository(folder: Path, zoo: CompiledZoo, *names: str) -> Path:
    """These models of the zoo; without names two small ones."""
    for name in names or ("mlp", "simple"):
        shutil.copytree(zoo.repository / name, folder / name)
    return folder


@contextmanager
def started(repository: Path, cache_dir: Path, *flags: str) -> Iterator["subprocess.Popen[str]"]:
    """A server that need not become ready; output goes to a pipe."""
    command = [*GANGWAY, "serve", f"--model-repository={repository}", f"--cache-dir={cache_dir}", "--no-profile"]
    command += ("--metrics-port=0", "--http-address=127.0.0.1", "--http-port=0")
    command += flags or ("--grpc-address=127.0.0.1", "--grpc-port=0")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def alive(pids: Iterable[int]) -> list[int]:
    """Those of the processes that still run."""
    return [pid for pid in pids if Path(f"/proc/{pid}/exe").exists() and not _is_zombie(pid)]


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def names_of(pids: Iterable[int]) -> list[str]:
    """What these processes have left in /dev/shm."""
    ours = tuple(f"gangway.{pid}." for pid in pids)
    return [name for name in shm_names() if name.startswith(ours)]


def all_pids(server: LiveServer) -> list[int]:
    return [pid for same in server.pids().values() for pid in same]
