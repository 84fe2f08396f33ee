"""The log of a process that the supervisor has started: levels that change while it runs, and lines on the way.

Standard error of such a process is a pipe to the supervisor, the only process that writes the log
(`server/control/supervisor/log.py`). A record travels as one JSON object, behind a byte that no text begins with;
everything else that comes out of the pipe is a line that something outside Python's logging has written. Lines that
repeat themselves are held back and counted, so that no client can fill the disk with wrong requests.
"""

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import msgspec

PERIOD_SECONDS: Final = 30.0
BURST: Final = 100  # lines of one kind in a period
OFTEN: Final = {"burst": 10}  # `extra` of lines that any client can cause as often as it likes
ALWAYS: Final = {"burst": 0}  # `extra` of lines whose rate is limited elsewhere
MAX_KINDS: Final = 256
RECORD_MARK: Final = b"\x1e"  # ASCII's record separator
MAX_LINE_BYTES: Final = 4096  # Linux's PIPE_BUF: so much is written whole or not at all
_ROOMS: Final = (MAX_LINE_BYTES, 1200, 300, 100)  # characters per text, tried in this order
_STANDARD_ERROR: Final = 2
_Kind = tuple[str, int, str]
_OTHERS: Final[_Kind] = ("", logging.WARNING, "(of many kinds)")


class LogLevels(msgspec.Struct, frozen=True):
    """Which lines are wanted. `verbose` 0: no details."""

    info: bool = True
    warning: bool = True
    error: bool = True
    verbose: int = 0

    def allow(self, level: int) -> bool:
        """Say whether lines of this level (of Python's logging) are wanted."""
        if level >= logging.ERROR:
            return self.error
        if level >= logging.WARNING:
            return self.warning
        return self.info if level >= logging.INFO else self.verbose > 0

    @property
    def threshold(self) -> int:
        """The lowest level of Python's logging that is wanted."""
        levels = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)
        return next((level for level in levels if self.allow(level)), logging.CRITICAL + 1)

    def to_number(self) -> int:
        """Return it as one number, for a command line."""
        return self.info | self.warning << 1 | self.error << 2 | self.verbose << 3

    @classmethod
    def from_number(cls, number: int) -> "LogLevels":
        """Return what `to_number` was called for."""
        return cls(bool(number & 1), bool(number & 2), bool(number & 4), number >> 3)


def set_levels(levels: LogLevels) -> None:
    """Let Python's logging of this process make the wanted lines; details are Gangway's own, and no library's."""
    logging.getLogger().setLevel(max(levels.threshold, logging.INFO))
    logging.getLogger("gangway").setLevel(levels.threshold)


def fields(**values: object) -> dict[str, Any]:
    """Return the `extra` of a line whose values shall stand by themselves in the JSON form of the log."""
    return {"fields": values}


class ProcessLog:
    """Sends Python's logging of this process into the pipe, uncaught exceptions included.

    An uncaught exception of any thread ends the process.
    """

    def __init__(self, levels: LogLevels) -> None:
        self._levels = levels
        handler = PipeHandler()
        handler.addFilter(self._wanted)  # before the limit: unwanted lines do not count
        self._limit = RateLimit(handler)
        logging.getLogger().handlers = [handler]
        self.set(levels)
        sys.excepthook = _log_uncaught
        threading.excepthook = self._end_process

    def set(self, levels: LogLevels) -> None:
        """Set which lines are logged."""
        self._levels = levels
        set_levels(levels)

    def finish(self) -> None:
        """Log what was held back, before the process ends."""
        self._limit.report(everything=True)

    def _wanted(self, record: logging.LogRecord) -> bool:
        return self._levels.allow(record.levelno)

    def _end_process(self, arguments: threading.ExceptHookArgs) -> None:
        """End the process with its thread: each thread is needed, and the supervisor replaces processes only."""
        name = arguments.thread.name if arguments.thread else "?"
        error = arguments.exc_value or arguments.exc_type()
        about = (arguments.exc_type, error, arguments.exc_traceback)
        try:
            logging.getLogger(__name__).critical("an exception ends thread %s and this process", name, exc_info=about)
            self.finish()
        finally:
            os._exit(1)


def _log_uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    logging.getLogger(__name__).critical("an exception ends this process", exc_info=(kind, error, trace))


