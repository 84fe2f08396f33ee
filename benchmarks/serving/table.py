"""What `benchmarks.serving` prints: a line for each run, a table for each mix, and the goals."""

import math
from collections.abc import Mapping, Sequence

from benchmarks.serving.points import (
    ALL,
    EACH,
    SATISFIED,
    Criterion,
    Point,
    highest_share,
    over_isolated,
    satisfied,
    wilson,
)
from testing.report import Report, Row

MULTIPLES = (3.0, 4.0, 5.0)
CRITERIA = [Criterion(whose, f"{multiple:g}x") for whose in (EACH, ALL) for multiple in MULTIPLES]
GOALS: Mapping[Criterion, Mapping[str, float]] = {
    Criterion(EACH, "3x"): {"light": 0.35, "medium": 0.45, "heavy": 0.45, "mix": 0.35},
    Criterion(EACH, "5x"): {"light": 0.55, "medium": 0.7, "heavy": 0.7, "mix": 0.55},
    Criterion(ALL, "3x"): {"light": 0.5, "medium": 0.55, "heavy": 0.6, "mix": 0.5},
}
FIRST = Criterion(EACH, "3x")
OVER_ISOLATED_AT_MOST = 1.8  # at the first row's rates


def anything_holds(points: Sequence[Point]) -> bool:
    """Say whether some criterion holds in these runs of one share: if not, a ladder ends."""
    return any(satisfied(points, criterion) >= SATISFIED for criterion in CRITERIA)


def describe(point: Point) -> str:
    """Return one line: shares in time of each model (with Wilson's lower and upper bound at 3x) and of all."""
    who = f"{point.server}, client {point.client}, seed {point.seed}"
    parts = [f"{point.mix} at {point.share:g} ({point.rate_per_s:.3g}/s), {who}:"]
    for name, counts in point.models.items():
        in_time = counts.in_time.get("3x", 0)  # nothing, of a model that was not asked
        low, high = wilson(in_time, counts.queries)
        parts.append(f"{name} {in_time}/{counts.queries} ({low:.2f}-{high:.2f})")
    total = point.total
    shares = ", ".join(f"{k} {count / max(1, total.queries):.3f}" for k, count in total.in_time.items())
    mean = total.mean_over_isolated
    parts.append(f"| all {shares} | {'no answer' if mean is None else f'{mean:.2f} x isolated'}")
    parts.append(f"| errors {dict(total.errors) or 0} | the machine took {point.slowness:.2f} x the time")
    parts.append(f"| stolen {point.stolen:.1%}, {point.drift:.2f} x at its end")
    if chosen := sum(point.by_precision.values()):
        parts.append("| " + ", ".join(f"{name} {count / chosen:.0%}" for name, count in point.by_precision.items()))
    return " ".join(parts)


def add_tables(
    report: Report, points: Sequence[Point], mixes: Sequence[str], servers: Sequence[str], ours: str
) -> None:
    """Print what every server carries of each mix, with goals; note how `ours` does against them."""
    for mix in mixes:
        mine = {server: [p for p in points if (p.server, p.mix) == (server, mix)] for server in servers}
        mine = {server: found for server, found in mine.items() if found}
        if not mine:
            continue
        rows = [_criterion_row(criterion, mix, mine) for criterion in CRITERIA]
        goal = GOALS[FIRST].get(mix)
        row: dict[str, str | float] = {
            "highest share of capacity": "mean latency over isolated, lowest rate",
            "goal": "",
        }
        rows.append(
            row | {server: over_isolated(_at(found, min(p.share for p in found))) for server, found in mine.items()}
        )
        if goal is not None:
            row = {
                "highest share of capacity": f"mean latency over isolated at {goal:g}",
                "goal": OVER_ISOLATED_AT_MOST,
            }
            rows.append(row | {server: over_isolated(_at(found, goal)) for server, found in mine.items()})
        report.table(f"{mix}: by both seeds together (each seed by itself)", rows)
        _targets(report, mix, mine.get(ours, []))


def _criterion_row(criterion: Criterion, mix: str, mine: Mapping[str, Sequence[Point]]) -> Row:
    cells = {server: _share_cell(found, criterion) for server, found in mine.items()}
    return {"highest share of capacity": str(criterion), "goal": GOALS.get(criterion, {}).get(mix, ""), **cells}


def _share_cell(points: Sequence[Point], criterion: Criterion) -> str:
    """Return "0.35 (0.35 0.45)": "<" the lowest share if not even that is carried."""
    lowest = min(point.share for point in points)

    def text(chosen: Sequence[Point]) -> str:
        return f"{share:g}" if (share := highest_share(chosen, criterion)) else f"<{lowest:g}"

    seeds = sorted({point.seed for point in points})
    return f"{text(points)} ({' '.join(text([p for p in points if p.seed == seed]) for seed in seeds)})"


def _at(points: Sequence[Point], share: float) -> list[Point]:
    return [point for point in points if math.isclose(point.share, share)]


def _targets(report: Report, mix: str, ours: Sequence[Point]) -> None:
    """Judge the goals that were reached for: up to the highest share that was measured, and the next if that failed."""
    if not ours:
        return
    tried = max(point.share for point in ours)
    gave_up = not anything_holds(_at(ours, tried))
    for criterion, goals in GOALS.items():
        if mix in goals and (goals[mix] <= tried or gave_up):
            report.goal(f"{mix}: share of capacity with {criterion}", highest_share(ours, criterion), goals[mix])
    first = _at(ours, GOALS[FIRST].get(mix, math.nan))
    if first:
        what = f"{mix}: mean latency over isolated at {first[0].share:g}"
        report.target(what, over_isolated(first), OVER_ISOLATED_AT_MOST)
