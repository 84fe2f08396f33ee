"""The log of the whole server: the supervisor writes it, for itself and for every process that it has started."""

import asyncio
import io
import json
import logging
import logging.handlers
import os
import re
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Final, TextIO

from gangway.artifact.precision import BF16
from gangway.base.files import append_whole
from gangway.base.logs import ALWAYS, RateLimit, decode, fields, set_levels
from gangway.server.messages import LogSettings, ModelReady
from gangway.server.statistics import VersionFigures

_log = logging.getLogger(__name__)

SUPERVISOR: Final = "supervisor"
_TEXT: Final = "%(asctime)s %(levelname)s %(source)s: %(message)s"
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")

MAX_PART_BYTES: Final = 64 * 1024  # read at a time; a longer line comes in parts

COMPLAINT_SECONDS: Final = 60.0

MAX_WAIT_MS: Final = 200  # for a reader, once: after a lost line there is no wait until the next one is taken

PERIOD_S = 60.0

KIND_CHARACTERS: Final = 60
_DIGITS: Final = re.compile(r"[0-9a-fx]*\d[0-9a-fx]*")
_LEVELS: Final = {b"V": 10, b"I": 20, b"W": 30, b"E": 40, b"F": 50}  # as Python's logging has them
_LEVELS_OF_SYSLOG: Final = (50, 50, 50, 40, 30, 20, 20, 10)
# How lines begin that libraries write: Google's, onnxruntime's (which may be coloured), `write_log_line`'s and
# `pb_utils.Logger`'s.
_LEVEL: Final = re.compile(
    rb"([IWEF])\d{4} \d\d:\d\d:\d\d|(?:\x1b\[[\d;]*m)*[\d-]+ [\d:.]+ \[([VIWEF]):onnxruntime|<([0-7])>"
)
# What onnxruntime's parts say in sandboxes and on new CPUs, and which has no consequence.
_NOISE: Final = re.compile(rb"(Error|Warning) in cpuinfo: |onnxruntime cpuid_info warning: ")


class ServerLog:
    """Python's logging of the supervisor, from now on, and what its children say. Raises OSError for a file."""

    def __init__(self, settings: LogSettings) -> None:
        self.settings = settings
        self._handler = LogFile(settings.file) if settings.file else StandardError()
        self._handler.addFilter(lambda record: self.settings.levels.allow(record.levelno))
        self._limit = RateLimit(self._handler)
        self._outputs: set[ChildOutput] = set()
        self._last_words: dict[str, str] = {}  # by child
        logging.getLogger().handlers = [self._handler]
        self.apply(settings)

    def apply(self, settings: LogSettings) -> None:
        """Write by these settings from now on; the file stays what it is."""
        self.settings = settings
        self._handler.setFormatter(formatter_of(settings.format))
        set_levels(settings.levels)

    @contextmanager
    def of_child(self, name: str, level: int = logging.ERROR) -> Iterator[int]:
        """Yield a descriptor to start a child with, as its standard error. Only with an event loop running.

        `level`: of lines that do not tell theirs.
        """
        output = ChildOutput(lambda line: self._write(name, line, level), self._outputs.discard)
        self._outputs.add(output)
        try:
            yield output.child_end
        finally:
            output.close_child_end()

    def last_words_of(self, name: str) -> str:
        """Return the last line that processes of the server of this name have written; empty if there is none."""
        return self._last_words.get(name, "")

    @contextmanager
    def details_of_child(self, name: str) -> Iterator[int]:
        """Yield the same for a child that has nothing to say but details: nowhere, unless these are wanted."""
        if not self.settings.verbose_level:
            yield subprocess.DEVNULL
            return
        with self.of_child(name, logging.DEBUG) as descriptor:
            yield descriptor

    async def finish(self, timeout_seconds: float) -> None:
        """Write what children have said to their end, and what was held back."""
        ends = [asyncio.ensure_future(output.ended.wait()) for output in self._outputs]
        if ends:
            _, late = await asyncio.wait(ends, timeout=timeout_seconds)
            for end in late:
                end.cancel()
        self._limit.report(everything=True)

    def _write(self, name: str, line: bytes, foreign_level: int) -> None:
        content = decode(line)
        if content is None:
            if line.strip():
                foreign = _foreign_record(name, line, foreign_level)
                self._keep(name, foreign.getMessage(), foreign_level)
                self._handler.handle(foreign)
            return
        self._keep(name, content.get("exception") or content["message"], foreign_level)
        if content.get("lost"):
            text = f"{content['lost']} lines of the {name} were lost: it wrote more than could be read"
            self._handler.handle(_record(name, logging.WARNING, text))
        level = content["level"]
        own = {key: content[key] for key in ("fields",) if key in content}
        record = {"name": content["logger"], "created": content["time"], "msecs": content["time"] % 1 * 1000, **own}
        record |= {"exc_text": content.get("exception"), "burst": 0}  # its own process has held back what repeats
        self._handler.handle(_record(name, level, content["message"], **record))

    def _keep(self, name: str, text: str, foreign_level: int) -> None:
        if foreign_level >= logging.ERROR:  # the server's own processes, whose names are few
            self._last_words[name] = text.splitlines()[-1] if text else ""


