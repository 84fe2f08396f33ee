"""Methods that the supervisor answers, or has all front ends answer: repository, settings of log and traces.

Each question has a number, by which a coroutine waits for that answer. All of it happens on the loop.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import msgspec
from google.protobuf.message import Message

from gangway.base.logs import ProcessLog
from gangway.base.peer import close_descriptor
from gangway.protos import StatusCode
from gangway.protos import grpc_service_pb2 as pb
from gangway.server import messages
from gangway.server.errors import RequestError, invalid, unavailable, unsupported
from gangway.server.models.served import Models
from gangway.server.serving.access_log import AccessLog
from gangway.server.serving.pending import Driven, Offload, Pending
from gangway.server.serving.tracing import Tracer
from gangway.server.serving.turns import Slices, Turns
from gangway.server.tracing.settings import (
    MAX_COUNT,
    MAX_RATE,
    OFF,
    TRITON,
    UNLIMITED,
    TraceConfig,
    TraceOverrides,
    whole_number,
    with_level,
)

_log = logging.getLogger(__name__)


SupervisorReply: TypeAlias = messages.Settled | messages.RepositoryAnswer | messages.ReadinessTold


class _Asked(msgspec.Struct, frozen=True):
    """A question that has not been answered. `held`: what stays until it is."""

    answered: Pending[SupervisorReply | None]
    timer: asyncio.TimerHandle
    held: object


class SupervisorCalls:
    """Questions without an answer, `most` at a time: beyond that clients are told `too_many`.

    The supervisor works on a question until it is answered, also when its client has gone. So it keeps its place.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, most: int, too_many: str) -> None:
        self._loop = loop
        self._most = most
        self._too_many = too_many
        self._asked: dict[int, _Asked] = {}
        self._refusal = ""
        self._numbers = itertools.count(time.monotonic_ns())  # no number that was a predecessor's

    async def ask(
        self, send: Callable[[int], bool], seconds: float, not_now: str, unanswered: str, held: object = None
    ) -> None:
        """Send a question with the number given; return when it has been answered by OK.

        `send` says whether the supervisor could be told. `held` stays until the question is answered. Raises
        RequestError: with what was answered, or UNAVAILABLE with `not_now` if it could not be told, with `unanswered`
        after `seconds` without an answer.
        """
        if self._refusal:
            unavailable(self._refusal)
        if len(self._asked) >= self._most:
            unavailable(self._too_many)
        number, answered = next(self._numbers), Pending[SupervisorReply | None]()
        self._asked[number] = _Asked(answered, self._loop.call_later(seconds, self._end, number), held)
        if not send(number):
            self._end(number)
            unavailable(not_now)
        answer = await answered
        if answer is None:
            unavailable(self._refusal or unanswered)
        if answer.code != messages.OK:
            raise RequestError(StatusCode[answer.code], answer.message)

    def answered(self, answer: SupervisorReply) -> None:
        """The supervisor has answered."""
        self._end(answer.number, answer)

    def refuse(self, reason: str) -> None:
        """Answer everything with UNAVAILABLE from now on, also what waits."""
        self._refusal = reason
        for number in tuple(self._asked):
            self._end(number)

    def _end(self, number: int, answer: SupervisorReply | None = None) -> None:
        asked = self._asked.pop(number, None)
        if asked is not None:  # else it was a predecessor's question, or has waited too long
            asked.timer.cancel()
            asked.answered.settle(answer)


MAX_WAITING_CHANGES = 64  # all front ends are at them
WAIT_SECONDS = 10.0  # every wait ends; the others are told nevertheless
NOT_NOW = "this cannot be changed now; it may be tried again"


