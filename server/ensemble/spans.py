"""What is known of the steps of a request when they have been executed, and what that makes of the whole."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

from gangway.executor.slots import SlotCounts, SlotOutcome, SlotStatus
from gangway.server.ensemble.graph import Graph, Step
from gangway.server.statistics import Times


@dataclass(frozen=True)
class StepSpan:
    """One step that was answered. Instants are CLOCK_MONOTONIC in nanoseconds."""

    step: Step
    rows: int
    begin_ns: int  # its last input was there
    submitted_ns: int
    start_ns: int  # of the first task
    computed_ns: int  # end of the last task
    finished_ns: int  # the front end knows it
    end_ns: int  # the next steps can begin
    outcome: SlotOutcome

    @property
    def times(self) -> Times:
        """What the model's statistics count."""
        infer_ns = self.computed_ns - self.start_ns
        return Times(
            total=self.end_ns - self.begin_ns,
            queue=max(0, self.finished_ns - self.submitted_ns - infer_ns),
            compute_input=self.submitted_ns - self.begin_ns,
            compute_infer=infer_ns,
            compute_output=self.end_ns - self.finished_ns,
        )


def times_of(spans: Sequence[StepSpan], total_ns: int) -> Times:
    """Return what Triton counts of an ensemble: the sums over its steps, and no queue, since it has none."""
    each = [span.times for span in spans]
    return Times(
        total=total_ns,
        queue=0,
        compute_input=sum(times.compute_input for times in each),
        compute_infer=sum(times.compute_infer for times in each),
        compute_output=sum(times.compute_output for times in each),
    )


def outcome_of(spans: Sequence[StepSpan], arrival_ns: int) -> SlotOutcome:
    """Return how the whole went: from the first task of any step to the last one of any, steps' counts together."""
    start_ns, end_ns = min(span.start_ns for span in spans), max(span.computed_ns for span in spans)
    return SlotOutcome(
        SlotStatus.OK,
        queue_us=(start_ns - arrival_ns) / 1e3,
        compute_us=(end_ns - start_ns) / 1e3,
        ranks=max(span.outcome.ranks for span in spans),
        attempts=max(span.outcome.attempts for span in spans),
        counts=reduce(_both, (span.outcome.counts for span in spans)),
    )


def count_inner(graph: Graph, spans: Sequence[StepSpan]) -> None:
    """Count the request in the statistics of the ensembles that are steps."""
    for place, model in enumerate(graph.inner):
        own = [span for span in spans if place in span.step.ensembles]
        if own:  # else no output of it was asked for
            total_ns = max(span.end_ns for span in own) - min(span.begin_ns for span in own)
            counts = reduce(_both, (span.outcome.counts for span in own))
            model.statistics.succeeded(max(span.rows for span in own), times_of(own, total_ns), None, counts)


def _both(one: SlotCounts, other: SlotCounts) -> SlotCounts:
    return SlotCounts(
        one.blocks + other.blocks,
        one.conflicts + other.conflicts,
        one.preemptions + other.preemptions,
        one.versions | other.versions,
    )
