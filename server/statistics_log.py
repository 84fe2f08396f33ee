"""The supervisor's account of the models in the log: a line per model that was asked something, every minute and at the
end.

Everything in it can be had from ModelStatistics at any time (docs/deadlines.md).
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable

from gangway.executor.log_limit import ALWAYS
from gangway.executor.logs import fields
from gangway.server.counting.figures import Figures, Totals
from gangway.server.front_end_messages import ModelReady

PERIOD_S = 60.0
NOTHING = Totals(0, 0, 0, 0, 0, 0, 0, Counter())
_log = logging.getLogger(__name__)


class StatisticsLog:
    """`models` tells what is served now, `figures` what has been counted in a row."""

    def __init__(self, models: Callable[[], Iterable[ModelReady]], figures: Callable[[int], Figures]) -> None:
        self._models = models
        self._figures = figures
        self._written: dict[int, tuple[ModelReady, Totals]] = {}  # by row, which may be another model's later

    async def run(self) -> None:
        """Write a line per model and period, for ever."""
        while True:
            await asyncio.sleep(PERIOD_S)
            self.write_news()

    def write_news(self) -> None:
        """Write what has happened since the last time."""
        written = {}
        for model in self._models():
            before = self._written.get(model.statistics_row)
            totals = Totals.of(self._figures(model.statistics_row))
            known = before[1] if before is not None and before[0] is model else NOTHING
            _write(model, totals.since(known), f"in {PERIOD_S:.0f} s")
            written[model.statistics_row] = model, totals
        self._written = written

    def write_all(self) -> None:
        """Write what has happened since the models were loaded."""
        for model in self._models():
            _write(model, Totals.of(self._figures(model.statistics_row)), "in all")


def _write(model: ModelReady, totals: Totals, when: str) -> None:
    if totals.answered or totals.failed:
        about = {
            "model": model.name,
            "version": model.version,
            "answered": totals.answered,
            "failed": totals.failed,
        }
        extra = fields(**about, **totals.own) | ALWAYS
        _log.info("%s, version %d, %s: %s", model.name, model.version, when, describe(totals), extra=extra)


def describe(totals: Totals) -> str:
    """Return the counters for people. Times are means over the answered requests."""
    own, answered = totals.own, totals.answered
    parts = [f"{answered} answered, {own['refused']} refused, {totals.failed - own['refused']} failed"]
    if with_target := own["qos_met"] + own["qos_missed"]:
        parts.append(f"QoS met {own['qos_met']}, missed {own['qos_missed']} ({own['qos_met'] / with_target:.1%} met)")
    if answered:
        mean, queue, compute = (ns / answered / 1e6 for ns in (totals.total_ns, totals.queue_ns, totals.compute_ns))
        parts.append(f"mean {mean:.2f} ms (queue {queue:.2f}, compute {compute:.2f})")
        scheduling = [f"{own[key] / answered:.3g} {key}" for key in ("blocks", "conflicts", "preemptions")]
        parts.append(f"{', '.join(scheduling)} per request")
        if totals.executions:
            parts.append(f"{totals.batch_rows / totals.executions:.3g} rows per batch")
        versions = sorted(int(key.removeprefix("version_")) for key in own if key.startswith("version_"))
        parts.append(f"versions {', '.join(map(str, versions)) or '-'}")
    return "; ".join(parts)
