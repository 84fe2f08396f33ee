"""What the scheduler says of itself for metrics: put into its status block from time to time, not with every event."""

from gangway.executor.control import ControlSegment
from gangway.executor.status_blocks import ModelAccount, SchedulerStatus
from gangway.scheduler.apply import Execution
from gangway.scheduler.arenas import ArenaPool
from gangway.scheduler.counters import CounterBook, Counters
from gangway.scheduler.models import ModelTable
from gangway.scheduler.requests import RequestBook

PERIOD_US = 500e3
_NOTHING = Counters()


class StatusWriter:
    """Writes the block of the control segment (`executor/status_blocks.py`)."""

    def __init__(
        self,
        control: ControlSegment,
        requests: RequestBook,
        execution: Execution,
        models: ModelTable,
        arenas: ArenaPool,
        counters: CounterBook,
    ) -> None:
        self._block = control.scheduler_block
        self._leases = len(control.leases)
        self._requests = requests
        self._execution = execution
        self._models = models
        self._arenas = arenas
        self._counters = counters
        self._next_us = 0.0

    def write(self, now_us: float) -> None:
        """Write how things are, unless that was done less than a period ago."""
        if now_us < self._next_us:
            return
        self._next_us = now_us + PERIOD_US
        self._block.write(
            SchedulerStatus(
                waiting=len(self._requests.queries),
                leases=self._leases - self._execution.gangs.free,
                arena_bytes=self._arenas.committed_bytes,
                level=self._execution.times.interference.level(now_us),
                models={spec.model_id: self._account(spec.model_id, spec.name) for spec in self._models.specs()},
            )
        )

    def _account(self, model_id: int, name: str) -> ModelAccount:
        counters = self._counters.models.get(name, _NOTHING)
        arenas = self._arenas.usage(model_id)
        return ModelAccount(
            growths=counters.grown,
            shrinks=counters.shrunk,
            layers=counters.layers,
            version_layers=counters.versions,
            arenas=arenas.in_use,
            arena_bytes=arenas.size_bytes,
        )
