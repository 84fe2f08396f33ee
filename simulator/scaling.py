"""From times on one and two cores to times on N: the model of `docs/explanation/simulator.md`.

A layer of T tasks on c ranks takes `serial + parallel ceil(T / c) / T + turn (c - 1)`:

- `turn`: what a further rank adds to an advance from one layer to the next, measured by `benchmarks.kernels.gang`;
- `serial` and `parallel`: Amdahl's law through the times on one core and on the most that were measured, after tasks
  and turns are taken into account. What a gang loses for whatever reason (memory, kernel, other ranks) is `serial`: the
  pessimistic reading of two points. Versions of a layer have their mean shares of both: two points each say too little
  to tell them apart by, and on many cores the luckiest of five would seem to gain much;
- not below the compulsory traffic at the bandwidth of all cores together;
- more ranks than are best take no part, as in the executor (`max_ranks`), so no time grows with the cores.

Times that were measured are kept as they are. Where batches were measured, too, the times of the whole model follow
from them, and the formula above only shares them out among the layers. A gang of c ranks of a machine of N cores takes
for b rows

    T(c, b) = (inside + outside - 1) shared(c, b) + outside serial(b)
    shared(c, b) = ideal(c, b) (1 - serial(b) / ideal(1, b))

- `ideal`: each layer's time on one core, as its tasks let c ranks share it, each rank with the turns that it costs.
  On one core b rows take `fixed + b row`: the closest line through all batches, neither part negative;
- `inside`: by how much the other ranks of a gang slow each one down, `outside`: the other gangs. 1 if there are none;
  if they have all other cores, as measured; in between by the share of the other cores that they have;
- `serial`: Amdahl's part, `start + share x ideal(1, b)`: two numbers through all batches, not one for each layer and
  batch. Of one time on two cores all noise would become a serial part, never the opposite (times cannot be shorter than
  ideal ones), and on 16 cores it would weigh eight times as much.

The serial part comes from gangs of all measured cores beside gangs of one, with as many rows, that have all those cores
at the same time. What the machine's cores do to each other, and what others did to them, is in both. Single times of
batches are not kept: where the next larger batch was measured in a worse moment, a split would seem to gain by it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import mul
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from gangway.scheduler.profiles import ModelProfile
from gangway.simulator.measured import MeasuredModel

Floats = NDArray[np.float64]
TURN_US = 0.2  # benchmarks.kernels.gang on a quiet machine: two ranks 0.17 to 0.22 us
MOST_ROWS = 1024  # batches are predicted up to here
LEVEL_OF_A_FULL_CORE = 0.36  # the level that a core at full bandwidth makes for the other one of two
MAX_SLOPE = 4.0  # larger ones, and negative ones, are of layers of some microseconds: noise


@dataclass(frozen=True)
class Losses:
    """What gangs lose. `residual`: of the measured times on all cores, relative, root mean square over the batches.

    `uncertain`: standard error of `share`, the batches taken as samples.
    """

    crowding: float  # a gang of one core takes so many times as long while every other core does the same,
    inside: float  # and the rank of a gang of all cores, which share what they read
    start_us: float
    share: float
    residual: float = 0.0
    uncertain: float = 0.0

    def serial_us(self, alone_us: Floats) -> Floats:
        """Return the serial part of what takes so long on one core."""
        return np.minimum(self.start_us + self.share * alone_us, alone_us)


@dataclass(frozen=True)
class RowTimes:
    """The whole model: `alone_us`, `together_us` [N, B], on c cores at [c - 1], `batches[j]` rows at [j].

    `together_us`: while gangs of so many cores do the same on all the others.
    """

    batches: tuple[int, ...]
    alone_us: Floats
    together_us: Floats


def scale_model(
    model: MeasuredModel,
    cores: int,
    model_id: int,
    qos_us: float | None = None,
    memory_share: float = 1.0,
    lost: Losses | None = None,
) -> ModelProfile:
    """Return the profile of a model on `cores` cores.

    `memory_share`: bandwidth per core, as a part of what the measured machine has per core. `lost`: in place of the
    losses that were measured, for a model with batches.
    """
    curves = [version_curves(model, layer, cores, memory_share) for layer in range(len(model.latency_us))]
    profile = ModelProfile(
        model_id=model_id,
        name=model.model_name,
        layers=len(curves),
        max_ranks=max(_useful(curve) for versions in curves for curve in versions),
        latency_us=tuple(curves),
        slope=tuple(tuple(min(max(0.0, slope), MAX_SLOPE) for slope in layer) for layer in model.slope),
        memory_us=model.memory_us,
        compute_us=model.compute_us,
        isolated_us=sum(versions[0][-1] for versions in curves),
        qos_us=qos_us,
        measured=True,
    )
    if len(model.batches) == 1:
        return profile
    lost = lost or losses(model)
    return _with_rows(profile, scale_rows(model, cores, memory_share, lost), lost.crowding)


def version_curves(
    model: MeasuredModel, layer: int, cores: int, memory_share: float = 1.0
) -> tuple[tuple[float, ...], ...]:
    """Return the times of a layer's versions on 1 to `cores` cores."""
    times_us = [dict(zip(model.cores, row, strict=True)) for row in model.latency_us[layer]]
    versions = list(zip(times_us, model.tasks[layer], strict=True))
    divided = [_shares(*version) for version in versions if _divides(*version)]
    mean = tuple(map(fmean, zip(*divided, strict=True)))
    return tuple(
        layer_curve(*version, cores, model.memory_us[layer], memory_share, mean if _divides(*version) else ())
        for version in versions
    )


