"""Arrivals of queries: a Poisson process, the same for a seed everywhere, or a trace from a file."""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gangway.workload.mix import Mix
from gangway.workload.qos import WorkloadError

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Arrivals:
    """Queries in order of time. `times_us` [Q] from the beginning of the run; `models` [Q] index `mix.models`.

    `rows` [Q]: of each; None: all have one. `clients`: in a closed loop so many queries come at first, and one more
    whenever one is answered. Their `times_us` are 0.
    """

    times_us: Floats
    models: Integers
    rows: Integers | None = None
    clients: int | None = None

    def __len__(self) -> int:
        return len(self.times_us)

    def until(self, time_us: float) -> "Arrivals":
        """Return those before a time."""
        count = int(np.searchsorted(self.times_us, time_us))
        return Arrivals(self.times_us[:count], self.models[:count], None if self.rows is None else self.rows[:count])


def poisson(mix: Mix, rate_per_s: float, count: int, seed: int) -> Arrivals:
    """Return `count` arrivals of a Poisson process; each is of a model drawn by the mix's weights.

    Gaps and models have a stream of random numbers each, so a shorter trace is the beginning of a longer one, and
    another rate stretches the same trace. Raises WorkloadError for a mix whose weights are not resolved.
    """
    if not rate_per_s > 0:
        raise WorkloadError(f"the rate must be positive, not {rate_per_s}")
    gaps_seed, models_seed = np.random.SeedSequence(seed).spawn(2)
    # -log(1 - u) of uniform numbers: `random` is the stream numpy keeps stable.
    gaps = -np.log1p(-np.random.Generator(np.random.PCG64(gaps_seed)).random(count))
    return Arrivals(np.cumsum(gaps) * (1e6 / rate_per_s), _drawn(mix, count, models_seed))


def closed_loop(mix: Mix, clients: int, count: int, seed: int) -> Arrivals:
    """Return `count` queries of so many clients that each wait for an answer before they ask again.

    Each query is of a model drawn by the mix's weights. Raises WorkloadError for weights that are not resolved.
    """
    models_seed = np.random.SeedSequence(seed).spawn(2)[1]
    return Arrivals(np.zeros(count), _drawn(mix, count, models_seed), clients=clients)


def _drawn(mix: Mix, count: int, seed: np.random.SeedSequence) -> Integers:
    drawn = np.random.Generator(np.random.PCG64(seed)).random(count)
    return np.searchsorted(np.cumsum(mix.shares)[:-1], drawn, side="right")


def poisson_for(mix: Mix, rate_per_s: float, seconds: float, seed: int) -> Arrivals:
    """Return the arrivals of the first `seconds` of the trace that `poisson` draws. May be none."""
    expected = rate_per_s * seconds
    arrivals = poisson(mix, rate_per_s, int(expected + 10 * expected**0.5 + 50), seed)
    return arrivals.until(seconds * 1e6)


def bursts(arrivals: Arrivals, size: int, rows: int = 1) -> Arrivals:
    """Return `size` queries of `rows` rows each in place of every one."""
    times_us, models = np.repeat(arrivals.times_us, size), np.repeat(arrivals.models, size)
    return Arrivals(times_us, models, None if rows == 1 else np.full(len(times_us), rows, dtype=np.int64))


def read_trace(path: Path, mix: Mix) -> Arrivals:
    """Read a CSV file with the columns time_us and model (a name of the mix), sorted here by time.

    Raises WorkloadError for wrong content, OSError.
    """
    index = {name: number for number, name in enumerate(mix.names)}
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or not {"time_us", "model"} <= rows[0].keys():
        raise WorkloadError(f"{path}: expected a CSV file with the columns time_us and model, and at least one query")
    try:
        times = np.array([float(row["time_us"]) for row in rows])
        models = np.array([index[row["model"]] for row in rows], dtype=np.int64)
    except (ValueError, TypeError) as error:
        raise WorkloadError(f"{path}: {error}") from error
    except KeyError as error:
        raise WorkloadError(f"{path}: model {error} is not in mix '{mix.name}': {', '.join(mix.names)}") from error
    if not np.isfinite(times).all() or times.min() < 0:
        raise WorkloadError(f"{path}: times must be numbers of at least 0")
    order = np.argsort(times, kind="stable")
    return Arrivals(times[order], models[order])


def write_trace(path: Path, arrivals: Arrivals, mix: Mix) -> None:
    """Write what `read_trace` reads."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("time_us", "model"))
        pairs = zip(arrivals.times_us.tolist(), arrivals.models.tolist(), strict=True)
        writer.writerows((repr(time_us), mix.names[model]) for time_us, model in pairs)
