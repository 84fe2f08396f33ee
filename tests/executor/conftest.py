"""An executor of two workers that runs the tiny model."""

import contextlib
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gangway.executor.cores import available_cores
from gangway.executor.leases import LeaseSpec, Member
from gangway.executor.local import LocalExecutor
from gangway.executor.slots import SlotRequest

from tests.tiny_model import TinyModel, make_artifact

HEAP = 1 << 16


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
        """Start a query on lease 0; return slot and sequence. `changes` are of the lease or its member."""
        self.executor.io.view[HEAP + 4096 : 2 * HEAP] = bytes(HEAP - 4096)
        slot, sequence = self.executor.begin(SlotRequest(1, rows, (HEAP,), (HEAP + 4096,)))
        own = {name: changes.pop(name) for name in Member._fields if name in changes}
        member = Member(0, slot, sequence, rows=rows)._replace(**own)
        spec = self.spec((member,), wanted=wanted or max(1, len(workers)))
        self.executor.start(0, spec._replace(**changes), workers)
        return slot, sequence

    def spec(self, members: tuple[Member, ...], wanted: int = 1, stride: int = 64) -> LeaseSpec:
        """The lease of these members over all layers."""
        return LeaseSpec(1, members, 0, stride, 0, self.model.layers, wanted=wanted)

    def counters(self, rows: int = 1) -> set[int]:
        """Distinct values of all counters: {1} when every task was executed exactly once."""
        count = rows * self.model.layers * self.model.tasks
        return set(struct.unpack_from(f"<{count}i", self.executor.io.view, HEAP + 4096))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_artifact(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def artifact_maker() -> Callable[..., TinyModel]:
    """Return `make_artifact`."""
    return make_artifact


@pytest.fixture
def make_harness(tmp_path: Path) -> Iterator[Callable[..., Harness]]:
    """Return a function that starts two workers with a model of the given layers."""
    with contextlib.ExitStack() as stack:

        def make(**model: Any) -> Harness:
            cores = available_cores()
            executor = stack.enter_context(LocalExecutor(tmp_path, [cores[0], cores[-1]]))
            harness = Harness(executor, make_artifact(tmp_path, **model))
            harness.orders()
            return harness

        yield make


@pytest.fixture
def harness(tiny_model: TinyModel) -> Iterator[Harness]:
    """Two workers that have loaded the tiny model."""
    cores = available_cores()
    with LocalExecutor(tiny_model.cache_dir, [cores[0], cores[-1]]) as executor:
        made = Harness(executor, tiny_model)
        made.orders()
        yield made