def layer_curve(
    measured_us: Mapping[int, float],
    tasks: int,
    cores: int,
    memory_us: float = 0.0,
    memory_share: float = 1.0,
    shares: tuple[float, ...] = (),
) -> tuple[float, ...]:
    """Return a layer's time on 1 to `cores` cores. `measured_us`: by number of cores, 1 among them.

    `shares`: serial and parallel part of the time on one core; none: those of the measured times.
    """
    serial_us, parallel_us = (share * measured_us[1] for share in shares or _shares(measured_us, tasks))
    floor_us = min(memory_us, measured_us[1]) / (cores * memory_share)  # less than m: its data come from a cache
    curve: list[float] = []
    for count in range(1, cores + 1):
        time_us = measured_us.get(count)
        if time_us is None:
            time_us = max(floor_us, serial_us + parallel_us * _largest_part(tasks, count) + TURN_US * (count - 1))
            time_us = min(time_us, curve[-1])
        curve.append(time_us)
    return tuple(curve)


def scale_rows(model: MeasuredModel, cores: int, memory_share: float = 1.0, lost: Losses | None = None) -> RowTimes:
    """Return the times of batches on 1 to `cores` cores, alone and among gangs like it.

    `memory_share`: bandwidth per core, as a part of what the measured machine has per core. `lost`: in place of what
    was measured, to see what hangs on it.
    """
    batches = tuple(1 << power for power in range(MOST_ROWS.bit_length()))
    alone_us = _one_core_us(model, batches)
    ideal_us = _ideal_us(model, batches, alone_us, cores)
    total_us, lost = ideal_us[0], lost or losses(model)
    serial_us = lost.serial_us(total_us)
    shared_us = ideal_us * (1 - serial_us / total_us)
    counts = np.arange(1, cores + 1)[:, np.newaxis]
    inside = 1 + (lost.inside - 1) * (counts - 1) / max(1, cores - 1)
    outside = 1 + (lost.crowding - 1) * (cores - counts) / max(1, cores - 1)
    bytes_us = np.minimum(np.array(model.memory_us)[:, np.newaxis] * batches, alone_us).sum(axis=0) / memory_share
    alone = np.maximum(inside * shared_us + serial_us, bytes_us / cores)
    together = np.maximum((inside + outside - 1) * shared_us + outside * serial_us, bytes_us / counts)
    alone = np.minimum.accumulate(alone)  # ranks that do not pay take no part
    return RowTimes(batches, alone, np.maximum(np.minimum.accumulate(together), alone))


def losses(model: MeasuredModel) -> Losses:
    """Return what the gang of all measured cores loses, by least squares of relative errors over all batches.

    Neither part of the serial time is negative. If gangs of all cores do more than gangs of one, nothing of them is
    serial: their ranks disturb each other less.
    """
    alone_us, beside_us = np.array(model.isolated_us[0]), np.array(model.together_us[0])
    crowding = max(1.0, float(np.median(beside_us / alone_us)))
    ideal_us = _ideal_us(model, model.batches, _one_core_us(model, model.batches), model.cores[-1])
    parallel = ideal_us[-1] / ideal_us[0]
    rest = 1 - parallel * beside_us / alone_us
    if rest.min() <= 0:  # a core takes no share of the others' work: nothing can be told apart
        return Losses(crowding, crowding, 0.0, 0.0)
    gang_us = np.array(model.isolated_us[-1])
    serial = (gang_us - parallel * beside_us) / rest / alone_us
    start_us, share = _fit(1 / alone_us, serial)
    within = np.clip(np.median(gang_us / (parallel * alone_us)), 1, crowding) if not start_us + share else crowding
    predicted_us = parallel * alone_us * (within if not start_us + share else beside_us / alone_us)
    predicted_us = predicted_us + (start_us + share * alone_us) * rest
    residual = float(np.sqrt(np.mean((predicted_us / gang_us - 1) ** 2)))
    uncertain = float(serial.std() / np.sqrt(max(1, len(serial) - 1)))
    return Losses(crowding, float(within), start_us, share, residual, uncertain)