class PipeHandler(logging.Handler):
    """Writes records for the supervisor. It never waits: lines that a full pipe cannot take are lost, and counted."""

    def __init__(self, descriptor: int = _STANDARD_ERROR) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._lost = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        try:
            os.write(self._descriptor, encode(record, self._lost))
            self._lost = 0
        except OSError:
            self._lost += 1
        except Exception:
            self.handleError(record)


def encode(record: logging.LogRecord, lost: int = 0) -> bytes:
    """Return a record as a line of at most MAX_LINE_BYTES; texts that are too long lose their middle."""
    content: dict[str, Any] = {
        "time": record.created,
        "level": record.levelno,
        "logger": record.name,
        "message": record.getMessage(),
        "lost": lost,
    }
    if record.exc_info:
        content["exception"] = logging.Formatter().formatException(record.exc_info)
    own = getattr(record, "fields", None)
    line = b""
    for room in _ROOMS:
        short = {key: _shortened(value, room) for key, value in content.items()}
        if own and room == _ROOMS[0]:
            short["fields"] = own
        line = RECORD_MARK + json.dumps(short, default=str, separators=(",", ":")).encode() + b"\n"
        if len(line) <= MAX_LINE_BYTES:
            break
    return line


def decode(line: bytes) -> Mapping[str, Any] | None:
    """Return the content of an encoded line; None for any other line."""
    if not line.startswith(RECORD_MARK):
        return None
    try:
        content = json.loads(line[len(RECORD_MARK) :])
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _shortened(value: object, room: int) -> object:
    if not isinstance(value, str) or len(value) <= room:
        return value
    return f"{value[: room // 2]} ... {value[-(room // 2) :]}"


@dataclass
class _Period:
    end: float  # seconds, as the clock has them
    passed: int = 0
    held: int = 0


class RateLimit:
    """A filter of a handler. Of each kind of line, `burst` pass in a period; then one line says how many more came.

    A kind is logger, level and text before its values are filled in, or what the record has as `kind`. When more than
    MAX_KINDS are looked after, further ones count as one. Safe for threads.
    """

    def __init__(
        self,
        handler: logging.Handler,
        period_seconds: float = PERIOD_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._handler = handler
        self._period_seconds = period_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._periods: dict[_Kind, _Period] = {}
        self._timer: threading.Timer | None = None  # runs while something is held back
        handler.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether the record may pass, and count it."""
        burst = getattr(record, "burst", BURST)
        if not burst:
            return True
        kind = (record.name, record.levelno, getattr(record, "kind", str(record.msg)))
        with self._lock:
            period = self._period_of(kind)
            if period.passed < burst:
                period.passed += 1
                return True
            period.held += 1
            self._watch()
        return False

    def report(self, everything: bool = False) -> None:
        """Log how many lines were held back in the periods that are over, or in all."""
        with self._lock:
            now = self._clock()
            ended = {kind: period for kind, period in self._periods.items() if everything or period.end <= now}
            for kind in ended:
                del self._periods[kind]
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if any(period.held for period in self._periods.values()):
                self._watch()
        for kind, period in ended.items():
            if period.held:
                self._tell(kind, period.held)

    def _period_of(self, kind: _Kind) -> _Period:
        now = self._clock()
        if kind not in self._periods and len(self._periods) >= MAX_KINDS:
            self._periods = {key: old for key, old in self._periods.items() if old.end > now or old.held}
            if len(self._periods) >= MAX_KINDS:
                kind = _OTHERS
        period = self._periods.get(kind)
        if period is None or (period.end <= now and not period.held):
            period = self._periods[kind] = _Period(now + self._period_seconds)
        return period

    def _watch(self) -> None:
        if self._timer is None:
            timer = threading.Timer(self._period_seconds, self.report)
            timer.daemon = True
            with suppress(RuntimeError):  # no thread can be started now; the next line tries again
                timer.start()
                self._timer = timer

    def _tell(self, kind: _Kind, held: int) -> None:
        name, level, text = kind
        message = f"{held} more lines like this one were held back: {text}"
        record = logging.makeLogRecord(
            {"name": name, "levelno": level, "levelname": logging.getLevelName(level), "msg": message, "burst": 0}
        )
        self._handler.acquire()
        try:
            self._handler.emit(record)
        finally:
            self._handler.release()
