"""From times on one and two cores to times on N: the model that `docs/simulator.md` states. Fixed before any result.

A layer of T tasks on c ranks takes `serial + parallel ceil(T / c) / T + turn (c - 1)`:

- `turn`: what a further rank adds to the turn from one layer to the next, measured by `benchmarks.gang`;
- `serial` and `parallel`: Amdahl's law through the times on one core and on the most that were measured, after tasks
  and turns are taken into account. What a gang loses for whatever reason (memory, kernel, other ranks) is `serial`: the
  pessimistic reading of two points. Versions of a layer have their mean shares of both: two points each say too little
  to tell them apart by, and on many cores the luckiest of five would seem to gain much;
- not below the compulsory traffic at the bandwidth of all cores together;
- more ranks than are best take no part, as in the executor (`max_ranks`), so no time grows with the cores.

Where times were measured they are kept as they are. Of models that were measured in batches the whole is scaled by
`row_scaling.py`, and what is said above says only how it is shared out among the layers.
"""

from collections.abc import Mapping
from dataclasses import replace
from operator import mul
from statistics import fmean

from gangway.scheduler.profiles import ModelProfile
from gangway.simulator.measured import MeasuredModel
from gangway.simulator.row_scaling import TURN_US, Losses, RowTimes, losses, scale_rows

LEVEL_OF_A_FULL_CORE = 0.36  # the level that a core at full bandwidth makes for the other one of two
MAX_SLOPE = 4.0  # larger ones, and negative ones, are of layers of some microseconds: noise


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
