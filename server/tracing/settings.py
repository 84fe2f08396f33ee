"""Which requests are traced: settings for all models and for single ones, and the count of what is to come."""

import importlib.util
import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

TRITON: Final = "triton"
OPENTELEMETRY: Final = "opentelemetry"
MODES: Final = (TRITON, OPENTELEMETRY)
LEVELS: Final = ("TIMESTAMPS", "TENSORS")
OFF: Final = "OFF"
MAX_RATE: Final = 2**32 - 1
MAX_COUNT: Final = 2**31 - 1
UNLIMITED: Final = -1
# Further words of the flag, as tritonserver takes them.
_FLAG_LEVELS: Final = {"false": OFF, **dict.fromkeys(("true", "on", "min", "max"), "TIMESTAMPS")}
DEFAULT_URL: Final = "http://localhost:4318/v1/traces"
EXPORTER_MODULE: Final = "opentelemetry.exporter.otlp.proto.http"
_BATCHING: Final = ("bsp_max_queue_size", "bsp_schedule_delay", "bsp_max_export_batch_size")


@dataclass(frozen=True)
class TraceConfig:
    """What `--trace-config` says, spelled as tritonserver spells it: defaults of the settings, and what never changes.

    Also a message to the front end. `level` empty is off. Every `rate`-th request is traced (0: only those with a
    context of OpenTelemetry's), `count` of them (-1: any number). `log_frequency`: as many traces make one file (0: all
    are in one). `resource` are pairs. `bsp_*` None: OpenTelemetry's defaults; `bsp_schedule_delay` is in milliseconds.
    """

    mode: str = TRITON
    level: tuple[str, ...] = ()
    rate: int = 1000
    count: int = UNLIMITED
    log_frequency: int = 0
    file: str = ""
    url: str = DEFAULT_URL
    resource: tuple[tuple[str, str], ...] = ()
    bsp_max_queue_size: int | None = None
    bsp_schedule_delay: int | None = None
    bsp_max_export_batch_size: int | None = None


def trace_config_of(texts: Sequence[str]) -> TraceConfig:
    """Return what the flags say. Raises ValueError for what makes no sense or cannot be done."""
    config = TraceConfig()
    for text in texts:
        try:
            config = _with(config, text)
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}") from None
    if reason := fault_of(config):
        raise ValueError(reason)
    return config


def fault_of(config: TraceConfig) -> str:
    """Say why a configuration cannot be used; empty if it can."""
    if config.mode == OPENTELEMETRY:
        if "TENSORS" in config.level:
            return "trace level 'TENSORS' is not supported in mode opentelemetry"
        if not _has_exporter():
            return "mode opentelemetry needs packages that are not installed: pip install 'gangway-serve[otel]'"
        if (config.bsp_max_export_batch_size or 512) > (config.bsp_max_queue_size or 2048):
            return "bsp_max_export_batch_size must not be larger than bsp_max_queue_size"
        return ""
    if config.level and not config.rate:
        return "sample rate must be non-zero"
    if config.level and not config.file:
        return "trace file name is not given"
    if config.file and not _writable(Path(config.file)):
        return f"trace file {config.file} cannot be written"
    return ""


def whole_number(text: str, least: int, most: int) -> int:
    """Return the number that a setting's text stands for. Raises ValueError."""
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise ValueError(f"got: {text}")
    number = int(text)
    if not least <= number <= most:
        raise ValueError(f"value is out of range [ {least}, {most} ], got: {text}")
    return number


def with_level(levels: tuple[str, ...], text: str) -> tuple[str, ...]:
    """Return the levels and one more. Raises ValueError."""
    if text == OFF:
        return ()
    if text not in LEVELS:
        raise ValueError(f"unknown trace level '{text}', expected OFF, TIMESTAMPS or TENSORS")
    return tuple(level for level in LEVELS if level in levels or level == text)


