"""Models whose precision the scheduler chooses for each request: what is loaded in bf16 beside the same in fp32.

A model with `precision: "deadline"`, or it compiled for certain sizes, is two artifacts with two numbers. Front ends
know of the one in fp32; the scheduler takes the other one's place for a request that would be late
(`scheduler/policies/precision_choice.py`). Where there is no bf16, the model is as with `precision: "fp32"`.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from msgspec import structs

from gangway.artifact.format import Engine, Manifest
from gangway.artifact.precision import BF16, DEADLINE, WantedPrecision
from gangway.scheduler.messages import LoadModel
from gangway.server.control.repository.capacity import ModelCapacity
from gangway.server.control.repository.compile_jobs import Compiler, CompileRequest
from gangway.server.control.repository.loaded import NOT_WANTED, InBf16, IsolatedLatency, part_of, profile_message
from gangway.server.control.supervisor.scheduler import SchedulerControl
from gangway.server.errors import CompileError, ModelLoadError
from gangway.server.messages import ModelReady

OTHER_TENSORS = "its tensors are others"
_log = logging.getLogger(__name__)

Attempt = Callable[[int], Awaitable[IsolatedLatency | None]]
"""Have the model of this number answer trial requests: how fast it is alone, None if that cannot be seen."""


class Profiles(Protocol):
    """Where profiles of loaded models are used and made (`profiles.py`)."""

    def add(self, model_id: int, name: str, manifest: Manifest, title: str = "") -> None:
        """A model has been loaded."""

    def remove(self, model_id: int) -> None:
        """A model has been unloaded."""


@dataclass(eq=False)
class PrecisionPairs:
    """What is loaded in bf16, by the same in fp32."""

    compiler: Compiler
    scheduler: SchedulerControl
    profiles: Profiles
    capacity: ModelCapacity
    _loaded: dict[int, LoadModel] = field(default_factory=dict, init=False)  # in bf16, by the same in fp32

    async def compiled(
        self, title: str, path: Path, exact: Manifest, wanted: WantedPrecision, sizes: Mapping[str, int]
    ) -> InBf16:
        """Return what is to be loaded beside a model in fp32; the log says why nothing is that was wanted.

        `exact`: the artifact in fp32. `sizes`: that it is compiled for. Raises OSError.
        """
        if wanted.name != DEADLINE or exact.engine is not Engine.NATIVE:
            return NOT_WANTED
        try:
            request = CompileRequest(f"{title}, in bf16", path, sizes, precision=wanted.each[-1])
            made = await self.compiler.compile(request)
        except CompileError as error:
            return _alone(title, str(error))
        if made.precision != BF16:
            return _alone(title, made.precision_note)
        if (made.inputs, made.outputs, made.batched, made.tail) != (
            exact.inputs, exact.outputs, exact.batched, exact.tail,
        ):  # fmt: skip
            return _alone(title, OTHER_TENSORS)
        return InBf16(made, made.precision_note)

    async def load(
        self,
        exact: LoadModel,
        found: InBf16,
        ready: ModelReady,
        attempt: Attempt,
        qos_us: float | None,
        is_counted: bool = False,
    ) -> int:
        """Load a model in bf16 beside the same in fp32, which is loaded; return its number.

        It is -1 if there is none, or it cannot be loaded, as the log says. `qos_us`: the latency target of both.
        `is_counted`: there must be memory for it.
        """
        manifest = found.manifest
        if manifest is None:
            return -1
        try:
            if is_counted:
                self.capacity.require_memory(exact.name, manifest)
            spec = self.capacity.spec(f"{exact.name}, in bf16", manifest, exact.max_rows)
            spec = part_of(exact, structs.replace(spec, fp32_id=exact.model_id))
            await self.scheduler.load(spec)
        except ModelLoadError as error:
            _alone(exact.name, str(error))
            return -1
        self._loaded[exact.model_id] = spec
        try:
            isolated = await attempt(spec.model_id)
        except ModelLoadError as error:
            self.unload_bf16(exact.model_id)
            _alone(exact.name, str(error))
            return -1
        except BaseException:
            self.unload_bf16(exact.model_id)
            raise
        self.scheduler.set_profile(profile_message(spec.model_id, ready, isolated, qos_us))
        self.profiles.add(spec.model_id, ready.name, manifest, exact.name)
        if is_counted:
            self.capacity.map_weights(spec.model_id, manifest)
        _log.info(
            "%s: in fp32 and in bf16, whose weights take %.1f MiB more; the scheduler chooses by deadlines (%s)",
            exact.name,
            manifest.weights_bytes / (1 << 20),
            found.note,
        )
        return spec.model_id

    def set_target(self, ready: ModelReady) -> None:
        """A model has another latency target."""
        if (spec := self._loaded.get(ready.model_id)) is not None:
            self.scheduler.set_profile(profile_message(spec.model_id, ready, None, ready.qos_us))

    def withdrawn(self, model_id: int) -> None:
        """A model is not served any more, though requests that have begun may still use it."""
        self.profiles.remove(model_id)
        if (spec := self._loaded.get(model_id)) is not None:
            self.profiles.remove(spec.model_id)

    def unload(self, model_id: int) -> None:
        """Unload a model, or it compiled for certain sizes, and what is there beside it in bf16."""
        self.unload_bf16(model_id)
        self.profiles.remove(model_id)
        self.scheduler.unload(model_id)

    def unload_bf16(self, model_id: int) -> None:
        """Unload only what is there beside a model in fp32, if anything is."""
        if (spec := self._loaded.pop(model_id, None)) is not None:
            self.profiles.remove(spec.model_id)
            self.scheduler.unload(spec.model_id)

    def failed(self, model_id: int, reason: str) -> bool:
        """No worker has a model any more, or it ended workers; say whether it was one in bf16 beside another."""
        for exact_id, spec in self._loaded.items():
            if spec.model_id == model_id:
                del self._loaded[exact_id]
                self.profiles.remove(model_id)
                _log.error("%s: requests are computed in fp32 until the model is loaded again: %s", spec.name, reason)
                return True
        return False


def _alone(title: str, reason: str) -> InBf16:
    _log.warning("%s: all requests are computed in fp32, although deadlines should choose: %s", title, reason)
    return InBf16(note=reason)
