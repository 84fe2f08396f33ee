"""Measures how long a model takes when it is alone: by ordinary requests through the supervisor's own io segment."""

import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from gangway.executor.slots import SlotOutcome, SlotStatus
from gangway.server.control import ModelLoadError
from gangway.server.data_plane import DataPlane, Request, TensorLayout

REQUEST_TIMEOUT_SECONDS = 60.0
WAIT_STEP_NS = 100_000_000  # how often `stop` is looked at
WARM_UP_RUNS = 2  # the first ones fault pages in
MIN_RUNS, MAX_RUNS = 3, 20
BUDGET_SECONDS = 0.1


@dataclass(frozen=True)
class Isolated:
    """Medians of one row of zeros on all cores, in microseconds.

    `compute_us`: first to last task. `latency_us`: arrival to answer, with the way through the scheduler, which for a
    small model is the larger part.
    """

    compute_us: float
    latency_us: float


def measure_isolated(plane: DataPlane, layout: TensorLayout, stop: threading.Event) -> Isolated:
    """Run a model alone. Blocks for BUDGET_SECONDS or MIN_RUNS runs, whichever is longer, or until `stop` is set.

    Raises ModelLoadError when a run fails.
    """
    outcomes = list(_outcomes(plane, layout, stop))
    return Isolated(
        statistics.median(outcome.compute_us for outcome in outcomes),
        statistics.median(outcome.queue_us + outcome.compute_us for outcome in outcomes),
    )


def _outcomes(plane: DataPlane, layout: TensorLayout, stop: threading.Event) -> Iterator[SlotOutcome]:
    for _ in range(WARM_UP_RUNS):
        _run_once(plane, layout, stop)
    end = time.monotonic() + BUDGET_SECONDS
    for run in range(MAX_RUNS):
        if run >= MIN_RUNS and time.monotonic() > end:
            return
        yield _run_once(plane, layout, stop)


def _run_once(plane: DataPlane, layout: TensorLayout, stop: threading.Event) -> SlotOutcome:
    with plane.open(layout, rows=1) as request:
        for tensor in request.inputs:
            tensor[:] = bytes(len(tensor))
        request.submit()
        outcome = _await(request, stop)
    if outcome.status is not SlotStatus.OK:
        raise ModelLoadError(f"a trial run ended with {outcome.status.name} after {outcome.attempts} attempts")
    return outcome


def _await(request: Request, stop: threading.Event) -> SlotOutcome:
    end = time.monotonic() + REQUEST_TIMEOUT_SECONDS
    while time.monotonic() < end and not stop.is_set():
        outcome = request.wait(time.monotonic_ns() + WAIT_STEP_NS)
        if outcome is not None:
            return outcome
    if stop.is_set():
        raise ModelLoadError("the server is stopping")
    raise ModelLoadError(f"a trial run did not end within {REQUEST_TIMEOUT_SECONDS:.0f} seconds")
