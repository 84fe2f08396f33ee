"""Lines of a log that repeat themselves are held back and counted: nobody shall fill the disk by asking wrongly."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

PERIOD_SECONDS: Final = 30.0
BURST: Final = 100  # lines of one kind in a period
OFTEN: Final = {"burst": 10}  # `extra` of lines that any client can cause as often as it likes
ALWAYS: Final = {"burst": 0}  # `extra` of lines that come at a rate of their own
MAX_KINDS: Final = 256
_Kind = tuple[str, int, str]
_OTHERS: Final[_Kind] = ("", logging.WARNING, "(of many kinds)")


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
        """Say what was held back in the periods that are over, or in all."""
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
