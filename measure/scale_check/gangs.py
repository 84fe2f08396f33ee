"""Gangs of 1 to N cores: a model's latency, and what the simulator predicts from one and two of these cores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gangway.artifact.format import Manifest
from gangway.artifact.profile import Profile, keep_better
from gangway.measure.profiler import profile_model
from gangway.measure.scale_check.section import Chart, Curve, Finding, Row, Section, apart
from gangway.scheduler.profiles import ModelProfile
from gangway.simulator.measured import MeasuredModel, measured_model
from gangway.simulator.scaling import scale_model

EVERY_COUNT: Final = 8  # cores up to which every width is measured
NARROW: Final = 2  # cores, from which the simulator predicts all others
NARROW_PART: Final = 0.4  # of the time, where there are more
MOST_APART: Final = 0.15
LEAST_EFFICIENCY: Final = 0.6  # of a gang of all cores: with less, much of each core's work is lost


@dataclass(frozen=True)
class CheckedModel:
    """A model as profiled on all cores, and on two of them. `predicted`: what the simulator makes of the latter."""

    manifest: Manifest
    profile: Profile
    narrow: MeasuredModel
    predicted: ModelProfile

    @property
    def name(self) -> str:
        """The model's name."""
        return self.manifest.model_name

    @property
    def measured(self) -> MeasuredModel:
        """What the simulator needs of all cores."""
        return measured_model([self.profile], self.manifest)


def profile_widths(
    cache_dir: Path, manifest: Manifest, cores: Sequence[int], seconds: float, report: Callable[[str], None]
) -> CheckedModel:
    """Measure a model on all cores and, where there are more, on two of them; the former is kept in the cache.

    Raises RunError, RuntimeError, TimeoutError, OSError.
    """
    wide_s = seconds * (1 - NARROW_PART) if len(cores) > NARROW else seconds
    report(f"{manifest.model_name} on {len(cores)} cores, {wide_s:.0f} s")
    profile = profile_model(cache_dir, manifest, cores, wide_s, every_count=len(cores) <= EVERY_COUNT)
    keep_better(cache_dir, profile)
    narrow = profile
    if len(cores) > NARROW:
        report(f"{manifest.model_name} on {NARROW} cores, {seconds - wide_s:.0f} s")
        narrow = profile_model(cache_dir, manifest, cores[:NARROW], seconds - wide_s)
    measured = measured_model([narrow], manifest)
    return CheckedModel(manifest, profile, measured, scale_model(measured, len(cores), 0))


def check_gangs(models: Sequence[CheckedModel]) -> Section:
    """Return each model's latencies by width, beside the predictions."""
    rows: list[Row] = []
    findings: list[Finding] = []
    figures: dict[str, float] = {}
    curves: list[Curve] = []
    for model in models:
        name, counts = model.name, model.profile.cores
        measured_us = [row[0] for row in model.profile.isolated_us]
        predicted_us = [model.predicted.rows_us(count, 1) for count in counts]
        for count, time_us, expected_us in zip(counts, measured_us, predicted_us, strict=True):
            rows.append(_row(name, count, measured_us[0], time_us, expected_us))
        most = counts[-1]
        efficiency = measured_us[0] / (most * measured_us[-1])
        error = apart(predicted_us[-1], measured_us[-1])
        serial = serial_share(most, measured_us[0], measured_us[-1])
        figures |= {
            f"{name}_efficiency": efficiency,
            f"{name}_serial_share": serial,
            f"{name}_prediction_apart": error,
        }
        text = f"{name}: {most} cores are {measured_us[0] / measured_us[-1]:.2f} times as fast as one"
        text += f" ({efficiency:.0%} of {most}), as with {serial:.0%} of serial work"
        findings.append(Finding(text, efficiency >= LEAST_EFFICIENCY))
        if most > NARROW:
            text = f"{name}: the prediction from {NARROW} cores is {error:+.0%} away on {most}"
            findings.append(Finding(text, abs(error) <= MOST_APART))
        curves.append(Curve(name, _speed_up(counts, measured_us[0], measured_us)))
        curves.append(Curve(f"{name}, predicted", _speed_up(counts, measured_us[0], predicted_us), predicted=True))
    return Section(
        "gangs",
        "Gangs: one request on several cores",
        tuple(rows),
        tuple(findings),
        figures,
        "A serial share that grows with the width is the gang's own cost: turns from layer to layer, cores that come "
        "late (hyper-threads, a host that gives cores to others, clocks that fall), full memory. One that stays is the "
        "model's: layers with few tasks. A prediction that is away makes `gangway capacity --cores N` and "
        "`gangway simulate` wrong by as much for requests alone on the machine.",
        "Use one hyper-thread per core (`--cores`), and a machine whose cores are not shared. Serve more requests side "
        "by side in place of wide gangs: the default policy chooses narrow gangs under load by itself. Where the "
        "prediction is away, profile on the machine that serves, and not on a smaller one.",
        Chart("cores", "speed-up over one core", tuple(curves)),
    )


def serial_share(cores: int, one_us: float, all_us: float) -> float:
    """Return the serial part of the time on one core that would explain the time on all of them; 0 to 1.

    Karp and Flatt's metric (Communications of the ACM 33, 1990).
    """
    if cores == 1:
        return 0.0
    return min(1.0, max(0.0, (cores * all_us / one_us - 1) / (cores - 1)))


def _row(name: str, count: int, one_us: float, time_us: float, expected_us: float) -> Row:
    return {
        "model": name,
        "cores": count,
        "measured ms": time_us / 1e3,
        "speed-up": one_us / time_us,
        "efficiency": one_us / (count * time_us),
        "serial share": serial_share(count, one_us, time_us),
        f"predicted from {NARROW} cores, ms": expected_us / 1e3,
        "predicted / measured": expected_us / time_us,
    }


def _speed_up(counts: Sequence[int], one_us: float, times_us: Sequence[float]) -> tuple[tuple[float, float], ...]:
    return tuple((float(count), one_us / time_us) for count, time_us in zip(counts, times_us, strict=True))
