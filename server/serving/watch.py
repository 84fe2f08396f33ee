"""What a look at a running server shows: which core works for which model, models, background jobs.

Its numbers are those of the metrics: one `Source` reads the same counters for both. Who holds a core is looked up many
times a second in the leases, while somebody watches; so long the scheduler also notes its decisions. Nothing is sampled
or kept while nobody does.
"""

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, NamedTuple

import msgspec

from gangway.base.numbers import counted
from gangway.executor.control import TOLD_S, ControlSegment
from gangway.executor.leases import LeaseGlance
from gangway.server.messages import WHOLE_MODEL, BackgroundJob, ModelUnavailable, StartUnderWay
from gangway.server.models.served import Models
from gangway.server.serving.metrics_reading import ModelReading, Reading, Source, ids_of
from gangway.server.statistics import TIME_BOUNDS_NS, VersionFigures
from gangway.server.system import own_version

WINDOW_S: Final = 10.0  # over which rates and percentiles are
SAMPLE_S: Final = 0.02  # between two looks at the cores, of at most CORES_AT_ONCE of them; longer for more
CORES_AT_ONCE: Final = 16
MAX_SAMPLES: Final = 1024  # of one state; further ones are left out
MAX_MODELS: Final = 256  # of one state: those with the most requests
REASON_CHARACTERS: Final = 200
IDLE: Final = -1  # in place of a model's number


class _Hold(NamedTuple):
    """What a core does at a look: the number of the model and how many cores its gang has."""

    model_id: int
    cores: int


_FREE: Final = _Hold(IDLE, 0)
Run = list[int]  # looks in a row, number of the model, cores of its gang


class _Moment(msgspec.Struct, frozen=True):
    """What rates are differences of, by `ServedModel.load`."""

    at_s: float
    figures: Mapping[int, VersionFigures]


