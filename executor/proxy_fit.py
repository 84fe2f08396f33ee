"""Fits VELTAIR's proxy (ASPLOS 2022, section 4.3) to counters and levels that were measured together. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

LEAST_SAMPLES = 8
LEAST_LEVEL = 0.05  # root mean square: a line through less than that is noise


@dataclass(frozen=True)
class CounterSample:
    """Rates on a core per thousand cycles, and the level of interference at that time.

    `others`: of any further counters, for the analysis of variance alone.
    """

    accesses: float
    misses: float
    level: float
    others: tuple[float, ...] = ()

    @property
    def miss_rate(self) -> float:
        """Misses per access."""
        return self.misses / self.accesses if self.accesses > 0 else 0.0


@dataclass(frozen=True)
class ProxyFit:
    """The line, and how good it is: see `gangway.artifact.proxy.InterferenceProxy`."""

    constant: float
    per_access: float
    per_miss_rate: float
    pca_share: float
    r_squared: float
    samples: int


def fit_proxy(samples: Sequence[CounterSample]) -> ProxyFit | None:
    """Return the least-squares line of the level; None where there are too few samples or hardly any interference."""
    levels = np.array([sample.level for sample in samples])
    if len(samples) < LEAST_SAMPLES or np.sqrt((levels**2).mean()) < LEAST_LEVEL:
        return None
    columns = np.array([(sample.accesses, sample.miss_rate, *sample.others) for sample in samples])
    design = np.column_stack([np.ones(len(samples)), columns[:, :2]])
    # Columns of very different size: in units of their deviation, so that none counts as nought.
    scale = np.array([1.0, *(columns[:, :2].std(axis=0) + 1e-30)])
    line = np.linalg.lstsq(design / scale, levels, rcond=None)[0] / scale
    error = ((levels - design @ line) ** 2).sum()
    spread = ((levels - levels.mean()) ** 2).sum()
    constant, per_access, per_miss_rate = (float(value) for value in line)
    return ProxyFit(
        constant,
        per_access,
        per_miss_rate,
        pca_share=_pca_share(columns),
        r_squared=float(1 - error / spread) if spread > 0 else 0.0,
        samples=len(samples),
    )


def _pca_share(columns: npt.NDArray[np.float64]) -> float:
    """Return the share of variance in the first two principal components of standardised columns [N, K]."""
    deviation = columns.std(axis=0)
    moving = columns[:, deviation > 1e-12 * np.abs(columns).max(axis=0)]
    if moving.shape[1] == 0:
        return 1.0
    standard = (moving - moving.mean(axis=0)) / moving.std(axis=0)
    variances = np.linalg.svd(standard, compute_uv=False) ** 2
    return float(variances[:2].sum() / variances.sum())
