"""Loads and unloads of models: arenas, the jobs of workers, and the answers to the supervisor.

A worker that cannot load a model that others serve tries again; the others serve on meanwhile. A model that has ended a
worker may have one query under way for a minute, so that other models keep a worker. A model that ends more of them is
taken out of service, and the supervisor decides when it comes back.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gangway.artifact.precision import BF16
from gangway.artifact.profile import ProfileError, read_profile
from gangway.base.backoff import Backoff
from gangway.base.peer import Peer
from gangway.executor.messages import Unload
from gangway.executor.slots import SlotStatus
from gangway.scheduler import messages
from gangway.scheduler.apply import Execution
from gangway.scheduler.models import Model, ModelState
from gangway.scheduler.policy import Query
from gangway.scheduler.state import SchedulerState

MOST_CRASHES: Final = 5  # of workers by one model within the window; more take it out of service
CRASH_WINDOW_SECONDS: Final = 60.0
FIRST_PAUSE_SECONDS: Final = 0.5  # between a worker's attempts to load a model
LONGEST_PAUSE_SECONDS: Final = 30.0
_log = logging.getLogger(__name__)


@dataclass
class _Retry:
    """A worker's attempts to load a model; `pid` is the worker's."""

    pid: int
    pauses: Backoff
    due_us: float


class ModelLifecycle:
    """Loads and unloads models. As many queries of one can run or be paused at a time as there are leases.

    `close` is called with a model's number before an unload, so that the fast path begins nothing of it any more.
    `limit_bytes`: that all models may hold, before those become idle that were asked longest ago; 0: any number.
    """

    def __init__(
        self,
        state: SchedulerState,
        supervisor: Peer[messages.ControlMessage],
        execution: Execution,
        close: Callable[[int], None] = lambda model_id: None,
        limit_bytes: int = 0,
    ) -> None:
        self._supervisor = supervisor
        self._models = state.models
        self._workers = state.workers
        self._arenas = state.arenas
        self._requests = state.requests
        self._execution = execution
        self._leases = len(state.control.leases)
        self._close = close
        self._limit_bytes = limit_bytes
        self._retries: dict[tuple[int, int], _Retry] = {}  # by worker and model
        self._crashes: dict[int, deque[float]] = {}  # when, by model

    def load(self, spec: messages.LoadModel) -> None:
        """Reserve arenas and let every worker load the model."""
        try:
            self._arenas.add_model(spec.model_id, spec.arena_bytes, spec.max_rows, self._leases)
        except MemoryError as error:
            self._supervisor.send(messages.ModelFailed(spec.model_id, str(error)))
            self._supervisor.send(messages.ModelUnloaded(spec.model_id))  # nothing of it is there
            return
        self._workers.order_all(self._models.add(spec).load)
        self._keep_to_limit()

    def use_profile(self, model_id: int, path: Path) -> None:
        """Show policies a measured profile. One that cannot be read is named in the log."""
        try:
            self._models.use_profile(model_id, read_profile(path))
            self._execution.times.errors.forget(model_id)
        except ProfileError as error:
            _log.warning("a model's profile is not used, so estimates are: %s", error)

    def loaded(self, core: int, model_id: int, ok: bool, error: str) -> None:
        """Note that a worker has loaded the model, or why it has not."""
        self._workers.answer(core, model_id, has_model=ok)
        model = self._models.get(model_id)
        if model is None or model.state is ModelState.UNLOADING:
            self.finish_unloads()
        elif not ok:
            reason = f"worker {core} cannot load the compiled model; its log line says why, it begins: {error}"
            if model.state is ModelState.SERVING and self._workers.any_has(model_id):
                self._supervisor.send(messages.ArtifactLost(model_id, reason))
                self._retry_later(core, model_id)
            else:
                self._fail(model_id, reason)
        else:
            self._retries.pop((core, model_id), None)
            self._serve_if_complete(model)

    def worker_missing(self) -> None:
        """Serve models that wait only for a worker which is not waited for any more."""
        for model in self._models.in_state(ModelState.LOADING):
            self._serve_if_complete(model)

    def retry_loads(self, now_us: float) -> None:
        """Have workers try again what they could not load, and forget old crashes."""
        for model_id, crashes in list(self._crashes.items()):
            if crashes[-1] < now_us / 1e6 - CRASH_WINDOW_SECONDS:
                del self._crashes[model_id]
                if (model := self._models.get(model_id)) is not None:
                    self._models.restrict(model, alone=False)
        for key, retry in list(self._retries.items()):
            worker, model = self._workers[key[0]], self._models.get(key[1])
            if model is None or model.state is not ModelState.SERVING or worker.pid != retry.pid:
                del self._retries[key]  # a successor gets all models anyway
            elif now_us >= retry.due_us:
                retry.due_us = math.inf
                self._workers.order(worker, model.load)

    def crashed(self, model_id: int) -> None:
        """Note that a worker ended by what it loaded or executed of this model."""
        model = self._models.get(model_id)
        if model is None or model.state is ModelState.UNLOADING:
            return
        now = time.monotonic()
        crashes = self._crashes.setdefault(model_id, deque())
        crashes.append(now)
        while crashes[0] < now - CRASH_WINDOW_SECONDS:
            crashes.popleft()
        if model.state is ModelState.LOADING:
            self._fail(model_id, "a worker process ended while it loaded the compiled model", at_fault=True)
        elif len(crashes) > MOST_CRASHES:
            reason = f"its requests ended {len(crashes)} worker processes within {CRASH_WINDOW_SECONDS:.0f} seconds"
            self._fail(model_id, reason, at_fault=True)
        elif len(crashes) == 1:
            self._models.restrict(model, alone=True)

    def rest_idle(self, now_us: float) -> None:
        """Have workers give back the memory of models that nobody has asked for long, and of others above the limit."""
        in_use: set[int] | None = None
        for model in self._models.in_state(ModelState.SERVING):
            idle_us = model.spec.idle_unload_s * 1e6
            if idle_us and now_us - self._used_us(model) >= idle_us:
                in_use = self._in_use() if in_use is None else in_use
                self._rest(model, in_use)
        self._keep_to_limit()

    def asked(self, model: Model, now_us: float) -> None:
        """Note that a request has come; an idle model is loaded for it."""
        model.asked_us = now_us
        if model.state is ModelState.IDLE:
            for each in self._models.with_precisions(model.spec.model_id):
                self._models.wake(each)
                self._workers.order_all(each.load)
            self._keep_to_limit()

    def _keep_to_limit(self) -> None:
        """Have workers give back the memory of those models first that were asked longest ago.

        Models that are in use stay, so what is loaded may be above the limit for as long.
        """
        if not self._limit_bytes or self._loaded_bytes() <= self._limit_bytes:
            return
        in_use = self._in_use()
        for model in sorted(self._models.in_state(ModelState.SERVING), key=self._used_us):
            if model.spec.loaded_bytes:
                self._rest(model, in_use)
                if self._loaded_bytes() <= self._limit_bytes:
                    return

    def _loaded_bytes(self) -> int:
        loaded = (*self._models.in_state(ModelState.SERVING), *self._models.in_state(ModelState.LOADING))
        return sum({model.spec.weights_key: model.spec.loaded_bytes for model in loaded}.values())

    def _used_us(self, model: Model) -> float:
        """Return when a request for a model has come or run, the last time."""
        return max(model.asked_us, self._models.ran_us(model.spec.model_id))

    def _rest(self, model: Model, in_use: Collection[int]) -> None:
        """Let a model become idle, unless it is in use, or cannot be asked by itself."""
        model_id = model.spec.model_id
        if model.spec.fp32_id >= 0 or model_id in in_use or self._models.limits.is_held(model_id):
            return
        artifacts = self._models.with_precisions(model_id)
        if all(each.state is ModelState.SERVING for each in artifacts):
            self._close(model_id)
            for each in artifacts:
                self._models.rest(each)
                self._workers.serve(each.spec.model_id, False)
                self._workers.order_all(Unload(each.spec.model_id))
            self._supervisor.send(messages.ModelIdle(model_id))

    def _in_use(self) -> set[int]:
        """Return the models of which queries wait or are under way."""
        waiting = {query.model_id for query in self._requests.queries.in_order}
        return waiting.union(gang.unit.query.model_id for gang in self._execution.gangs.all())

    def unload(self, model_id: int, refusal: SlotStatus = SlotStatus.UNAVAILABLE) -> None:
        """Answer what waits for the model; forget it when its last gang has ended and no worker has it.

        `refusal`: the answer, also to requests that are on their way.
        """
        model = self._models.get(model_id)
        if model is None:  # a predecessor began with that: a worker may not have heard of it
            self._workers.order_all(Unload(model_id))
            self._supervisor.send(messages.ModelUnloaded(model_id))
        elif model.state is not ModelState.UNLOADING:
            self._models.begin_unload(model)
            model.refusal = refusal
            self._close(model_id)
            self._workers.serve(model_id, False)
            for unit in [unit for unit in self._requests.waiting if _needs(unit.query, model.spec)]:
                # The end of a request that has several units takes out others of these, too.
                for request in self._requests.of(unit) if unit in self._requests.waiting else ():
                    self._execution.drop(request, refusal)
            self._workers.order_all(Unload(model_id))  # a worker in a gang takes it afterwards
            self.finish_unloads()

    def unloaded(self, core: int, model_id: int) -> None:
        """Note that a worker has forgotten the model."""
        self._workers.answer(core, model_id, has_model=False)
        self.finish_unloads()

    def finish_unloads(self) -> None:
        """Give back the memory of models that nobody uses any more."""
        for model in self._models.in_state(ModelState.UNLOADING):
            model_id = model.spec.model_id
            in_use = any(gang.artifact_id == model_id for gang in self._execution.gangs.all())
            if not in_use and self._workers.none_has(model_id):
                self._arenas.remove_model(model_id)
                self._models.remove(model)
                self._crashes.pop(model_id, None)
                self._execution.times.errors.forget(model_id)
                self._supervisor.send(messages.ModelUnloaded(model_id))

    def _serve_if_complete(self, model: Model) -> None:
        model_id = model.spec.model_id
        if model.state is ModelState.LOADING and self._workers.all_have(model_id):
            model.asked_us = time.monotonic_ns() / 1e3
            self._models.serve(model)
            self._workers.serve(model_id, True)
            self._supervisor.send(messages.ModelLoaded(model_id))

    def _fail(self, model_id: int, reason: str, at_fault: bool = False) -> None:
        self._supervisor.send(messages.ModelFailed(model_id, reason, at_fault))
        self.unload(model_id, SlotStatus.CRASHED if at_fault else SlotStatus.UNAVAILABLE)

    def _retry_later(self, core: int, model_id: int) -> None:
        key, pid = (core, model_id), self._workers[core].pid
        if key not in self._retries or self._retries[key].pid != pid:
            self._retries[key] = _Retry(pid, Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, math.inf), 0.0)
        retry = self._retries[key]
        retry.due_us = time.monotonic_ns() / 1e3 + retry.pauses.failed() * 1e6


def _needs(query: Query, spec: messages.LoadModel) -> bool:
    """Whether a query cannot go on without an artifact. One whose precision is to be chosen needs only that in fp32."""
    return query.model_id == spec.model_id or (query.model_id == spec.fp32_id and query.precision == BF16)
