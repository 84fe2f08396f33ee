"""A record of the log as a line: text for people, or a JSON object."""

import json
import logging
import re
from datetime import UTC, datetime
from typing import Final

SUPERVISOR: Final = "supervisor"
_TEXT: Final = "%(asctime)s %(levelname)s %(source)s: %(message)s"
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


class TextFormatter(logging.Formatter):
    """One line per record, but for tracebacks. `source`: the process.

    A message may quote a client, who shall not be able to begin a line of the log: control characters are escaped.
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
