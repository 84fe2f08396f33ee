"""Batches split over gangs: Packrat's table (2024, figure 6), measured anew beside plan and prediction."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from gangway.artifact.format import Engine
from gangway.measure.model_runner import ModelRunner, powers_of_two
from gangway.measure.scale_check.gangs import CheckedModel
from gangway.measure.scale_check.section import Chart, Curve, Finding, Row, Section, apart
from gangway.scheduler.batching.planner import SplitPlan, plan_table
from gangway.scheduler.profiles import policy_profile

LEAST_RUNS: Final = 2  # of each split, however long they take
MOST_RUNS: Final = 40
LEAST_ROWS: Final = 8  # of the larger batch, also where the profile's time was too short for so many
SMALLER: Final = 4  # the second batch has a quarter of the rows
MOST_LOST: Final = 0.1  # of the fastest split's rate, that the planner's choice may lose
MOST_APART: Final = 0.15


class Split(NamedTuple):
    """Packrat's <i, t, b>: so many gangs, cores and rows of each."""

    gangs: int
    cores: int
    rows: int

    def __str__(self) -> str:
        return f"<{self.gangs}, {self.cores}, {self.rows}>"


def check_splits(cache_dir: Path, models: Sequence[CheckedModel], cores: Sequence[int], seconds: float) -> Section:
    """Measure equal splits of two batches of each model for about so long. Raises RunError, RuntimeError, OSError."""
    compiled = [model for model in models if model.manifest.engine is not Engine.ONNXRUNTIME and model.manifest.batched]
    rows: list[Row] = []
    findings: list[Finding] = []
    figures: dict[str, float] = {}
    curves: list[Curve] = []
    for model in compiled:
        most_rows = max(model.profile.batches[-1], LEAST_ROWS)
        batches = (most_rows // SMALLER, most_rows)
        for batch in batches:
            times_us = _measure(cache_dir, model, cores, batch, seconds / len(compiled) / len(batches))
            table = plan_table(policy_profile(model.profile, 0, model.name, len(cores)), len(cores), batch)
            plan = table.best(len(cores), batch)
            predicted_us = {split: _predicted_us(model, split) for split in times_us}
            rows += [_row(model.name, batch, split, times_us[split], predicted_us[split]) for split in times_us]
            key = f"{model.name}_{batch}_rows"
            fastest = min(times_us, key=lambda split: times_us[split])
            gain = times_us[Split(1, len(cores), batch)] / times_us[fastest]
            lost = _plan_us(plan, times_us) / times_us[fastest] - 1
            error = max((apart(predicted_us[split], times_us[split]) for split in times_us), key=abs)
            figures |= {f"{key}_gain": gain, f"{key}_plan_over_fastest": lost, f"{key}_prediction_apart": error}
            text = f"{model.name}, {batch} rows: {fastest} is fastest, {gain:.2f} times the speed of one gang"
            findings.append(
                Finding(f"{text}; the server's plan {plan} takes {1 + lost:.2f} times as long", lost <= MOST_LOST)
            )
            text = f"{model.name}, {batch} rows: the simulator's predictions are up to {error:+.0%} away"
            findings.append(Finding(text, abs(error) <= MOST_APART))
        shown = [row for row in rows if row["model"] == model.name and row["rows"] == most_rows]
        for label, column, predicted in (
            (model.name, "rows/s", False),
            (f"{model.name}, predicted", "predicted", True),
        ):
            points = tuple((float(row["gangs"]), float(row[column])) for row in shown)
            curves.append(Curve(f"{label}, {most_rows} rows", points, predicted))
    if not rows:
        findings.append(Finding("no model of the mix is compiled for batches: none is split"))
    return Section(
        "splits",
        "Batches split over gangs",
        tuple(rows),
        tuple(findings),
        figures,
        "Where many narrow gangs are not faster than one wide one, cores share too little bandwidth or cache, or the "
        "machine's cores are not there all at once. Where the plan is behind the fastest split, the profile was "
        "measured in a noisy moment, and batches take longer than they need.",
        "Repeat `gangway profile` on the quiet machine, with --every-count for gangs of all widths. `gangway plan` "
        "shows what the server does with a batch of any size.",
        Chart("gangs", "rows per second", tuple(curves)) if curves else None,
    )


def equal_splits(cores: int, rows: int) -> list[Split]:
    """Return a batch in 1, 2, 4, ... equal gangs, as many as there are cores and rows."""
    return [
        Split(gangs, cores // gangs, rows // gangs)
        for gangs in powers_of_two(min(cores, rows))
        if rows % gangs == 0 and cores % gangs == 0
    ]


def _measure(
    cache_dir: Path, model: CheckedModel, cores: Sequence[int], batch: int, seconds: float
) -> dict[Split, float]:
    """Return the median time of each split, by turns: when the last gang is done."""
    found: dict[Split, list[float]] = {split: [] for split in equal_splits(len(cores), batch)}
    with ModelRunner(cache_dir, model.manifest, cores, batch, gangs=len(cores)) as runner:
        begin = time.monotonic()
        for number in range(MOST_RUNS + 1):
            if number > LEAST_RUNS and time.monotonic() - begin > seconds:
                break
            for split, times_us in found.items():
                runs = runner.run_gangs(split.rows, split.cores, gangs=split.gangs)
                if number:  # pages fault in the first one
                    times_us.append(max(run.total_us for run in runs))
    return {split: median(times_us) for split, times_us in found.items()}


def _plan_us(plan: SplitPlan, times_us: Mapping[Split, float]) -> float:
    """Return how long a plan takes: measured if it is one of these splits, by the profile if not."""
    kinds = [Split(*kind) for kinds in plan.rounds for kind in kinds]
    return times_us.get(kinds[0], plan.latency_us) if len(kinds) == 1 else plan.latency_us


def _predicted_us(model: CheckedModel, split: Split) -> float:
    times = model.predicted
    return (times.rows_us if split.gangs == 1 else times.together_us)(split.cores, split.rows)


def _row(name: str, batch: int, split: Split, time_us: float, predicted_us: float) -> Row:
    return {
        "model": name,
        "rows": batch,
        "gangs": split.gangs,
        "<gangs, cores, rows>": str(split),
        "measured ms": time_us / 1e3,
        "rows/s": batch / time_us * 1e6,
        "predicted": batch / predicted_us * 1e6,
        "predicted / measured": predicted_us / time_us,
    }
