"""The log of a process that the supervisor has started: levels that change while it runs, and lines on the way.

Standard error of such a process is a pipe to the supervisor, the only process that writes the log
(`server/logs/server_log.py`). A record travels as one JSON object, behind a byte that no text begins with; everything
else that comes out of the pipe is a line that something outside Python's logging has written.
"""

import json
import logging
import os
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

from gangway.executor.log_limit import RateLimit

RECORD_MARK: Final = b"\x1e"  # ASCII's record separator
MAX_LINE_BYTES: Final = 4096  # Linux's PIPE_BUF: so much is written whole or not at all
_ROOMS: Final = (MAX_LINE_BYTES, 1200, 300, 100)  # characters per text, tried in this order
_STANDARD_ERROR: Final = 2


@dataclass(frozen=True)
class LogLevels:
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


def fields(**values: object) -> dict[str, Any]:
    """Return the `extra` of a line whose values shall stand by themselves in the JSON form of the log."""
    return {"fields": values}


class PipeHandler(logging.Handler):
    """Writes records for the supervisor. A full pipe is no reason to wait: lines are lost then, and counted."""

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


class ProcessLog:
    """Python's logging of this process, from now on: into the pipe, uncaught exceptions included.

    An uncaught exception of any thread ends the process.
    """

    def __init__(self, levels: LogLevels) -> None:
        self._levels = levels
        handler = PipeHandler()
        handler.addFilter(self._wanted)  # before the limit: what nobody wants does not count
        self._limit = RateLimit(handler)
        logging.getLogger().handlers = [handler]
        self.set(levels)
        sys.excepthook = _log_uncaught
        threading.excepthook = self._end_process

    def set(self, levels: LogLevels) -> None:
        """Log these lines from now on."""
        self._levels = levels
        logging.getLogger().setLevel(levels.threshold)

    def finish(self) -> None:
        """Say what was held back; for a process that is about to end."""
        self._limit.report(everything=True)

    def _wanted(self, record: logging.LogRecord) -> bool:
        return self._levels.allow(record.levelno)

    def _end_process(self, arguments: threading.ExceptHookArgs) -> None:
        """End the process with its thread: others rely on each thread, and the supervisor replaces processes only."""
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