class Watch:
    """Looks at the server for those who watch it. `source` is its own. For one thread at a time."""

    def __init__(
        self,
        source: Source,
        models: Callable[[], Models],
        jobs: Callable[[], Sequence[BackgroundJob]],
        start: Callable[[], StartUnderWay | None],
        control: ControlSegment,
    ) -> None:
        self._source = source
        self._models = models
        self._jobs = jobs
        self._start = start
        self._control = control
        self._workers = range(control.layout.workers)
        self.sample_s = SAMPLE_S * max(1.0, len(self._workers) / CORES_AT_ONCE)
        self._history: deque[_Moment] = deque()
        self._runs: list[list[Run]] = []
        self._samples = 0
        self._begin_s = 0.0

    def begin(self) -> None:
        """Somebody begins to watch, after a time when nobody did."""
        self._history.clear()
        self._history.append(_moment(self._source.read()))
        self._control.decision_block.watch()
        self._begin_timeline()

    def end(self) -> None:
        """Nobody watches."""
        self._history.clear()
        self._runs = []

    def sample(self) -> None:
        """Look once who holds the cores."""
        if self._samples >= MAX_SAMPLES:
            return
        self._samples += 1
        for runs, (hold, _, _) in zip(self._runs, self._sampled(), strict=True):
            if runs and runs[-1][1] == hold.model_id and runs[-1][2] == hold.cores:
                runs[-1][0] += 1
            else:
                runs.append([1, *hold])

    def state(self) -> dict[str, Any]:
        """Return what is so now, with the timeline since the last state (docs/reference/http.md has the fields)."""
        self._control.decision_block.watch()
        reading = self._source.read()
        now = _moment(reading)
        self._history.append(now)
        while len(self._history) > 2 and now.at_s - self._history[1].at_s >= WINDOW_S:
            self._history.popleft()
        before = self._history[0]
        shown = sorted(reading.models, key=lambda model: -_answered(model, before))[:MAX_MODELS]
        shown.sort(key=lambda model: (model.model.name, model.model.version))
        places = {model_id: place for place, model in enumerate(shown) for model_id in ids_of(model.model)}
        unavailable = self._models().unavailable
        state = {
            "gangway": own_version(),
            "time_s": time.time(),
            "started_s": reading.server.started_s,
            "window_s": now.at_s - before.at_s,
            "queue": reading.scheduler.waiting,
            "requests_in_flight": reading.slots_in_use,
            "cores": self._cores(reading, shown, places),
            "timeline": self._timeline(places),
            "models": [self._model(model, now.at_s - before.at_s, before) for model in shown],
            "decisions": self._decisions(reading, shown, places),
            "models_left_out": len(reading.models) - len(shown) + max(0, len(unavailable) - MAX_MODELS),
            "unavailable": [_unavailable(entry) for entry in unavailable[:MAX_MODELS]],
            "jobs": [_job(job) for job in self._jobs()],
            "start": None if (start := self._start()) is None else msgspec.structs.asdict(start),
        }
        self._begin_timeline()
        return state

    def _begin_timeline(self) -> None:
        self._runs = [[] for _ in self._workers]
        self._samples = 0
        self._begin_s = time.time()

    def _sampled(self) -> list[tuple[_Hold, int | None, LeaseGlance | None]]:
        """Return by worker what it does, its lease, and what that is at."""
        control = self._control
        leases = [control.status(rank).lease for rank in self._workers]
        gangs = Counter(leases)
        glances = {lease: control.leases[lease].glance() for lease in gangs if lease is not None}
        found: list[tuple[_Hold, int | None, LeaseGlance | None]] = []
        for lease in leases:
            if lease is None:
                found.append((_FREE, None, None))
            else:
                glance = glances[lease]
                found.append((_Hold(glance.model_id, gangs[lease]), lease, glance))
        return found

    def _cores(
        self, reading: Reading, shown: Sequence[ModelReading], places: Mapping[int, int]
    ) -> list[dict[str, Any]]:
        now_ns = time.monotonic_ns()
        cores = []
        for rank, (hold, lease, glance) in enumerate(self._sampled()):
            gang = None
            if glance is not None:
                place = places.get(hold.model_id)
                gang = {
                    "lease": lease,
                    "model": None if place is None else shown[place].model.name,
                    "version": None if place is None else shown[place].model.version,
                    "cores": hold.cores,
                    "wanted_cores": glance.wanted,
                    "requests": glance.members,
                    "layer": glance.step,
                    "since_ms": max(0.0, (now_ns - glance.start_ns) / 1e6) if glance.start_ns else 0.0,
                }
            held = sum(count for count, model_id, _ in self._runs[rank] if model_id != IDLE)
            cores.append(
                {
                    "core": reading.server.cores[rank],
                    "busy_seconds": reading.workers[rank].busy_us / 1e6,
                    "busy_share": held / max(1, self._samples),  # what is counted is counted when a gang is left
                    "gang": gang,
                }
            )
        return cores

    def _decisions(
        self, reading: Reading, shown: Sequence[ModelReading], places: Mapping[int, int]
    ) -> list[dict[str, Any]]:
        """Return the last decisions about the models shown, the oldest first."""
        now_s, now_us = time.time(), time.monotonic_ns() / 1e3
        decisions = []
        for line in self._control.decision_block.read().splitlines():
            noted = json.loads(line)
            place = places.get(noted["model_id"])
            if place is None or now_us - noted["at_us"] > TOLD_S * 1e6:
                continue
            model = shown[place].model
            noted["cores"] = [reading.server.cores[rank] for rank in noted["cores"]]
            decisions.append(
                {
                    "time_s": now_s - (now_us - noted["at_us"]) / 1e6,
                    "model": model.name,
                    "version": model.version,
                    "decision": noted["decision"].lower(),
                    "cores": noted["cores"],
                    "slack_ms": None if noted["slack_us"] is None else noted["slack_us"] / 1e3,
                    "reason": noted["reason"],
                    "text": explain(noted),
                }
            )
        return decisions

    def _timeline(self, places: Mapping[int, int]) -> dict[str, Any]:
        return {
            "begin_s": self._begin_s,
            "end_s": time.time(),
            "samples": self._samples,
            "cores": [
                [[count, places.get(model_id, IDLE), cores] for count, model_id, cores in runs] for runs in self._runs
            ],
        }

    def _model(self, reading: ModelReading, window_s: float, before: _Moment) -> dict[str, Any]:
        model, seconds, whole = reading.model, max(window_s, 1e-3), reading.figures
        earlier = before.figures.get(model.load)
        recent = whole if earlier is None else whole.since(earlier)  # a model that was loaded in the window
        ids = ids_of(model)
        held = sum(count for runs in self._runs for count, model_id, _ in runs if model_id in ids)
        with_target = recent.own["qos_met"] + recent.own["qos_missed"]
        return {
            "name": model.name,
            "version": model.version,
            "ensemble": model.is_ensemble,
            "target_ms": model.qos_us / 1e3 if model.qos_us else None,
            "answered": whole.success.count,
            "failed": whole.fail.count,
            "refused": whole.own["refused"],
            "in_time": whole.own["qos_met"],
            "late": whole.own["qos_missed"],
            "waiting": reading.waiting,
            "in_flight": reading.in_flight,
            "rate": recent.success.count / seconds,
            "refused_rate": recent.own["refused"] / seconds,
            "p50_ms": quantile_ms(recent.request_counts, 0.5),
            "p99_ms": quantile_ms(recent.request_counts, 0.99),
            "in_time_share": recent.own["qos_met"] / with_target if with_target else None,
            "idle": reading.is_idle,
            "cores": held / self._samples if self._samples else 0.0,
        }


