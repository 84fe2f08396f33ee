"""How each query ended, and the summary per model and in total."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from gangway.workload.arrivals import Floats, Integers

OK = "OK"
Targets = Sequence[float | None]  # microseconds per model; None: best effort


@dataclass(frozen=True)
class Outcomes:
    """Q queries. `status` indexes `statuses`, whose first is "OK"; the others name errors.

    `latency_us` counts from the scheduled arrival to the answer, be it an error or not.
    """

    names: tuple[str, ...]  # of the models
    models: Integers  # [Q], indices of names
    scheduled_us: Floats  # [Q]
    latency_us: Floats  # [Q]
    status: Integers  # [Q]
    statuses: tuple[str, ...] = (OK,)

    def __len__(self) -> int:
        return len(self.models)

    @property
    def answered(self) -> npt.NDArray[np.bool_]:
        """Which queries [Q] got their answer, in time or not."""
        ok: npt.NDArray[np.bool_] = self.status == 0
        return ok

    def select(self, chosen: npt.NDArray[np.bool_]) -> "Outcomes":
        """Return the queries where `chosen` [Q] is true."""
        return replace(
            self,
            models=self.models[chosen],
            scheduled_us=self.scheduled_us[chosen],
            latency_us=self.latency_us[chosen],
            status=self.status[chosen],
        )

    def between(self, begin: int, end: int) -> "Outcomes":
        """Return the queries of these numbers, in the order in which they are here."""
        numbers = np.arange(len(self))
        return self.select((begin <= numbers) & (numbers < end))

    def since(self, time_us: float) -> "Outcomes":
        """Return the queries scheduled at this time or later: what is before is warm-up."""
        return self.select(self.scheduled_us >= time_us)


@dataclass(frozen=True)
class OutcomeRow:
    """One model, or all. Latencies are those of answered queries, in microseconds; None where there were none.

    `satisfied`: by name of the target, the share of all queries that were answered in time (errors are not), None
    for models without a target. Percentiles are interpolated between ranks, as numpy does.
    """

    name: str
    queries: int
    qps: float  # answered per second
    satisfied: Mapping[str, float | None]
    mean_us: float | None
    p50_us: float | None
    p95_us: float | None
    p99_us: float | None
    over_isolated: float | None  # mean over queries of latency / the model's isolated latency
    errors: Mapping[str, int] = field(default_factory=dict)  # by status


@dataclass(frozen=True)
class Summary:
    """A row per model in the mix's order, and one over all queries."""

    models: tuple[OutcomeRow, ...]
    total: OutcomeRow

    def least_satisfied(self, target: str) -> float:
        """Return the smallest share among the models that have this target and any query; 1 if there are none."""
        shares = [row.satisfied[target] for row in self.models if row.queries]
        return min((share for share in shares if share is not None), default=1.0)


def summarise(
    outcomes: Outcomes,
    targets_us: Mapping[str, Targets],
    isolated_us: Sequence[float] | None = None,
    seconds: float | None = None,
) -> Summary:
    """Sum up a run.

    `targets_us`: one or several sets of targets by name ("3x", "4x"), each with one per model. `seconds`: length of
    the run that rates refer to; without it from the first scheduled arrival to the last answer.
    """
    span_s = seconds if seconds is not None else _span_s(outcomes)
    in_time = {name: _in_time(outcomes, targets) for name, targets in targets_us.items()}
    targeted = {name: _per_query(outcomes, targets) > 0 for name, targets in targets_us.items()}
    ratio = outcomes.latency_us / np.asarray(isolated_us)[outcomes.models] if isolated_us is not None else None

    def row(name: str, chosen: npt.NDArray[np.bool_]) -> OutcomeRow:
        good = chosen & outcomes.answered
        latencies = outcomes.latency_us[good]
        p50, p95, p99 = np.percentile(latencies, (50, 95, 99)).tolist() if latencies.size else (None, None, None)
        return OutcomeRow(
            name,
            queries=int(chosen.sum()),
            qps=len(latencies) / span_s if span_s > 0 else 0.0,
            satisfied={label: _mean(in_time[label][chosen & targeted[label]]) for label in targets_us},
            mean_us=_mean(latencies),
            p50_us=p50,
            p95_us=p95,
            p99_us=p99,
            over_isolated=None if ratio is None else _mean(ratio[good]),
            errors=_errors(outcomes, chosen),
        )

    models = tuple(row(name, outcomes.models == index) for index, name in enumerate(outcomes.names))
    return Summary(models, row("total", np.ones(len(outcomes), dtype=np.bool_)))


def _span_s(outcomes: Outcomes) -> float:
    if not len(outcomes):
        return 0.0
    last_us = (outcomes.scheduled_us + outcomes.latency_us).max()
    return float(last_us - outcomes.scheduled_us.min()) / 1e6


def _per_query(outcomes: Outcomes, targets: Targets) -> Floats:
    """Return each query's target [Q]; 0 for best effort."""
    return np.array([target or 0.0 for target in targets])[outcomes.models]


def _in_time(outcomes: Outcomes, targets: Targets) -> npt.NDArray[np.bool_]:
    in_time: npt.NDArray[np.bool_] = outcomes.answered & (outcomes.latency_us <= _per_query(outcomes, targets))
    return in_time


def _mean(values: npt.NDArray[np.generic]) -> float | None:
    return float(values.astype(np.float64).mean()) if values.size else None


def _errors(outcomes: Outcomes, chosen: npt.NDArray[np.bool_]) -> dict[str, int]:
    counts = np.bincount(outcomes.status[chosen], minlength=len(outcomes.statuses)).tolist()
    return {name: count for name, count in zip(outcomes.statuses[1:], counts[1:], strict=True) if count}
