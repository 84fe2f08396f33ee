"""Traces as the JSON files that Triton writes (mode triton)."""

import logging
import time
from pathlib import Path
from typing import Final

from gangway.server.tracing.entries import text_of
from gangway.server.tracing.record import TraceRecord

WRITE_SECONDS: Final = 0.5  # so often at most, while traces come in
MAX_HELD: Final = 1000  # traces of one file
MAX_FILE_BYTES: Final = 1 << 30
REPORT_SECONDS: Final = 60.0
_log = logging.getLogger(__name__)


class GrowingFile:
    """One file, a JSON list after every write. `exists`: go on with what is there, else begin anew."""

    def __init__(self, path: Path, exists: bool = False) -> None:
        self._path = path
        self._begun = exists and path.exists()
        self.held: list[str] = []
        self.taken = 0

    def take(self, text: str) -> None:
        """Hold a trace."""
        self.held.append(text)
        self.taken += 1

    def write(self) -> None:
        """Put what is held before the last bracket. A file that has been taken away is begun again. Raises OSError."""
        traces, self.held = self.held, []
        if not traces:
            return
        size = self._path.stat().st_size if self._begun and self._path.exists() else 0
        if size > MAX_FILE_BYTES:
            raise OSError(f"{self._path} has reached {MAX_FILE_BYTES >> 20} MiB")
        with self._path.open("r+b" if size else "wb") as file:
            if size:
                file.seek(size - 1)
            file.write(f"{',' if size else '['}{','.join(traces)}]".encode())
        self._begun = True


class TraceFile:
    """Everything in `path`; or in PATH.0, PATH.1, ..., as many traces in each as their `log_frequency` says.

    `first_id` is the number of the first trace. `continues`: go on with the files of a predecessor.
    """

    def __init__(self, path: Path, first_id: int = 1, continues: bool = False) -> None:
        self._path = path
        self._next_id = first_id
        self._files = {0: GrowingFile(path, continues)}  # by log_frequency
        self._index = 0
        while continues and self._indexed().exists():
            self._index += 1
        self._written_seconds = time.monotonic()
        self._reported_seconds = -REPORT_SECONDS

    def take(self, record: TraceRecord) -> None:
        """Accept a trace."""
        frequency = record.log_frequency
        if frequency not in self._files:
            self._files[frequency] = GrowingFile(self._indexed())
            self._index += 1
        file = self._files[frequency]
        file.take(text_of(record, self._next_id))
        self._next_id += 1 + len(record.steps)
        if frequency and file.taken >= frequency:
            self._write(self._files.pop(frequency))
        elif len(file.held) >= MAX_HELD:
            self._write(file)

    def tick(self) -> None:
        """Write what does not wait for company."""
        if time.monotonic() - self._written_seconds >= WRITE_SECONDS:
            self._written_seconds = time.monotonic()
            self._write(self._files[0])

    def close(self) -> None:
        """Write everything."""
        for file in self._files.values():
            self._write(file)

    def _indexed(self) -> Path:
        return self._path.with_name(f"{self._path.name}.{self._index}")

    def _write(self, file: GrowingFile) -> None:
        traces = len(file.held)
        try:
            file.write()
        except OSError as error:
            if time.monotonic() - self._reported_seconds >= REPORT_SECONDS:
                self._reported_seconds = time.monotonic()
                _log.error("%d traces are lost: %s", traces, error)
