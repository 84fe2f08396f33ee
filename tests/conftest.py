"""Fixtures of all rooms: a repository with the zoo's models and a cache that holds them compiled."""

import fcntl
import gc
import hashlib
import importlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

# A bound on the time of one example measures the machine, which other tests use, too.
hypothesis.settings.register_profile("tests", deadline=None)
hypothesis.settings.load_profile("tests")

# Tests of this process are of the sources as they are. Servers that tests start run compiled, as those of users do.
os.environ["GANGWAY_INTERPRETED"] = "1"
importlib.import_module("gangway.scheduler")
del os.environ["GANGWAY_INTERPRETED"]

from testing.live_server import LiveServer, live_server
from testing.processes import shm_names

# The suite starts hundreds of Python processes. Where Python is told to keep no bytecode, each would compile all of our
# modules again, a third of what the start of a server costs, and pytest would rewrite every test.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


if TYPE_CHECKING:
    from gangway.compiler.pipeline import CompileResult

CompileKept = Callable[..., "CompileResult"]
LONG_FIRST = (
    "docs", "measure", "wire", "serving", "compiler", "scheduler", "benchmarks", "executor", "packaging", "simulator",
    "clients", "zoo", "server",
)  # fmt: skip


LONG_FILE = re.compile(r"^pytestmark = \[?pytest\.mark\.long\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no file of which nothing would run: all its tests are `long`."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    is_left_out = is_test and "not long" in config.option.markexpr
    return True if is_left_out and LONG_FILE.search(collection_path.read_text()) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the rooms whose files take long, so that the processes of a run end at about the same time."""
    items.sort(key=_order)


def pytest_collection_finish() -> None:
    """Leave what lives until the end, thousands of tests and of functions, out of what the collector walks through."""
    gc.freeze()


def _order(item: pytest.Item) -> int:
    room = item.path.relative_to(Path(__file__).parent).parts[0]
    return LONG_FIRST.index(room) if room in LONG_FIRST else len(LONG_FIRST)


class _Faults(logging.Handler):
    """Keeps what event loops say of exceptions in their callbacks, which reach nobody else."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(f"{record.getMessage()} {record.exc_info[1]!r}" if record.exc_info else record.getMessage())


@pytest.fixture(autouse=True)
def log_of_each_test() -> Iterator[None]:
    """A log level that a test sets is none for the next one: lines would lack, or take most of its time.

    No event loop of this process may have had an exception that nobody expected.
    """
    faults = _Faults()
    logging.getLogger("asyncio").addHandler(faults)
    yield
    logging.getLogger("asyncio").removeHandler(faults)
    logging.getLogger().setLevel(logging.WARNING)
    assert not faults.said


@dataclass(frozen=True)
class CompiledZoo:
    """`gangway serve --model-repository repository --cache-dir cache_dir` finds everything compiled."""

    repository: Path
    cache_dir: Path

    def onnx_file(self, name: str) -> Path:
        """The model's ONNX file."""
        return self.repository / name / "1" / "model.onnx"

    def link(self, repository: Path, name: str, model: str, config: str) -> None:
        """Have a model in another repository, under another configuration."""
        (repository / name).mkdir(parents=True)
        (repository / name / "1").symlink_to(self.repository / model / "1")
        (repository / name / "config.pbtxt").write_text(config)

    def linked_cache(self, folder: Path) -> Path:
        """Make of a folder a cache that holds the same; a test can have more in it."""
        for name in os.listdir(self.repository):
            link = folder / self.artifact(name).name
            if not link.is_symlink():
                link.symlink_to(self.artifact(name))
        return folder

    def artifact(self, name: str) -> Path:
        """The folder of the compiled model."""
        from gangway.compiler.key import model_key
        from gangway.compiler.target import detect

        return self.cache_dir / model_key(self.onnx_file(name), detect())


def kept_folder(config: pytest.Config, others: pytest.TempPathFactory, name: str, version: str) -> Path:
    """A folder in pytest's cache that later runs find as it is, until its version is another one."""
    cache = getattr(config, "cache", None)  # absent with -p no:cacheprovider
    root: Path = cache.mkdir(f"gangway-{name}") if cache else others.mktemp(name)
    kept = root / version
    kept.mkdir(mode=0o755, exist_ok=True)
    for folder in root.iterdir():
        if folder != kept:
            shutil.rmtree(folder, ignore_errors=True)
    return kept


@pytest.fixture(scope="session")
def compiled_zoo(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> CompiledZoo:
    """The zoo's models, read-only, and the cache of all that tests compile which are not about compilation."""
    from gangway.artifact.cache import Cache
    from gangway.compiler.key import compiler_version
    from gangway.compiler.pipeline import compile_model
    from gangway.compiler.target import detect
    from gangway.zoo import DEFAULT_NAMES, write_model
    from gangway.zoo import __file__ as zoo_file

    source = hashlib.sha256()
    for path in sorted(Path(zoo_file).parent.glob("*.py")):
        source.update(path.read_bytes())
    written = kept_folder(pytestconfig, tmp_path_factory, "zoo", source.hexdigest()[:12])
    zoo = CompiledZoo(written / "models", kept_folder(pytestconfig, tmp_path_factory, "models", compiler_version()))
    with (written / "lock").open("w") as lock:  # of the processes of a test run
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not zoo.repository.exists():
            unfinished = written / "unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)  # of a run that was killed
            for name in DEFAULT_NAMES:
                write_model(unfinished, name)
            unfinished.rename(zoo.repository)
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    own = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    first = len(DEFAULT_NAMES) * own // processes
    for name in DEFAULT_NAMES[first:] + DEFAULT_NAMES[:first]:  # each process compiles its part, then finds the rest
        compile_model(zoo.onnx_file(name), name, Cache(zoo.cache_dir), detect(), lambda phase, done, total: None)
    return zoo


@pytest.fixture(scope="session")
def model_cache(compiled_zoo: CompiledZoo) -> Path:
    """The zoo's cache, for those that need no model of the zoo."""
    return compiled_zoo.cache_dir


@pytest.fixture(scope="session")
def compile_kept(model_cache: Path) -> CompileKept:
    """Return the function that compiles a model for a cache of a test's own: a copy of what `model_cache` keeps.

    It takes the path, a name, the folder of that cache, and options of `compile_model`.
    """
    from gangway.artifact.cache import Cache
    from gangway.compiler.arguments import CompileOptions
    from gangway.compiler.pipeline import compile_model
    from gangway.compiler.target import detect

    def compile_kept(path: Path, name: str, cache_dir: Path, **options: Any) -> "CompileResult":
        compiled = compile_model(path, name, Cache(model_cache), detect(), lambda *_: None, CompileOptions(**options))
        own = cache_dir / compiled.folder.name
        if not own.exists():  # of an equal model
            shutil.copytree(compiled.folder, own)
        return replace(compiled, folder=own)

    return compile_kept


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
