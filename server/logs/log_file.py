"""The file that the log is written to."""

import logging
import logging.handlers
import sys
import time
from contextlib import suppress
from typing import Final

COMPLAINT_SECONDS: Final = 60.0


class LogFile(logging.handlers.WatchedFileHandler):
    """Appends to a file, opened again when it has been moved away or removed. Raises OSError if it cannot be opened.

    While it cannot be written (no space, no folder) lines go to standard error, and every minute one that says why.
    """

    def __init__(self, path: str) -> None:
        self._complained = -COMPLAINT_SECONDS
        super().__init__(path, encoding="utf-8", errors="backslashreplace")

    def emit(self, record: logging.LogRecord) -> None:
        """Write one record, somewhere."""
        try:
            super().emit(record)
        except OSError:  # of opening it again
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - the library's name
        """Write the record to standard error instead, for the exception that is being handled."""
        error, now = sys.exc_info()[1], time.monotonic()
        with suppress(OSError, ValueError):
            if now - self._complained >= COMPLAINT_SECONDS:
                self._complained = now
                print(f"gangway serve: cannot write the log to {self.baseFilename}: {error}", file=sys.stderr)
            print(self.format(record), file=sys.stderr, flush=True)
