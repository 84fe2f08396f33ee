"""Fits VELTAIR's proxy (ASPLOS 2022, section 4.3) to counters and levels that were measured together. Pure.

What one model's counters tell is as much about that model as about its neighbours: so it is fitted to all models that
were measured on the machine.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from gangway.artifact.counter_log import CounterLog, CounterSample
from gangway.artifact.proxy import InterferenceProxy

Columns = npt.NDArray[np.float64]  # [samples, counters]
LEAST_SAMPLES = 8
LEAST_LEVEL = 0.05  # root mean square: a line through less than that is noise


@dataclass(frozen=True)
class ProxyFit:
    """The line, and how good it is: see `gangway.artifact.proxy.InterferenceProxy`."""

    constant: float
    per_access: float
    per_miss_rate: float
    pca_share: float
    r_squared: float
    samples: int


def pooled_proxy(machine_id: str, events: tuple[str, ...], logs: Sequence[CounterLog]) -> InterferenceProxy | None:
    """Return the line through the samples of all models (a log each) that counted these events; None as `fit_proxy`.

    Every sample counts alike. Rates of different events cannot be compared: other logs are left out.
    """
    pool = [log.samples for log in logs if log.events == events and log.samples]
    fit = fit_proxy([sample for samples in pool for sample in samples])
    if fit is None:
        return None
    return InterferenceProxy(machine_id, accesses=events[0], misses=events[1], models=len(pool), **asdict(fit))


def fit_proxy(samples: Sequence[CounterSample]) -> ProxyFit | None:
    """Return the least-squares line of the level; None where there are too few samples or hardly any interference."""
    levels = np.array([sample.level for sample in samples])
    if len(samples) < LEAST_SAMPLES or np.sqrt((levels**2).mean()) < LEAST_LEVEL:
        return None
    columns = np.array([(sample.accesses, sample.miss_rate, *sample.others) for sample in samples])
    pair = columns[:, :2]
    # Columns of very different size: in units of their deviation, so that none counts as nought.
    standard, units = _standardised(pair)
    slopes = np.linalg.lstsq(standard, levels - levels.mean(), rcond=None)[0] / units
    constant = levels.mean() - pair.mean(axis=0) @ slopes
    error = ((levels - constant - pair @ slopes) ** 2).sum()
    spread = ((levels - levels.mean()) ** 2).sum()
    return ProxyFit(
        float(constant),
        per_access=float(slopes[0]),
        per_miss_rate=float(slopes[1]),
        pca_share=_pca_share(columns),
        r_squared=float(1 - error / spread) if spread > 0 else 0.0,
        samples=len(samples),
    )


def _pca_share(columns: Columns) -> float:
    """Return the share of variance in the first two principal components of standardised columns."""
    variances = np.linalg.svd(_standardised(columns)[0], compute_uv=False) ** 2
    return float(variances[:2].sum() / variances.sum()) if variances.any() else 1.0


def _standardised(columns: Columns) -> tuple[Columns, Columns]:
    """Return columns about their means in units of their deviations, and the units; what stands still is all nought."""
    deviation = columns.std(axis=0)
    moves = deviation > 1e-12 * np.abs(columns).max(axis=0)
    units = np.where(moves, deviation, 1.0)
    return np.where(moves, (columns - columns.mean(axis=0)) / units, 0.0), units
