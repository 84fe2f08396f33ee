"""How far a compile job is: a bar on a terminal, one line per model elsewhere."""

import logging
from types import TracebackType

from gangway.artifact.console import Console, ProgressBars

_log = logging.getLogger(__name__)


class ProgressDisplay:
    """Shows the phases of one job while it is open. A model that is found in the cache shows nothing."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._phase = ""
        self._bar: ProgressBars | None = None
        console = Console(stderr=True)
        if console.is_terminal:
            self._bar = ProgressBars(console)
            self._task = self._bar.add_task(name, visible=False)

    def update(self, phase: str, done: int, total: int) -> None:
        """Show that `done` of `total` steps of a phase are done."""
        if phase == "key":  # asking the cache
            return
        if self._bar is not None:
            text = f"compiling {self._name}: {phase}"
            self._bar.update(self._task, description=text, completed=done, total=total, visible=True)
        elif not self._phase:
            _log.info("compiling %s", self._name)
        self._phase = phase

    def __enter__(self) -> "ProgressDisplay":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
