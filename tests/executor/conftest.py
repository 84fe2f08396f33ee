"""An executor of two workers that runs the tiny model."""

import contextlib
import functools
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gangway.executor.launch import available_cores
from gangway.executor.leases import LeaseSpec, Member
from gangway.executor.slots import SlotRequest
from gangway.measure.model_runner import LocalExecutor
from tests.helpers.tiny_model import TinyModel, make_artifact

HEAP = 1 << 16
SETTLE_S = 1.0  # for a rank to leave a lease that is aborted


class Harness:
    """Runs queries of the tiny model as model 1 in slot after slot; io: input at HEAP, output 4 KiB later."""

    def __init__(self, executor: LocalExecutor, model: TinyModel) -> None:
        self.executor = executor
        self.model = model
        executor.load(1, model.key)

    def orders(self, task_ns: int = 0, hang: int = 0, crash: int = 0, layer: int = 0) -> None:
        for row in range(32):
            struct.pack_into("<4i", self.executor.io.view, HEAP + row * 64, task_ns, hang, crash, layer)

    def start(self, workers: list[int], rows: int = 1, wanted: int | None = None, **changes: object) -> tuple[int, int]:
        """Start a query on lease 0; return slot and generation. `changes` are of the lease or its member."""
        self.executor.io.view[HEAP + 4096 : 2 * HEAP] = bytes(HEAP - 4096)
        slot, generation = self.executor.begin(SlotRequest(1, rows, (HEAP,), (HEAP + 4096,)))
        own = {name: changes.pop(name) for name in Member._fields if name in changes}
        member = Member(0, slot, generation, rows=rows)._replace(**own)
        spec = self.spec((member,), wanted=wanted or max(1, len(workers)))
        self.executor.start(0, spec._replace(**changes), workers)
        return slot, generation

    def spec(self, members: tuple[Member, ...], wanted: int = 1, stride: int = 64) -> LeaseSpec:
        """The lease of these members over all layers."""
        return LeaseSpec(1, members, 0, stride, 0, self.model.layers, wanted=wanted)

    def counters(self, rows: int = 1) -> set[int]:
        """Distinct values of all counters: {1} when every task was executed exactly once."""
        count = rows * self.model.layers * self.model.tasks
        return set(struct.unpack_from(f"<{count}i", self.executor.io.view, HEAP + 4096))


@pytest.fixture(scope="session")
def programmes(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where programmes under sanitizers are kept: in pytest's cache, if there is one."""
    cache = getattr(pytestconfig, "cache", None)  # absent with -p no:cacheprovider
    return cache.mkdir("gangway-sanitized") if cache else tmp_path_factory.mktemp("programmes")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_artifact(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def artifact_maker() -> Callable[..., TinyModel]:
    """Return `make_artifact`."""
    return make_artifact


def two_workers(cache_dir: Path) -> LocalExecutor:
    """Workers on the first and the last core, which are the same on a machine of one."""
    cores = available_cores()
    return LocalExecutor(cache_dir, [cores[0], cores[-1]])


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def shared_workers(cache_dir: Path) -> Iterator[LocalExecutor]:
    """Two workers for all tests of a file: starting them takes longer than most tests."""
    with two_workers(cache_dir) as executor:
        yield executor


@pytest.fixture
def executor(shared_workers: LocalExecutor) -> Iterator[LocalExecutor]:
    """The two workers; afterwards they are as they were before."""
    yield shared_workers
    settle(shared_workers)


@pytest.fixture
def make_harness(executor: LocalExecutor, cache_dir: Path) -> Callable[..., Harness]:
    """Return a function that gives two workers a model of the given layers."""

    def make(**model: Any) -> Harness:
        harness = Harness(executor, artifact(cache_dir, **model))
        harness.orders()
        return harness

    return make


@functools.cache
def artifact(cache_dir: Path, **model: Any) -> TinyModel:
    """The model, which is written when a test wants it first."""
    return make_artifact(cache_dir, **model)


def settle(executor: LocalExecutor) -> None:
    """Leave nothing of a test in memory that workers share, and replace workers that it has left dead or busy."""
    executor.io.punch(HEAP, executor.io.size_bytes - HEAP)  # no task hangs any more
    executor.arena.punch(0, executor.arena.size_bytes)
    for index in range(len(executor.leases)):
        executor.leases[index].abort()
    deadline = time.monotonic() + SETTLE_S
    for worker, process in enumerate(executor.workers):
        while process.poll() is None and not executor.control.quiet(worker) and time.monotonic() < deadline:
            time.sleep(0.0005)
        is_idle = process.poll() is None and executor.control.quiet(worker)
        with contextlib.suppress(TimeoutError):
            while True:
                executor.receive(worker, timeout_s=0)
        if not is_idle:
            executor.restart(worker)
    executor.slots.init()


@pytest.fixture
def harness(make_harness: Callable[..., Harness]) -> Harness:
    """Two workers that have loaded the tiny model."""
    return make_harness()