def _with_rows(profile: ModelProfile, times: RowTimes, crowding: float) -> ModelProfile:
    """Return the profile with the times of batches; its layers add up to those of one row.

    Slopes: such that a machine full of gangs of one core slows them by the measured `crowding`.
    """
    by_count = [sum(versions[0][index] for versions in profile.latency_us) for index in range(profile.cores)]
    factors = (times.alone_us[:, 0] / by_count).tolist()
    latency_us = tuple(tuple(tuple(map(mul, curve, factors)) for curve in versions) for versions in profile.latency_us)
    rows_factor = times.alone_us / times.alone_us[:, :1]
    together_factor = times.together_us / times.alone_us[:, :1]
    demand = sum(profile.memory_us) / times.alone_us[0, 0]  # of one core's bandwidth
    slope = min((crowding - 1) / (LEVEL_OF_A_FULL_CORE * demand), MAX_SLOPE) if demand else 0.0
    useful = max(_useful(tuple(column)) for column in times.alone_us.T.tolist())
    return replace(
        profile,
        max_ranks=max(profile.max_ranks, useful),
        latency_us=latency_us,
        slope=tuple((slope,) * len(versions) for versions in latency_us),
        isolated_us=sum(versions[0][-1] for versions in latency_us),
        batches=times.batches,
        rows_factor=tuple(map(tuple, rows_factor.tolist())),
        together_factor=tuple(map(tuple, together_factor.tolist())),
    )


def _useful(curve: tuple[float, ...]) -> int:
    return curve.index(min(curve)) + 1


def _divides(measured_us: Mapping[int, float], tasks: int) -> bool:
    """Whether the most cores that were measured could share the layer at all."""
    return _largest_part(tasks, max(measured_us)) < 1


def _shares(measured_us: Mapping[int, float], tasks: int) -> tuple[float, float]:
    """Return serial and parallel share of the time on one core, so that the most cores take what was measured."""
    if not _divides(measured_us, tasks):
        return 1.0, 0.0
    most = max(measured_us)
    part = _largest_part(tasks, most)
    worked = max(0.0, measured_us[most] - TURN_US * (most - 1)) / measured_us[1]
    serial = min((worked - part) / (1 - part), 1.0)
    if serial < 0:
        return 0.0, worked / part  # caches: more than twice as fast on two
    return serial, 1.0 - serial


def _largest_part(tasks: int, ranks: int) -> float:
    return -(-tasks // ranks) / tasks


def _fit(x: Floats, y: Floats) -> tuple[float, float]:
    """Return (a, b) of y = a x + b, the closest line of which neither is negative."""
    centred = x - x.mean()
    spread = float(centred @ centred)
    slope = float(centred @ y) / spread if spread else 0.0
    constant = float(y.mean()) - slope * float(x.mean())
    if slope < 0:
        return 0.0, max(0.0, float(y.mean()))
    if constant < 0:
        return max(0.0, float(x @ y) / float(x @ x)), 0.0
    return slope, constant


def _one_core_us(model: MeasuredModel, batches: tuple[int, ...]) -> Floats:
    """Return the layers' times on one core [L, B]: a line for each."""
    measured = np.array(model.batches)
    lines = [_fit(1 / measured, np.array(layer[0]) / measured) for layer in model.batch_us]
    return np.array([[fixed_us + rows * row_us for rows in batches] for fixed_us, row_us in lines])


def _ideal_us(model: MeasuredModel, batches: tuple[int, ...], alone_us: Floats, cores: int) -> Floats:
    """Return what the layers would take on 1 to `cores` cores if nothing but their tasks and turns counted [C, B]."""
    tasks = np.array([[_tasks(model, layer, rows) for rows in batches] for layer in range(len(alone_us))])
    ranks = np.arange(1, cores + 1)[:, np.newaxis, np.newaxis]
    times_us = alone_us * np.ceil(tasks / ranks) / tasks + TURN_US * (ranks - 1)
    ideal: Floats = np.minimum.accumulate(times_us).sum(axis=1)
    return ideal


def _tasks(model: MeasuredModel, layer: int, rows: int) -> int:
    """Return into how many tasks the layer's version 0 cuts so many rows (`docs/explanation/artifact.md`)."""
    if rows > 1 and model.kernel_rows[layer]:
        return -(-rows // model.kernel_rows[layer]) * model.kernel_tasks[layer]
    return rows * model.tasks[layer][0]
