"""The protocol's TraceSetting: a change is checked as a whole, and made by all front ends."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import invalid, unsupported
from gangway.server.models import Models
from gangway.server.tracing.config import (
    MAX_COUNT,
    MAX_RATE,
    OFF,
    TRITON,
    UNLIMITED,
    TraceConfig,
    whole_number,
    with_level,
)
from gangway.server.tracing.settings import TraceOverrides
from gangway.server.tracing.tracer import Tracer

_NUMBERS = {
    "trace_rate": ("rate", 0, MAX_RATE),
    "trace_count": ("count", UNLIMITED, MAX_COUNT),
    "log_frequency": ("log_frequency", 0, MAX_RATE),
}
_FIXED = {
    "trace_file": "trace file location can not be updated through network protocol",
    "trace_mode": "trace mode can not be updated through network protocol",
}


class TraceAnswers:
    """`make` returns when the tracers of all front ends have new settings, or raises RequestError."""

    def __init__(self, tracer: Tracer, models: Callable[[], Models], make: Callable[[TraceOverrides], None]) -> None:
        self._tracer = tracer
        self._models = models
        self._make = make
        self._lock = threading.Lock()

    def trace_setting(self, request: pb.TraceSettingRequest) -> pb.TraceSettingResponse:
        """Change what the request names, then return everything that holds. Raises RequestError."""
        if request.model_name:
            self._models().find(request.model_name, "")  # an unknown one is an error
        if request.settings:
            with self._lock:
                self._change(request.model_name, {name: list(given.value) for name, given in request.settings.items()})
        return self._shown(request.model_name)

    def _change(self, model: str, given: Mapping[str, list[str]]) -> None:
        settings = self._tracer.settings
        changes: dict[str, Any] = {}
        for name, values in given.items():
            changes |= _change_of(name, values, settings.config)
        new = replace(settings.overrides(model), **changes, restarts="count" in changes)
        if fault := settings.fault_of(new):
            invalid(f"Attempting to set invalid trace setting :{fault}")
        self._make(new)

    def _shown(self, model: str) -> pb.TraceSettingResponse:
        settings = self._tracer.settings
        sampler, config = settings.sampler(model), settings.config
        shown = {
            "trace_level": list(sampler.setting.level) or [OFF],
            "trace_rate": [str(sampler.setting.rate)],
            "trace_count": [str(sampler.remaining)],
            "trace_mode": [config.mode],
        }
        if config.mode == TRITON:
            shown |= {"log_frequency": [str(sampler.setting.log_frequency)], "trace_file": [config.file]}
        else:
            shown |= _opentelemetry_of(config)
        response = pb.TraceSettingResponse()
        for name, values in shown.items():
            response.settings[name].value.extend(values)
        return response


def _change_of(name: str, values: list[str], config: TraceConfig) -> dict[str, Any]:
    """Return what a setting of the request changes in TraceOverrides; no value: back to the default."""
    if name in _FIXED:
        unsupported(_FIXED[name])
    if name == "trace_level":
        return {"level": _levels_of(values) if values else None}
    if name not in _NUMBERS:
        invalid(f"unknown trace setting '{name}'")
    field, least, most = _NUMBERS[name]
    if not values:
        return {field: None}
    if len(values) > 1:
        invalid(f"expect only 1 value for '{name}'")
    if name == "log_frequency" and config.mode != TRITON:
        invalid(f"'{name}' has no meaning in mode {config.mode}")
    try:
        return {field: whole_number(values[0], least, most)}
    except ValueError as error:
        invalid(f"Unable to parse '{name}', {error}")


def _levels_of(texts: list[str]) -> tuple[str, ...]:
    if OFF in texts and len(texts) > 1:
        invalid("Expect only one trace level 'OFF' is specified")
    levels: tuple[str, ...] = ()
    for text in texts:
        try:
            levels = with_level(levels, text)
        except ValueError as error:
            invalid(str(error))
    return levels


def _opentelemetry_of(config: TraceConfig) -> dict[str, list[str]]:
    shown = {"url": [config.url]}
    if config.resource:
        shown["resource"] = [f"{key}={value}" for key, value in config.resource]
    for name in ("bsp_max_queue_size", "bsp_schedule_delay", "bsp_max_export_batch_size"):
        if (value := getattr(config, name)) is not None:
            shown[name] = [str(value)]
    return shown
