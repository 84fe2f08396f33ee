"""Fixtures of all rooms: a repository with the zoo's models and a cache that holds them compiled."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks.live_server import LiveServer, live_server
from benchmarks.processes import shm_names


@dataclass(frozen=True)
class CompiledZoo:
    """`gangway serve --model-repository repository --cache-dir cache_dir` finds everything compiled."""

    repository: Path
    cache_dir: Path

    def onnx_file(self, name: str) -> Path:
        """The model's ONNX file."""
        return self.repository / name / "1" / "model.onnx"

    def artifact(self, name: str) -> Path:
        """The folder of the compiled model."""
        from gangway.compiler.key import model_key
        from gangway.compiler.target import detect

        return self.cache_dir / model_key(self.onnx_file(name), detect())


@pytest.fixture(scope="session")
def compiled_zoo(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> CompiledZoo:
    """The zoo's models, written and compiled; read-only. They stay in pytest's cache, keyed by contents."""
    from gangway.artifact.cache import Cache
    from gangway.compiler.pipeline import compile_model
    from gangway.compiler.target import detect
    from gangway.zoo import DEFAULT_NAMES, write_model
    from gangway.zoo import __file__ as zoo_file

    source = hashlib.sha256()
    for path in sorted(Path(zoo_file).parent.glob("*.py")):
        source.update(path.read_bytes())
    cache = getattr(pytestconfig, "cache", None)  # absent with -p no:cacheprovider
    root = cache.mkdir("gangway") if cache else tmp_path_factory.mktemp("gangway")
    repository = root / f"zoo-{source.hexdigest()[:12]}"
    if not repository.exists():
        unfinished = repository.with_name(f"{repository.name}.{os.getpid()}")
        for name in DEFAULT_NAMES:
            write_model(unfinished, name)
        with suppress(OSError):  # another test run was quicker
            unfinished.rename(repository)
    zoo = CompiledZoo(repository, root / "compiled")
    for name in DEFAULT_NAMES:
        compile_model(zoo.onnx_file(name), name, Cache(zoo.cache_dir), detect(), lambda phase, done, total: None)
    _drop_outdated(zoo)
    return zoo


def _drop_outdated(zoo: CompiledZoo) -> None:
    """Remove what former versions of zoo and compiler made: every change of their source gives new names."""
    for folder in zoo.repository.parent.glob("zoo-" + "?" * len(zoo.repository.name.removeprefix("zoo-"))):
        if folder != zoo.repository:
            shutil.rmtree(folder, ignore_errors=True)
    current = {zoo.artifact(path.name) for path in zoo.repository.iterdir()}
    for folder in zoo.cache_dir.glob("?" * 64):
        if folder not in current:
            shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def gangway_server(compiled_zoo: CompiledZoo) -> Iterator[LiveServer]:
    """`gangway serve` with the whole zoo, for tests that only ask it something. It must end well and leave nothing."""
    with live_server(compiled_zoo.repository, [f"--cache-dir={compiled_zoo.cache_dir}"]) as server:
        yield server
        pids = [pid for same in server.pids().values() for pid in same]
    assert server.process.returncode == 0
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    ours = tuple(f"gangway.{pid}." for pid in pids)  # other processes of the machine may have names there
    assert [name for name in shm_names() if name.startswith(ours)] == []
