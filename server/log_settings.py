"""Settings of the log, as the command line and the protocol's LogSettings have them."""

from dataclasses import dataclass
from typing import Final

from gangway.executor.logs import LogLevels

FORMATS: Final = ("default", "ISO8601", "json")
MAX_VERBOSE: Final = 2**31 - 1


@dataclass(frozen=True)
class LogSettings:
    """All of them; also a message between supervisor and front end, in both directions, when they have changed.

    `file` empty: standard error. Which lines are written is a matter of `info`, `warning`, `error` and
    `verbose_level` (0: no details), each by itself.
    """

    file: str = ""
    info: bool = True
    warning: bool = True
    error: bool = True
    verbose_level: int = 0
    format: str = "default"

    @property
    def levels(self) -> LogLevels:
        """Which lines are wanted."""
        return LogLevels(self.info, self.warning, self.error, self.verbose_level)
