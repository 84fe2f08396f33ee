"""The exporter's process: `python -m gangway.server.tracing.exporter`, started by the supervisor
(`supervisor/exporter.py`).

It gets traced requests from front ends and writes them to a file, or sends them to a collector. It has ordinary
priority, so it comes after everything that serves.
"""

import argparse
import json
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gangway.base.files import append_whole
from gangway.base.logs import LogLevels, ProcessLog
from gangway.base.process import die_with_parent
from gangway.server.process_options import from_stdin
from gangway.server.tracing.record import TensorRecord, TraceRecord, decode
from gangway.server.tracing.settings import OPENTELEMETRY, TraceConfig

if TYPE_CHECKING:
    from gangway.server.tracing.spans import Spans  # which an extra brings

_log = logging.getLogger(__name__)


def text_of(record: TraceRecord, number: int) -> str:
    """Return what Triton writes of a request into its trace file: who it was, its instants in order, its tensors.

    It is JSON without the brackets of the list around it. `number` is the trace's id; the steps of an ensemble have the
    next ones, and that as their parent's.
    """
    who: dict[str, object] = {"id": number, "model_name": record.model, "model_version": record.version}
    if record.request_id:
        who["request_id"] = record.request_id
    parts = [_json(who)]
    if record.timestamps:
        read, sent = record.of_root()[:2], record.of_root()[2:]
        parts += _timestamps(number, [*read, *record.of_compute(), *record.of_model(), *sent])
    parts += [_json(_tensor_entry(tensor, number)) for tensor in record.tensors]
    for place, step in enumerate(record.steps, number + 1):
        parts.append(_json({"id": place, "model_name": step.model, "model_version": step.version, "parent_id": number}))
        if record.timestamps:
            parts += _timestamps(place, [*step.of_model(), *step.of_compute()])
    return ",".join(parts)


def _timestamps(number: int, instants: Iterable[tuple[str, int]]) -> list[str]:
    """Formatted by hand: their names need no escaping, and there are many."""
    in_order = sorted(instants, key=lambda instant: instant[1])
    return [f'{{"id":{number},"timestamps":[{{"name":"{name}","ns":{ns}}}]}}' for name, ns in in_order]


def _tensor_entry(tensor: TensorRecord, number: int) -> dict[str, object]:
    return {
        "id": number,
        "activity": tensor.activity,
        "tensor": {
            "name": tensor.name,
            "data": _values_of(tensor),
            "shape": ",".join(map(str, tensor.shape)),
            "dtype": tensor.datatype,
        },
    }


def _json(entry: dict[str, object]) -> str:
    return json.dumps(entry, separators=(",", ":"))


def _values_of(tensor: TensorRecord) -> str:
    from gangway.artifact.datatypes import numbers_of  # noqa: PLC0415 - with numpy, which few exporters need
    from gangway.python_backend.elements import split_elements  # noqa: PLC0415

    data = tensor.data
    if tensor.datatype == "BYTES":
        elements = split_elements(data, math.prod(tensor.shape))
        return ",".join(json.dumps(element.decode(errors="backslashreplace")) for element in elements)
    return ",".join(map(str, numbers_of(data, tensor.datatype).tolist()))


WRITE_SECONDS: Final = 0.5  # between two writes, at least
MAX_HELD: Final = 1000  # traces of one file
MAX_FILE_BYTES: Final = 1 << 30


class GrowingFile:
    """One file, a JSON list after every write. `exists`: go on with what is there, else begin a new list."""

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
        """Put what is held before the last bracket. A file that has been taken away is begun again.

        Raises OSError; then the file is as it was, and what was held is lost.
        """
        traces, self.held = self.held, []
        if not traces:
            return
        text = f"{','.join(traces)}]".encode()
        if not (self._begun and self._has_appended(text)):
            self._begin(b"[" + text)
        self._begun = True

    def _has_appended(self, text: bytes) -> bool:
        """Append to the list, unless somebody has taken the file away or emptied it."""
        with suppress(FileNotFoundError), self._path.open("r+b", buffering=0) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes > MAX_FILE_BYTES:
                raise OSError(f"{self._path} has reached {MAX_FILE_BYTES >> 20} MiB")
            if size_bytes:
                append_whole(file.fileno(), b"," + text, b"]")
                return True
        return False

    def _begin(self, text: bytes) -> None:
        # A reader finds a list or no file: an empty one is no list.
        path = self._path if self._path.exists() else self._path.with_name(f".{self._path.name}.new")
        try:
            with path.open("wb", buffering=0) as file:
                append_whole(file.fileno(), text)
            if path != self._path:
                path.replace(self._path)
        except OSError:
            if path.is_file():
                path.unlink(missing_ok=True)
            raise


class TraceFile:
    """Traces as the JSON files that Triton writes (mode triton).

    They are in `path`; or in PATH.0, PATH.1, ..., as many traces in each as their `log_frequency` says. `first_id` is
    the number of the first trace. `continues`: go on with the files of a predecessor.
    """

    def __init__(self, path: Path, first_id: int = 1, continues: bool = False) -> None:
        self._path = path
        self._next_id = first_id
        self._files = {0: GrowingFile(path, continues)}  # by log_frequency
        self._index = 0
        while continues and self._indexed().exists():
            self._index += 1
        self._written_seconds = time.monotonic()
        self._lost = 0  # traces, since it was said that the file cannot be written

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
        """Write what is due."""
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
            if not self._lost:
                _log.error("traces are lost from now on, because the trace file cannot be written: %s", error)
            self._lost += traces
            return
        if traces and self._lost:
            _log.warning("the trace file is written again; %d traces were lost", self._lost)
            self._lost = 0


MAX_PACKET_BYTES = 1 << 20
TICK_SECONDS = 0.25
NICE = 5
STOP = b"stop"
IDS_PER_LIFE = 10**9  # numbers of traces: those of a successor begin beyond


def make_sink(config: TraceConfig, predecessors: int) -> "TraceFile | Spans":
    """Return what the configuration says."""
    first_id = predecessors * IDS_PER_LIFE + 1
    if config.mode == OPENTELEMETRY:
        from gangway.server.tracing.spans import Spans  # noqa: PLC0415 - large, and only installed with the extra

        return Spans(config, first_id)
    return TraceFile(Path(config.file), first_id, continues=predecessors > 0)


def serve(packets: socket.socket, sink: "TraceFile | Spans") -> None:
    """Take traces until the supervisor says stop, or has ended."""
    packets.settimeout(TICK_SECONDS)
    while True:
        try:
            packet = packets.recv(MAX_PACKET_BYTES)
        except TimeoutError:
            sink.tick()
            continue
        if packet in (STOP, b""):
            return
        try:
            for record in decode(packet):
                sink.take(record)
        except ValueError:
            _log.exception("traces of a front end are lost, because they cannot be decoded")
        sink.tick()


def main(argv: list[str]) -> int:
    """Run the process."""
    die_with_parent()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="gangway.server.tracing.exporter")
    for name in ("fd", "predecessors", "log-levels"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args(argv)
    os.nice(NICE)
    log = ProcessLog(LogLevels.from_number(options.log_levels))
    sink = make_sink(from_stdin(TraceConfig), options.predecessors)
    serve(socket.socket(fileno=options.fd), sink)
    sink.close()
    log.finish()
    os._exit(0)  # threads of the SDK may still be waiting for a collector


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