def _record(source: str, level: int, message: str, **more: object) -> logging.LogRecord:
    basis = {"name": __name__, "levelno": level, "levelname": logging.getLevelName(level), "msg": message}
    return logging.makeLogRecord({**basis, "source": source, **more})


def _foreign_record(source: str, line: bytes, level: int) -> logging.LogRecord:
    """Return the record of a line that did not come through Python's logging: mostly the last output of a process that
    dies.
    """
    if found := _LEVEL.match(line):
        if found[3]:
            level, line = _LEVELS_OF_SYSLOG[int(found[3])], line[found.end() :]
        else:
            level = _LEVELS[found[1] or found[2]]
    elif _NOISE.match(line):
        level = logging.DEBUG
    text = line.decode(errors="backslashreplace").rstrip()
    kind = f"{source}: {_DIGITS.sub('0', text[:KIND_CHARACTERS])}"
    return _record(source, level, text, kind=kind)


class ChildOutput:
    """What a child process writes to standard error, line by line: a pipe that the event loop reads to its end.

    `on_line` gets lines without their ends. The child's end never blocks: a child that writes more than is read loses
    lines, not time.
    """

    def __init__(self, on_line: Callable[[bytes], None], on_end: Callable[["ChildOutput"], None]) -> None:
        self._on_line = on_line
        self._on_end = on_end
        self._rest = b""
        self._descriptor, self.child_end = os.pipe()
        os.set_blocking(self._descriptor, False)
        os.set_blocking(self.child_end, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._descriptor, self._read)
        self.ended = asyncio.Event()

    def close_child_end(self) -> None:
        """Leave the child's end to the child alone."""
        os.close(self.child_end)

    def _read(self) -> None:
        try:
            data = os.read(self._descriptor, MAX_PART_BYTES)
        except BlockingIOError:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > MAX_PART_BYTES):
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._on_line(line)
        if not data:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self.ended.set()
            self._on_end(self)


class _WholeLines(io.TextIOWrapper):
    """A text file that has a line whole, or not at all."""

    def write(self, line: str, /) -> int:
        """Write a line at once. Raises OSError."""
        append_whole(self.fileno(), line.encode(errors="backslashreplace"))
        return len(line)


class LogFile(logging.handlers.WatchedFileHandler):
    """Appends to a file, opened again when it has been moved away or removed. Raises OSError if it cannot be opened.

    While it cannot be written (no space, no folder) lines go to standard error, and every minute one that says why.
    A line is in the file whole or not at all.
    """

    def __init__(self, path: str) -> None:
        self._complained = -COMPLAINT_SECONDS
        super().__init__(path, encoding="utf-8", errors="backslashreplace")

    def _open(self) -> io.TextIOWrapper:
        return _WholeLines(open(self.baseFilename, "ab"))

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


