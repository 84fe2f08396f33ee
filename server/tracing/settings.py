"""Which requests are traced: settings for all models and for single ones, and the count of what is to come."""

import itertools
import threading
from dataclasses import dataclass, field, replace

from gangway.server.tracing.config import OPENTELEMETRY, TraceConfig, fault_of

EVERY_MODEL = ""


@dataclass(frozen=True)
class TraceOverrides:
    """What has been set by TraceSetting for a model, or for all (`model` empty). None: as said elsewhere.

    Also a change that all front ends make. It replaces what was said for `model` before. `restarts`: as many requests
    as `count` says are to come from now on.
    """

    model: str
    level: tuple[str, ...] | None = None
    rate: int | None = None
    count: int | None = None
    log_frequency: int | None = None
    restarts: bool = field(default=True, compare=False)

    @property
    def empty(self) -> bool:
        """Whether nothing is set."""
        return self == TraceOverrides(self.model)


@dataclass(frozen=True)
class Setting:
    """What holds for a model; see TraceConfig."""

    level: tuple[str, ...]
    rate: int
    count: int
    log_frequency: int

    def with_overrides(self, new: TraceOverrides) -> "Setting":
        """Return the setting with what is set there."""
        return Setting(
            self.level if new.level is None else new.level,
            self.rate if new.rate is None else new.rate,
            self.count if new.count is None else new.count,
            self.log_frequency if new.log_frequency is None else new.log_frequency,
        )


class Sampler:
    """Picks requests by one setting. Safe for threads; `remaining` -1: any number."""

    def __init__(self, setting: Setting, remaining: int) -> None:
        self.setting = setting
        self.remaining = remaining
        self.off = not setting.level
        self.tensors = "TENSORS" in setting.level
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Say whether this request, the next one, is to be traced."""
        rate = self.setting.rate
        if self.off or not rate or next(self._numbers) % rate:
            return False
        if self.remaining < 0:
            return True
        with self._lock:
            if self.remaining == 0:
                return False
            self.remaining -= 1
            return True


class TraceSettings:
    """All of them. `sampler` may be called by any thread at any time; changes are for one thread at a time."""

    def __init__(self, config: TraceConfig) -> None:
        self.config = config
        self._overrides: dict[str, TraceOverrides] = {}
        self._samplers: dict[str, Sampler] = {}
        self._renew("")

    @property
    def active(self) -> bool:
        """Whether any request may be traced."""
        return any(not sampler.off for sampler in self._samplers.values())

    @property
    def wants_tensors(self) -> bool:
        """Whether any request may be traced with its tensors."""
        return any(sampler.tensors for sampler in self._samplers.values())

    @property
    def propagates(self) -> bool:
        """Whether a request may say itself that it is traced."""
        return self.config.mode == OPENTELEMETRY

    def sampler(self, model: str) -> Sampler:
        """Return what picks requests of a model."""
        samplers = self._samplers
        return samplers.get(model) or samplers[EVERY_MODEL]

    def overrides(self, model: str) -> TraceOverrides:
        """Return what has been set for a model, or for all."""
        return self._overrides.get(model, TraceOverrides(model))

    def fault_of(self, new: TraceOverrides) -> str:
        """Say why the overrides cannot be used, for this model or for one that depends on it; empty if they can."""
        scopes = {**self._overrides, new.model: new}
        resolved = [self._resolved(scope, scopes) for scope in scopes]
        return next((fault for setting in resolved if (fault := self._fault(setting))), "")

    def override(self, new: TraceOverrides, restarts: bool = True) -> None:
        """Set what has no fault. `restarts`: as many requests as `count` says are to come from now on."""
        scopes = {name: old for name, old in self._overrides.items() if name != new.model}
        self._overrides = scopes if new.empty else {**scopes, new.model: new}
        self._renew(new.model if restarts else None)

    def _renew(self, restarted: str | None) -> None:
        samplers = {}
        for scope in {EVERY_MODEL, *self._overrides}:
            setting, old = self._resolved(scope, self._overrides), self._samplers.get(scope)
            kept = old is not None and old.setting.count == setting.count and scope != restarted
            if old is not None and kept and old.setting == setting:
                samplers[scope] = old
            else:
                samplers[scope] = Sampler(setting, old.remaining if old is not None and kept else setting.count)
        self._samplers = samplers

    def _resolved(self, scope: str, scopes: dict[str, TraceOverrides]) -> Setting:
        config = self.config
        setting = Setting(config.level, config.rate, config.count, config.log_frequency)
        for name in dict.fromkeys((EVERY_MODEL, scope)):
            setting = setting.with_overrides(scopes.get(name, TraceOverrides(name)))
        return setting

    def _fault(self, setting: Setting) -> str:
        if not setting.level:
            return ""
        return fault_of(replace(self.config, level=setting.level, rate=setting.rate))
