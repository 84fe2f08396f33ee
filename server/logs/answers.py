"""The protocol's LogSettings: a change is made by all front ends; the supervisor tells the other processes."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gangway.executor.logs import ProcessLog
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import invalid, unsupported
from gangway.server.logs.settings import FORMATS, MAX_VERBOSE, LogSettings

_SettingValue = pb.LogSettingsRequest.SettingValue
# setting, its field in LogSettings, the choice of the message it comes in, and what Triton calls that
_SETTINGS = {
    "log_info": ("info", "bool_param", "boolean"),
    "log_warning": ("warning", "bool_param", "boolean"),
    "log_error": ("error", "bool_param", "boolean"),
    "log_verbose_level": ("verbose_level", "uint32_param", "int32"),
    "log_format": ("format", "string_param", "string"),
}


class LogAnswers:
    """`settings` hold at the start. `log` is this process's, if it has one. `make` has all front ends `apply` a change,
    or raises RequestError.
    """

    def __init__(self, settings: LogSettings, log: ProcessLog | None, make: Callable[[LogSettings], None]) -> None:
        self._log = log
        self._make = make
        self._settings = settings
        self._lock = threading.Lock()

    def log_settings(self, request: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
        """Change what the request names, all or nothing, then return everything that holds. Raises RequestError."""
        if request.settings:
            with self._lock:
                changes = dict(_change_of(name, value) for name, value in request.settings.items())
                self._make(replace(self._settings, **changes))
        settings = self._settings
        response = pb.LogSettingsResponse()
        response.settings["log_file"].string_param = settings.file
        for name, (field, choice, _) in _SETTINGS.items():
            setattr(response.settings[name], choice, getattr(settings, field))
        return response

    def apply(self, settings: LogSettings) -> None:
        """Let these hold in this process."""
        self._settings = settings
        if self._log is not None:
            self._log.set(settings.levels)


def _change_of(name: str, value: _SettingValue) -> tuple[str, Any]:
    """Return a field of LogSettings and its new value."""
    if name == "log_file":
        unsupported("log file location can not be updated through network protocol")
    if name not in _SETTINGS:
        invalid(f"unknown log setting '{name}'")
    field, choice, called = _SETTINGS[name]
    if value.WhichOneof("parameter_choice") != choice:
        invalid(f"expect {called} for '{name}'")
    new = getattr(value, choice)
    if field == "format" and new not in FORMATS:
        invalid(f"invalid argument for log_format, got: {new}")
    if field == "verbose_level" and new > MAX_VERBOSE:
        invalid(f"expect int32 for '{name}'")
    return field, new
