"""The log of the whole server: the supervisor writes it, for itself and for every process that it has started."""

import asyncio
import logging
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from gangway.executor.log_limit import RateLimit
from gangway.executor.logs import decode
from gangway.server.logs.child_output import ChildOutput
from gangway.server.logs.formats import formatter_of
from gangway.server.logs.log_file import LogFile
from gangway.server.logs.settings import LogSettings
from gangway.server.logs.standard_error import StandardError

KIND_CHARACTERS: Final = 60
_DIGITS: Final = re.compile(r"[0-9a-fx]*\d[0-9a-fx]*")
_LEVELS: Final = {b"V": 10, b"I": 20, b"W": 30, b"4": 30, b"E": 40, b"F": 50}  # as Python's logging has them
# How lines of libraries begin: Google's, onnxruntime's (which may be coloured), and what is said in `complain.py`.
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
        logging.getLogger().handlers = [self._handler]
        self.apply(settings)

    def apply(self, settings: LogSettings) -> None:
        """Write by these settings from now on; the file stays what it is."""
        self.settings = settings
        self._handler.setFormatter(formatter_of(settings.format))
        logging.getLogger().setLevel(settings.levels.threshold)

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
                self._handler.handle(_foreign_record(name, line, foreign_level))
            return
        if content.get("lost"):
            text = f"{content['lost']} lines of the {name} were lost: it wrote more than could be read"
            self._handler.handle(_record(name, logging.WARNING, text))
        level = content["level"]
        own = {key: content[key] for key in ("fields",) if key in content}
        record = {"name": content["logger"], "created": content["time"], "msecs": content["time"] % 1 * 1000, **own}
        record |= {"exc_text": content.get("exception"), "burst": 0}  # its own process has held back what repeats
        self._handler.handle(_record(name, level, content["message"], **record))


def _record(source: str, level: int, message: str, **more: object) -> logging.LogRecord:
    basis = {"name": __name__, "levelno": level, "levelname": logging.getLevelName(level), "msg": message}
    return logging.makeLogRecord({**basis, "source": source, **more})


def _foreign_record(source: str, line: bytes, level: int) -> logging.LogRecord:
    """Return the record of a line that did not come through Python's logging: mostly somebody's last words."""
    if found := _LEVEL.match(line):
        level = _LEVELS.get(found[1] or found[2] or found[3], logging.ERROR)
        line = line[found.end() :] if found[3] else line
    elif _NOISE.match(line):
        level = logging.DEBUG
    text = line.decode(errors="backslashreplace").rstrip()
    kind = f"{source}: {_DIGITS.sub('0', text[:KIND_CHARACTERS])}"
    return _record(source, level, text, kind=kind)