class SharedChanges:
    """What a client changes for all front ends, as the front end sees it that got the client's request.

    `apply` makes a change in this process, and may raise RequestError. `ask` says whether the supervisor could be told;
    None: there are no other processes to agree with.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        apply: Callable[[messages.Change], None],
        ask: Callable[[messages.FrontEndMessage], bool] | None = None,
    ) -> None:
        self._apply = apply
        self._ask = ask
        self.calls = SupervisorCalls(loop, MAX_WAITING_CHANGES, NOT_NOW)

    async def make(self, change: messages.Change) -> None:
        """Return when every front end has made the change. Raises RequestError: then none has made it."""
        ask = self._ask
        if ask is None:
            self._apply(change)
            return
        unanswered = f"not known to all front ends within {WAIT_SECONDS:.0f} seconds"
        await self.calls.ask(lambda number: ask(messages.Proposed(number, change)), WAIT_SECONDS, NOT_NOW, unanswered)

    def agreed(self, message: messages.Agreed) -> messages.Applied | None:
        """Make a change that goes to all front ends; return what the supervisor is to be told, if anything."""
        answer = messages.Applied(message.number)
        try:
            if message.change is not None:
                self._apply(message.change)
        except RequestError as error:
            answer = messages.Applied(message.number, error.code.name, error.message)
            if not message.number:
                _log.warning(
                    "a setting or memory region that other front ends have is not in this one: %s", error.message
                )
        return answer if message.number else None


_SettingValue = pb.LogSettingsRequest.SettingValue
# setting, its field in LogSettings, the choice of the message it comes in, and what Triton calls that
_SETTINGS = {
    "log_info": ("info", "bool_param", "boolean"),
    "log_warning": ("warning", "bool_param", "boolean"),
    "log_error": ("error", "bool_param", "boolean"),
    "log_verbose_level": ("verbose_level", "uint32_param", "int32"),
    "log_format": ("format", "string_param", "string"),
}


class LogMethods:
    """The protocol's LogSettings. All front ends make a change; the supervisor tells the other processes.

    `settings` hold at the start. `log` is this process's, if it has one. `make` has all front ends `apply` a change, or
    raises RequestError. `turns`: of changes, each of which begins with what the one before has left.
    """

    def __init__(
        self,
        settings: messages.LogSettings,
        log: ProcessLog | None,
        make: Callable[[messages.LogSettings], Driven[None]],
        turns: Turns,
        access_log: AccessLog | None = None,
    ) -> None:
        self._log = log
        self._access_log = access_log
        self._make = make
        self._settings = settings
        self._turns = turns

    async def log_settings(self, request: pb.LogSettingsRequest, _slices: Slices) -> pb.LogSettingsResponse:
        """Change what the request names, all or nothing, then return everything that holds. Raises RequestError."""
        if request.settings:
            async with self._turns:
                changes = dict(_log_change(name, value) for name, value in request.settings.items())
                await self._make(msgspec.structs.replace(self._settings, **changes))
        settings = self._settings
        response = pb.LogSettingsResponse()
        response.settings["log_file"].string_param = settings.file
        for name, (attribute, choice, _) in _SETTINGS.items():
            setattr(response.settings[name], choice, getattr(settings, attribute))
        return response

    def apply(self, settings: messages.LogSettings) -> None:
        """Let these hold in this process."""
        self._settings = settings
        if self._log is not None:
            self._log.set(settings.levels)
        if self._access_log is not None:
            self._access_log.format = settings.format


def _log_change(name: str, value: _SettingValue) -> tuple[str, Any]:
    """Return a field of LogSettings and its new value."""
    if name == "log_file":
        unsupported("log file location can not be updated through network protocol")
    if name not in _SETTINGS:
        invalid(f"unknown log setting '{name}'")
    field, choice, called = _SETTINGS[name]
    if value.WhichOneof("parameter_choice") != choice:
        invalid(f"expect {called} for '{name}'")
    new = getattr(value, choice)
    if field == "format" and new not in messages.FORMATS:
        invalid(f"invalid argument for log_format, got: {new}")
    if field == "verbose_level" and int(new) > messages.MAX_VERBOSE:
        invalid(f"expect int32 for '{name}'")
    return field, new


_NUMBERS = {
    "trace_rate": ("rate", 0, MAX_RATE),
    "trace_count": ("count", UNLIMITED, MAX_COUNT),
    "log_frequency": ("log_frequency", 0, MAX_RATE),
}
_FIXED = {
    "trace_file": "trace file location can not be updated through network protocol",
    "trace_mode": "trace mode can not be updated through network protocol",
}


class TraceMethods:
    """The protocol's TraceSetting: a change is checked as a whole, and made by all front ends.

    `make` returns when the tracers of all front ends have the new settings, or raises RequestError. `turns`: as in
    LogMethods.
    """

    def __init__(
        self, tracer: Tracer, models: Callable[[], Models], make: Callable[[TraceOverrides], Driven[None]], turns: Turns
    ) -> None:
        self._tracer = tracer
        self._models = models
        self._make = make
        self._turns = turns

    async def trace_setting(self, request: pb.TraceSettingRequest, _slices: Slices) -> pb.TraceSettingResponse:
        """Change what the request names, then return everything that holds. Raises RequestError."""
        if request.model_name:
            self._models().find(request.model_name, "")  # an unknown one is an error
        if request.settings:
            async with self._turns:
                given = {name: list(setting.value) for name, setting in request.settings.items()}
                await self._change(request.model_name, given)
        return self._shown(request.model_name)

    async def _change(self, model: str, given: Mapping[str, list[str]]) -> None:
        settings = self._tracer.settings
        changes: dict[str, Any] = {}
        for name, values in given.items():
            changes |= _trace_change(name, values, settings.config)
        new = msgspec.structs.replace(settings.overrides(model), **changes, restarts="count" in changes)
        if fault := settings.fault_of(new):
            invalid(f"Attempting to set invalid trace setting :{fault}")
        await self._make(new)

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


def _trace_change(name: str, values: list[str], config: TraceConfig) -> dict[str, Any]:
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


MAX_WAITING_CALLS = 16  # each may have a model in memory, for as long as it takes to compile one
LOAD_SECONDS = 1800.0  # every wait ends; the load goes on
INDEX_SECONDS = 5.0
MAX_NAME_BYTES = 1024


class RepositoryMethods:
    """What clients ask of the model repository. The supervisor alone loads and unloads models.

    A configuration or files that come with a load may be as large as a message, so they lie in memory that the
    supervisor reads by itself. `ask` says whether the supervisor could be told. `aside`: threads that copy them.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, ask: Callable[[messages.RepositoryCall], bool], aside: Offload
    ) -> None:
        self._ask = ask
        self._aside = aside
        self._copies, self._refreshing = Turns(loop), Turns(loop)
        self._refreshes = 0  # that have begun
        self.calls = SupervisorCalls(
            loop,
            MAX_WAITING_CALLS,
            f"{MAX_WAITING_CALLS} requests to the model repository wait for their answers, more cannot",
        )

    async def load(self, request: pb.RepositoryModelLoadRequest, _slices: Slices) -> pb.RepositoryModelLoadResponse:
        """Load or reload a model; return when it answers requests. Raises RequestError."""
        _check(request.repository_name, request.model_name)
        name, content = request.model_name, None
        if request.parameters:
            async with self._copies:
                content = await self._aside.run(_InMemory, request)
        del request  # which may be large
        await self._call("load", name, content)
        return pb.RepositoryModelLoadResponse()

    async def unload(
        self, request: pb.RepositoryModelUnloadRequest, _slices: Slices
    ) -> pb.RepositoryModelUnloadResponse:
        """Unload a model; return when it takes no new requests. Raises RequestError.

        `unload_dependents` means what was loaded because this one, an ensemble, needs it.
        """
        dependents = False
        _check(request.repository_name, request.model_name)
        for name, parameter in request.parameters.items():
            if name != "unload_dependents":
                invalid(f"unrecognized unload parameter '{name}'")
            if parameter.WhichOneof("parameter_choice") != "bool_param":
                invalid("Unload parameter 'unload_dependents' must have bool type for its value")
            dependents = parameter.bool_param
        await self._call("unload", request.model_name, dependents=dependents)
        return pb.RepositoryModelUnloadResponse()

    async def refresh(self) -> None:
        """Have the supervisor look what the repositories hold; if that is not possible, what was known stands.

        A look that begins after a call has come is one for all that have come before.
        """
        before = self._refreshes
        async with self._refreshing:
            if self._refreshes == before:
                self._refreshes += 1
                with contextlib.suppress(RequestError):
                    await self._call("index", seconds=INDEX_SECONDS)

    async def _call(
        self,
        kind: messages.CallKind,
        name: str = "",
        content: "_InMemory | None" = None,
        seconds: float = LOAD_SECONDS,
        dependents: bool = False,
    ) -> None:
        path = content.path if content is not None else ""
        await self.calls.ask(
            lambda number: self._ask(messages.RepositoryCall(number, kind, name, path, dependents)),
            seconds,
            not_now="the model repository cannot be asked now",
            unanswered=f"no answer from the model repository within {seconds:.0f} seconds",
            held=content,
        )


def _check(repository: str, name: str) -> None:
    if repository:
        unsupported("'repository_name' specification is not supported")
    if not name.strip() or len(name.encode()) > MAX_NAME_BYTES or "/" in name or not name.isprintable():
        invalid(f"invalid model name '{name[:80]}': expected 1 to {MAX_NAME_BYTES} printable bytes without '/'")
    if name.strip().startswith("."):
        invalid(f"invalid model name '{name[:80]}': a name begins with no dot, as folders that are no models do")


class _InMemory:
    """A client's message in memory; `path` is where the supervisor finds it, as long as this object lives."""

    def __init__(self, message: Message) -> None:
        """Copy it. Raises RequestError."""
        self._descriptor = -1
        try:
            self._descriptor = os.memfd_create("gangway-load", os.MFD_CLOEXEC)
            view = memoryview(message.SerializeToString())
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            unavailable(f"no memory for the request: {error}")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def __del__(self) -> None:
        close_descriptor(self._descriptor)
