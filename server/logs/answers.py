"""The protocol's LogSettings: a change holds here at once, and is told to the supervisor, who tells the others."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from gangway.executor.logs import ProcessLog
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import invalid, unavailable, unsupported
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
    """`settings` hold at the start. `log` is this process's, if it has one. `tell` says to the supervisor what has been
    set, and whether there was room to say it.
    """

    def __init__(self, settings: LogSettings, log: ProcessLog | None, tell: Callable[[LogSettings], bool]) -> None:
        self._log = log
        self._tell = tell
        self._settings = settings
        self._lock = threading.Lock()

    def log_settings(self, request: pb.LogSettingsRequest) -> pb.LogSettingsResponse:
        """Change what the request names, all or nothing, then return everything that holds. Raises RequestError."""
        if request.settings:
            with self._lock:
                changes = dict(_change_of(name, value) for name, value in request.settings.items())
                new = replace(self._settings, **changes)
                if not self._tell(new):
                    unavailable("the log settings cannot be changed now; it may be tried again")
                self._settings = new
                if self._log is not None:
                    self._log.set(new.levels)
        settings = self._settings
        response = pb.LogSettingsResponse()
        response.settings["log_file"].string_param = settings.file
        for name, (field, choice, _) in _SETTINGS.items():
            setattr(response.settings[name], choice, getattr(settings, field))
        return response


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
