"""The exporter's process: `python -m gangway.server.tracing.exporter`, started by the supervisor (exporter_control.py).

It gets traced requests from front ends and writes them to a file, or sends them to a collector. It has ordinary
priority, so it comes after everything that serves.
"""

import argparse
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Protocol

from gangway.executor.logs import LogLevels, ProcessLog
from gangway.executor.process import die_with_parent
from gangway.server import json_dataclass
from gangway.server.tracing.config import OPENTELEMETRY, TraceConfig
from gangway.server.tracing.record import TraceRecord, decode
from gangway.server.tracing.trace_file import TraceFile

MAX_PACKET_BYTES = 1 << 20
TICK_SECONDS = 0.25
NICE = 5
STOP = b"stop"
IDS_PER_LIFE = 10**9  # numbers of traces: those of a successor begin beyond
_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Where traces go."""

    def take(self, record: TraceRecord) -> None:
        """Accept a trace."""

    def tick(self) -> None:
        """Do what is due; called a few times a second."""

    def close(self) -> None:
        """Get rid of everything that is left."""


def make_sink(config: TraceConfig, predecessors: int) -> Sink:
    """Return what the configuration says."""
    first_id = predecessors * IDS_PER_LIFE + 1
    if config.mode == OPENTELEMETRY:
        from gangway.server.tracing.spans import Spans  # noqa: PLC0415 - large, and only installed with the extra

        return Spans(config, first_id)
    return TraceFile(Path(config.file), first_id, continues=predecessors > 0)


def serve(packets: socket.socket, sink: Sink) -> None:
    """Take traces until the supervisor says stop, or is gone."""
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
            _log.exception("a packet of traces makes no sense")
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
    sink = make_sink(json_dataclass.from_stdin(TraceConfig), options.predecessors)
    serve(socket.socket(fileno=options.fd), sink)
    sink.close()
    log.finish()
    os._exit(0)  # threads of the SDK may still be waiting for a collector


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
