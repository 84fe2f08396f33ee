"""The log on standard error, which may be a pipe that nobody reads, or a terminal that somebody has stopped."""

import logging
import select
import sys
from contextlib import suppress
from typing import Final, TextIO

PATIENCE_MS: Final = 200  # with who reads too slowly, once: who does not read at all shall not be waited for each time


class StandardError(logging.StreamHandler[TextIO]):
    """Writes lines, and waits for nobody: what is not taken is lost, and a line says how many.

    Otherwise the supervisor would stand still, and replace no process that has died.
    """

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._lost = 0
        self._is_watched = False
        self._poll = select.poll()
        with suppress(OSError, ValueError):  # no descriptor stands behind it
            self._poll.register(sys.stderr.fileno(), select.POLLOUT)
            self._is_watched = True

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, if there is room for it."""
        if self._is_watched and not self._poll.poll(0 if self._lost else PATIENCE_MS):
            self._lost += 1
            return
        if self._lost:
            text = f"{self._lost} lines were lost: standard error was not read"
            self._lost = 0
            super().emit(logging.makeLogRecord({"name": __name__, "levelno": 30, "levelname": "WARNING", "msg": text}))
        super().emit(record)
