"""Models from LoadModel to ModelUnloaded: arenas, the workers' jobs, and the answers to the supervisor."""

import logging
from collections.abc import Callable
from pathlib import Path

from gangway.artifact.profile import ProfileError, read_profile
from gangway.executor.messages import Unload
from gangway.executor.slots import SlotStatus
from gangway.scheduler import control as slow
from gangway.scheduler.apply import Execution
from gangway.scheduler.arenas import ArenaPool
from gangway.scheduler.models import ModelState, ModelTable
from gangway.scheduler.packets import PacketSocket
from gangway.scheduler.requests import RequestBook
from gangway.scheduler.workers import WorkerTable

_log = logging.getLogger(__name__)


class ModelLife:
    """Loads and unloads models. `leases`: so many queries of one model can run or be paused at a time.

    `close`: called with a model's number before it is unloaded, so that nothing of it is begun any more.
    """

    def __init__(
        self,
        supervisor: PacketSocket[slow.ControlMessage],
        models: ModelTable,
        workers: WorkerTable,
        arenas: ArenaPool,
        requests: RequestBook,
        execution: Execution,
        leases: int,
        close: Callable[[int], None] = lambda model_id: None,
    ) -> None:
        self._supervisor = supervisor
        self._models = models
        self._workers = workers
        self._arenas = arenas
        self._requests = requests
        self._execution = execution
        self._leases = leases
        self._close = close

    def load(self, spec: slow.LoadModel) -> None:
        """Reserve arenas and let every worker load the model."""
        try:
            self._arenas.add_model(spec.model_id, spec.arena_bytes, spec.max_rows, self._leases)
        except MemoryError as error:
            self._supervisor.send(slow.ModelFailed(spec.model_id, str(error)))
            self._supervisor.send(slow.ModelUnloaded(spec.model_id))  # nothing of it is there
            return
        self._workers.order_all(self._models.add(spec).load)

    def use_profile(self, model_id: int, path: Path) -> None:
        """Show policies a measured profile. One that cannot be read is named in the log."""
        try:
            profile = read_profile(path)
            self._models.use_profile(model_id, profile)
            self._execution.times.stretches.forget(model_id)
            self._execution.times.use_counters(path.parent, profile.machine.machine_id)
        except ProfileError as error:
            _log.warning("profile ignored: %s", error)

    def loaded(self, core: int, model_id: int, ok: bool, error: str) -> None:
        """A worker has loaded the model, or says why not."""
        self._workers.answer(core, model_id, has_model=ok)
        model = self._models.get(model_id)
        if model is None or model.state is ModelState.UNLOADING:
            self.finish_unloads()
        elif not ok:
            reason = f"worker {core} cannot load the compiled model; its log line says why, it begins: {error}"
            self._supervisor.send(slow.ModelFailed(model_id, reason))
            self.unload(model_id)
        elif model.state is ModelState.LOADING and self._workers.all_have(model_id):
            self._models.serve(model)
            self._workers.serve(model_id, True)
            self._supervisor.send(slow.ModelLoaded(model_id))

    def unload(self, model_id: int) -> None:
        """Answer what waits for the model; forget it when its last gang has ended and no worker has it."""
        model = self._models.get(model_id)
        if model is None:  # a predecessor began with that: a worker may not have heard of it
            self._workers.order_all(Unload(model_id))
            self._supervisor.send(slow.ModelUnloaded(model_id))
        elif model.state is not ModelState.UNLOADING:
            self._models.begin_unload(model)
            self._close(model_id)
            self._workers.serve(model_id, False)
            for unit in [unit for unit in self._requests.waiting if unit.query.model_id == model_id]:
                for piece in unit.pieces:
                    self._execution.drop(piece.request, SlotStatus.UNAVAILABLE)
            self._workers.order_all(Unload(model_id))  # a worker in a gang takes it afterwards
            self.finish_unloads()

    def unloaded(self, core: int, model_id: int) -> None:
        """A worker has forgotten the model."""
        self._workers.answer(core, model_id, has_model=False)
        self.finish_unloads()

    def finish_unloads(self) -> None:
        """Give back the memory of models that nobody uses any more."""
        for model in self._models.in_state(ModelState.UNLOADING):
            model_id = model.spec.model_id
            in_use = any(gang.unit.query.model_id == model_id for gang in self._execution.gangs.all())
            if not in_use and self._workers.none_has(model_id):
                self._arenas.remove_model(model_id)
                self._models.remove(model)
                self._execution.times.stretches.forget(model_id)
                self._supervisor.send(slow.ModelUnloaded(model_id))