def _with(config: TraceConfig, text: str) -> TraceConfig:
    scope, comma, rest = text.partition(",")
    if not comma or "=" in scope:
        scope, rest = "", text
    name, equals, value = rest.partition("=")
    if not equals:
        raise ValueError("expected [MODE,]SETTING=VALUE")
    match scope.lower(), name:
        case "", "mode":
            if value.lower() not in MODES:
                raise ValueError(f"unknown mode, expected {' or '.join(MODES)}")
            return replace(config, mode=value.lower())
        case "", "level":
            return replace(config, level=with_level(config.level, _FLAG_LEVELS.get(value.lower(), value.upper())))
        case "", "rate":
            return replace(config, rate=whole_number(value, 0, MAX_RATE))
        case "", "count":
            return replace(config, count=whole_number(value, UNLIMITED, MAX_COUNT))
        case "triton", "file":
            return replace(config, file=value and str(Path(value).absolute()))
        case "triton", "log-frequency":
            return replace(config, log_frequency=whole_number(value, 0, MAX_RATE))
        case "opentelemetry", "url":
            return replace(config, url=value if "://" in value else f"http://{value}")
        case "opentelemetry", "resource":
            key, equals, attribute = value.partition("=")
            if not key or not equals:
                raise ValueError("expected opentelemetry,resource=KEY=VALUE")
            return replace(config, resource=(*config.resource, (key, attribute)))
        case "opentelemetry", batching if batching in _BATCHING:
            number: dict[str, Any] = {batching: whole_number(value, 1, MAX_COUNT)}
            return replace(config, **number)
        case _:
            raise ValueError("unknown setting")


def _has_exporter() -> bool:
    try:
        return importlib.util.find_spec(EXPORTER_MODULE) is not None and bool(
            importlib.util.find_spec("opentelemetry.sdk.trace")
        )
    except ModuleNotFoundError:  # of a package that the module would be in
        return False


def _writable(path: Path) -> bool:
    if path.is_dir():
        return False
    return os.access(path if path.exists() else path.parent, os.W_OK)


EVERY_MODEL = ""


class TraceOverrides(msgspec.Struct, frozen=True, tag=True):
    """What has been set by TraceSetting for a model, or for all (`model` empty). None: as said elsewhere.

    Also a change that all front ends make. It replaces what was said for `model` before. `restarts`: as many requests
    as `count` says are to come from now on.
    """

    model: str
    level: tuple[str, ...] | None = None
    rate: int | None = None
    count: int | None = None
    log_frequency: int | None = None
    restarts: bool = True

    @property
    def own(self) -> dict[str, Any]:
        """What is set, by the names of TraceConfig."""
        values = {name: getattr(self, name) for name in ("level", "rate", "count", "log_frequency")}
        return {name: value for name, value in values.items() if value is not None}


class Sampler:
    """Picks requests by one setting. `remaining` -1: any number."""

    def __init__(self, setting: TraceConfig, remaining: int) -> None:
        self.setting = setting
        self.remaining = remaining
        self.off = not setting.level
        self.tensors = "TENSORS" in setting.level
        self._numbers = itertools.count(1)

    def take(self) -> bool:
        """Say whether this request, the next one, is to be traced."""
        rate = self.setting.rate
        if self.off or not rate or next(self._numbers) % rate:
            return False
        if self.remaining > 0:
            self.remaining -= 1
            return True
        return self.remaining < 0


class TraceSettings:
    """All of them."""

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
        return next((fault for setting in resolved if setting.level and (fault := fault_of(setting))), "")

    def override(self, new: TraceOverrides, restarts: bool = True) -> None:
        """Set what has no fault. `restarts`: as many requests as `count` says are to come from now on."""
        scopes = {name: old for name, old in self._overrides.items() if name != new.model}
        self._overrides = {**scopes, new.model: new} if new.own else scopes
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

    def _resolved(self, scope: str, scopes: dict[str, TraceOverrides]) -> TraceConfig:
        """Return what holds for a model."""
        setting = self.config
        for name in dict.fromkeys((EVERY_MODEL, scope)):
            if name in scopes:
                setting = replace(setting, **scopes[name].own)
        return setting