class StandardError(logging.StreamHandler[TextIO]):
    """The log on standard error: writes lines and does not wait. Lines that are not taken are lost, and counted.

    Standard error may be a pipe that nobody reads, or a stopped terminal. A supervisor that waited for it would replace
    no process that has died.
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
        if self._is_watched and not self._poll.poll(0 if self._lost else MAX_WAIT_MS):
            self._lost += 1
            return
        if self._lost:
            text = f"{self._lost} lines were lost: standard error was not read"
            self._lost = 0
            super().emit(logging.makeLogRecord({"name": __name__, "levelno": 30, "levelname": "WARNING", "msg": text}))
        super().emit(record)


class TextFormatter(logging.Formatter):
    """One line per record, but for tracebacks. `source`: the process.

    Control characters are escaped: a message may quote a client, which must not be able to begin a line of the log.
    """

    def __init__(self) -> None:
        super().__init__(_TEXT, defaults={"source": SUPERVISOR})

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the library's name
        """Return the line."""
        record.message = _CONTROL.sub(_escaped, record.message)
        return super().formatMessage(record)


class Iso8601Formatter(TextFormatter):
    """The same, with times like 2026-11-22T08:15:30.123Z."""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802
        """Return the time."""
        return iso8601(record.created, "milliseconds")


class JsonFormatter(logging.Formatter):
    """An object per line: time, level, process, logger, message, and `fields` and `exception` where there are any."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        content = {
            "time": iso8601(record.created, "microseconds"),
            "level": record.levelname,
            "process": getattr(record, "source", SUPERVISOR),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if own := getattr(record, "fields", None):
            content["fields"] = own
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        elif record.exc_text:
            content["exception"] = record.exc_text
        return json.dumps(content, default=str)


def formatter_of(name: str) -> logging.Formatter:
    """Return the formatter of a name in FORMATS."""
    kinds: dict[str, type[logging.Formatter]] = {
        "default": TextFormatter,
        "ISO8601": Iso8601Formatter,
        "json": JsonFormatter,
    }
    return kinds[name]()


def iso8601(seconds: float, precision: str) -> str:
    """Return a time (since the epoch) in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec=precision).replace("+00:00", "Z")


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


class StatisticsLog:
    """Writes a line per model that got requests, every minute and at the end (docs/explanation/targets.md).

    `models` tells what is served, each with a number that changes when its counters begin at zero. `figures` tells what
    has been counted in a row.
    """

    def __init__(
        self, models: Callable[[], Iterable[tuple[ModelReady, int]]], figures: Callable[[int], VersionFigures]
    ) -> None:
        self._models = models
        self._figures = figures
        self._written: dict[int, VersionFigures] = {}  # by that number

    async def run(self) -> None:
        """Write a line per model and period, for ever."""
        while True:
            await asyncio.sleep(PERIOD_S)
            self.write_news()

    def write_news(self) -> None:
        """Write what has happened since the last time."""
        written = {}
        for model, number in self._models():
            before, figures = self._written.get(number), self._figures(model.statistics_row)
            news = figures if before is None else figures.since(before)
            _write(model, news, f"in {PERIOD_S:.0f} s", +Counter(news.own))  # what has not happened is left out
            written[number] = figures
        self._written = written

    def write_all(self) -> None:
        """Write what has happened since the models were loaded."""
        for model, _ in self._models():
            figures = self._figures(model.statistics_row)
            _write(model, figures, "in all", figures.own)


def _write(model: ModelReady, figures: VersionFigures, when: str, own: Mapping[str, int]) -> None:
    answered, failed = figures.success.count, figures.fail.count
    if answered or failed:
        extra = fields(model=model.name, version=model.version, answered=answered, failed=failed, **own) | ALWAYS
        _log.info("%s, version %d, %s: %s", model.name, model.version, when, describe(figures), extra=extra)


def describe(figures: VersionFigures) -> str:
    """Return the counters for people. Times are means over the answered requests."""
    own, answered = figures.own, figures.success.count
    parts = [f"{answered} answered, {own['refused']} refused, {figures.fail.count - own['refused']} failed"]
    if with_target := own["qos_met"] + own["qos_missed"]:
        parts.append(
            f"latency targets met {own['qos_met']}, missed {own['qos_missed']} ({own['qos_met'] / with_target:.1%} met)"
        )
    if answered:
        times_ns = (figures.success.ns, figures.queue.ns, figures.compute("compute_infer").ns)
        mean, queue, compute = (ns / answered / 1e6 for ns in times_ns)
        parts.append(f"mean {mean:.2f} ms (queue {queue:.2f}, compute {compute:.2f})")
        scheduling = [f"{own[key] / answered:.3g} {key}" for key in ("blocks", "conflicts", "preemptions")]
        parts.append(f"{', '.join(scheduling)} per request")
        if figures.executions:
            parts.append(f"{figures.batch_rows / figures.executions:.3g} rows per batch")
        versions = sorted(int(key.removeprefix("version_")) for key in own if key.startswith("version_"))
        parts.append(f"versions {', '.join(map(str, versions)) or '-'}")
        if in_bf16 := own.get(BF16):
            parts.append(f"{in_bf16} in bf16, by deadlines")
    return "; ".join(parts)
