"""What is counted of an ensemble's request, by its steps that have ended."""

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

from gangway.executor.slots import SlotCounts, SlotOutcome, SlotStatus
from gangway.server.requests.ensemble_graphs import EnsembleGraph, EnsembleStep
from gangway.server.serving.inference.model_run import ModelRun
from gangway.server.statistics import RequestTimes


class EndedStep(NamedTuple):
    """A step that has ended well."""

    step: EnsembleStep
    run: ModelRun


def times_of(steps: Sequence[EndedStep], total_ns: int) -> RequestTimes:
    """Return what Triton counts of an ensemble: the sums over its steps, and no queue, since it has none."""
    each = [run.times_of(run.outcome) for _, run in steps if run.outcome is not None]
    return RequestTimes(
        total=total_ns,
        queue=0,
        compute_input=sum(times.compute_input for times in each),
        compute_infer=sum(times.compute_infer for times in each),
        compute_output=sum(times.compute_output for times in each),
    )


def outcome_of(steps: Sequence[EndedStep], arrival_ns: int) -> SlotOutcome:
    """Return how the whole went: from the first task of any step to the last one of any, steps' counts together."""
    start_ns, end_ns = min(run.start_ns for _, run in steps), max(run.computed_ns for _, run in steps)
    outcomes = _outcomes(steps)
    return SlotOutcome(
        SlotStatus.OK,
        queue_us=(start_ns - arrival_ns) / 1e3,
        compute_us=(end_ns - start_ns) / 1e3,
        ranks=max(outcome.ranks for outcome in outcomes),
        attempts=max(outcome.attempts for outcome in outcomes),
        counts=reduce(_both, (outcome.counts for outcome in outcomes)),
    )


def count_inner(graph: EnsembleGraph, steps: Sequence[EndedStep]) -> None:
    """Count the request in the statistics of the ensembles that are steps."""
    for place, model in enumerate(graph.inner):
        own = [each for each in steps if place in each.step.ensembles]
        if own:  # else no output of it was asked for
            total_ns = max(run.end_ns for _, run in own) - min(run.begin_ns for _, run in own)
            counts = reduce(_both, (outcome.counts for outcome in _outcomes(own)))
            model.statistics.succeeded(
                max(run.shapes.counted_rows for _, run in own), times_of(own, total_ns), None, counts
            )


def _outcomes(steps: Sequence[EndedStep]) -> list[SlotOutcome]:
    return [run.outcome for _, run in steps if run.outcome is not None]


def _both(one: SlotCounts, other: SlotCounts) -> SlotCounts:
    return SlotCounts(
        one.blocks + other.blocks,
        one.conflicts + other.conflicts,
        one.preemptions + other.preemptions,
        one.versions | other.versions,
        one.bf16 | other.bf16,
    )