def explain(noted: Mapping[str, Any]) -> str:
    """Return a decision in words: what was decided, then why. `noted` is a line of `scheduler/observability.py`."""
    cores = f"core{'s' * (len(noted['cores']) != 1)} {', '.join(map(str, noted['cores']))}"
    blocks = noted["blocks"]
    match noted["decision"]:
        case "Start":
            fewer = f" ({noted['wanted']} wanted)" if noted["wanted"] > len(noted["cores"]) else ""
            first, last = noted["layer"], noted["end_layer"] - 1
            layers = f"layers {first} to {last}" if first < last else f"layer {first}"
            plan = f", planned in {blocks + 1} blocks" if blocks else ""
            what = f"start {counted(noted['rows'], 'row')} on {cores}{fewer}, {layers}{plan}"
        case "Resize":
            what = f"go on with {cores}"
        case "Stop":
            what = f"stop on {cores}, to go on later"
        case "Replan":
            what = f"new plan on {cores}, {counted(blocks, 'block')} to come"
        case "StartOver":
            what = f"give up what was computed up to layer {noted['layer']}, and start over later"
        case _:
            what = f"refuse {counted(noted['rows'], 'row')}"
    slack_us = noted["slack_us"]
    if slack_us is None:
        slack = "no deadline"
    elif slack_us >= 0:
        slack = f"slack {slack_us / 1e3:.1f} ms"
    else:
        slack = f"deadline missed by {-slack_us / 1e3:.1f} ms"
    facts = f"{slack}, waited {noted['age_us'] / 1e3:.1f} ms" if noted["decision"] in ("Start", "Refuse") else slack
    reason = noted["reason"] or "no reason given by the scheduling policy"
    before = f"{counted(noted['free'], 'core')} free, {counted(noted['waiting'], 'request')} waiting"
    return f"{what}; because: {reason} ({facts}; before: {before})"


def quantile_ms(counts: Sequence[int], share: float) -> float | None:
    """Return a quantile of a histogram by TIME_BOUNDS_NS as Prometheus' histogram_quantile estimates it.

    None without requests. What is beyond the last bound counts as that.
    """
    ends = list(accumulate(counts))
    if not ends or ends[-1] <= 0:
        return None
    wanted = share * ends[-1]
    bucket = next(number for number, end in enumerate(ends) if end >= wanted and counts[number])
    if bucket == len(TIME_BOUNDS_NS):
        return float(TIME_BOUNDS_NS[-1]) / 1e6
    low_ns = float(TIME_BOUNDS_NS[bucket - 1]) if bucket else 0.0
    part = (wanted - (ends[bucket] - counts[bucket])) / counts[bucket]
    return (low_ns + (float(TIME_BOUNDS_NS[bucket]) - low_ns) * part) / 1e6


def _moment(reading: Reading) -> _Moment:
    return _Moment(time.monotonic(), {model.model.load: model.figures for model in reading.models})


def _answered(reading: ModelReading, before: _Moment) -> int:
    """Return how many requests were answered after that moment."""
    earlier = before.figures.get(reading.model.load)
    return reading.figures.success.count - (earlier.success.count if earlier is not None else 0)


def _job(job: BackgroundJob) -> dict[str, Any]:
    phase = f"{job.phase}, {job.done} of {job.total}" if job.total else job.phase
    return {"kind": job.kind, "model": job.model, "phase": phase, "since_s": job.since_s}


def _unavailable(entry: ModelUnavailable) -> dict[str, Any]:
    return {
        "name": entry.name,
        "version": None if entry.version == WHOLE_MODEL else entry.version,
        "state": entry.state,
        "reason": entry.reason[:REASON_CHARACTERS],
    }
