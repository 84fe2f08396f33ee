"""Whether a query begins in fp32 or in bf16, of a model that is there in both. Pure. Times are microseconds.

A request that has a deadline waits with the precision DEADLINE: policies order, join and give up queries by the time in
bf16, the shorter one, which is what an overload leaves them. One without a deadline is in fp32 from the beginning.

The choice is made when a query begins. It is fp32, if by what is predicted

    (time in fp32 on its cores) / (1 - load)  <=  its deadline - the answer's way back - now
    (what fp32 takes more of the machine)     <=  what each query that waits on can spare

The load is what requests with deadlines take of the machine, if half of them are in each precision: others come before
the query has ended. A query that waits can spare what its deadline leaves after all with deadlines as early. The parts
of a batch have one precision.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

from gangway.artifact.precision import BF16, DEADLINE, FP32
from gangway.executor.fast_path import Completed
from gangway.scheduler.policies.arrival_rate import ArrivalRate
from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policy import Decision, LoneStart, Query, Snapshot, Start
from gangway.scheduler.policy_config import PolicyConfig
from gangway.scheduler.prediction import fastest_versions
from gangway.scheduler.profiles import ModelProfile

IN_TIME = "there is time for fp32"
LATE = "in fp32 it would be late"
OTHERS_LATE = "in fp32 it would make others late"
NO_SLACK_US = 1e9  # more than there is until any deadline


class PrecisionChooser(Policy):
    """Any policy, and the precision of what it starts."""

    def __init__(self, inner: Policy) -> None:
        self._inner = inner
        self.name, self.config = inner.name, inner.config
        self.batches = inner.batches
        self._chooses = False  # a model that is there in both precisions was asked
        self._rates: dict[int, ArrivalRate] = {}  # of requests with a deadline, by model
        self._now_us = 0.0
        self._models: Mapping[int, ModelProfile] = {}

    def decide(self, snapshot: Snapshot) -> Sequence[Decision]:
        """Return the policy's decisions, with a precision in each Start of a query that may have either.

        In fp32 a query runs from its first layer to its last.
        """
        decisions = self._inner.decide(snapshot)
        if not self._chooses:
            return decisions
        self._learn(snapshot)
        starts = {decision.query_id: decision for decision in decisions if isinstance(decision, Start)}
        either = [query for query in snapshot.waiting if query.precision == DEADLINE and query.query_id in starts]
        if not either:
            return decisions
        chosen = _chosen(either, starts, snapshot, self._crowding(snapshot.core_count), self._inner.config)
        return [chosen.get(each.query_id, each) if isinstance(each, Start) else each for each in decisions]

    def lone_start(self, model: ModelProfile, core_count: int, level: float) -> LoneStart | None:
        """Return what the policy says, for a query in fp32: with less slack it may be one in bf16."""
        start = self._inner.lone_start(model, core_count, level)
        if start is None or model.in_bf16 is None:
            return start
        slack_us = NO_SLACK_US
        if self._inner.config.precision_choice.enabled:
            crowding = self._crowding(core_count)
            slack_us = _fp32_slack_us(model, start.cores, 1, 1.0, crowding, self._inner.config)
        return replace(start, min_slack_us=max(start.min_slack_us, slack_us))

    def arrived(self, query: Query) -> None:
        """Note how much is asked for, and let the policy."""
        self._chooses |= query.precision == DEADLINE
        if self._chooses and query.deadline_us is not None:
            self._rates.setdefault(query.model_id, ArrivalRate()).arrived(query.arrival_us, query.rows)
        self._inner.arrived(query)

    def finished(self, query: Query, now_us: float) -> None:
        """Let the policy note an answer."""
        self._inner.finished(query, now_us)

    def answered(self, model_id: int, requests: Sequence[Completed], first_id: int) -> None:
        """Let the policy note requests that it has not seen."""
        if self._chooses:
            super().answered(model_id, requests, first_id)
        else:
            self._inner.answered(model_id, requests, first_id)

    def _learn(self, snapshot: Snapshot) -> None:
        """Note which models there are: numbers of others may be given again."""
        self._now_us, self._models = snapshot.now_us, snapshot.models
        self._chooses = any(model.in_bf16 is not None for model in snapshot.models.values())
        self._rates = {number: rate for number, rate in self._rates.items() if number in snapshot.models}

    def _crowding(self, core_count: int) -> float:
        """Return by what factor the requests that come lengthen a query's time, in steps."""
        config = self._inner.config.precision_choice
        load = sum(self._loads(core_count))
        return round(1.0 / (1.0 - min(load, config.max_load)) / config.crowding_step) * config.crowding_step

    def _loads(self, core_count: int) -> Iterator[float]:
        """Yield what share of the machine's time each model's requests take."""
        for model_id, rate in self._rates.items():
            if (model := self._models.get(model_id)) is not None:
                row_us = (model.work_us(1) + model.at(BF16).work_us(1)) / 2
                yield rate.rows_per_us_at(self._now_us) * row_us / core_count


def _fp32_slack_us(
    model: ModelProfile, cores: int, rows: int, error: float, crowding: float, config: PolicyConfig
) -> float:
    """Return how long before its deadline, less the answer's way back, a query may begin in fp32.

    `error`: of the model's predictions lately.
    """
    return crowding * max(config.prediction.min_margin_factor, error) * model.rows_us(min(cores, model.cores), rows)


def _chosen(
    either: Sequence[Query], starts: Mapping[int, Start], snapshot: Snapshot, crowding: float, config: PolicyConfig
) -> dict[int, Start]:
    """Return the Starts of these queries. A query with an earlier deadline chooses first."""
    chosen: dict[int, Start] = {}
    spare_us = _spare_us(starts, snapshot)
    for group in _groups(either):
        beginning = [query for query in group if query.query_id in starts]
        more_us = sum(_more_us(query, starts.get(query.query_id), snapshot) for query in group)
        why = IN_TIME
        if not all(_fits(query, len(starts[query.query_id].cores), snapshot, crowding, config) for query in beginning):
            why = LATE
        elif more_us > spare_us:
            why = OTHERS_LATE
        else:
            spare_us -= more_us
        for query in beginning:
            start = starts[query.query_id]
            chosen[query.query_id] = (
                _in_fp32(start, query, snapshot) if why == IN_TIME else _with_reason(start, BF16, why)
            )
    return chosen


def _groups(either: Sequence[Query]) -> list[list[Query]]:
    """Return the queries that have one precision, batch by batch, the earliest deadline first."""
    groups: dict[int, list[Query]] = {}
    for query in sorted(either, key=lambda query: (_deadline_us(query), query.query_id)):
        groups.setdefault(query.batch or -query.query_id, []).append(query)
    return list(groups.values())


def _deadline_us(query: Query) -> float:
    return float("inf") if query.deadline_us is None else query.deadline_us


def _fits(query: Query, cores: int, snapshot: Snapshot, crowding: float, config: PolicyConfig) -> bool:
    """Whether a query is in time in fp32 on so many cores, if no more others come than usual."""
    model = snapshot.models[query.model_id]
    if not config.precision_choice.enabled:
        return False
    error = snapshot.prediction_errors.get(model.model_id, 1.0) if config.prediction_error.enabled else 1.0
    slack_us = _deadline_us(query) - snapshot.way_back_us - snapshot.now_us
    return _fp32_slack_us(model, cores, query.rows, error, crowding, config) <= slack_us


def _more_us(query: Query, start: Start | None, snapshot: Snapshot) -> float:
    """Return how much longer the whole machine has to do with a query in fp32 than in bf16."""
    cores = _cores_of(query, start, snapshot)
    return _area_us(snapshot.models[query.model_id], 0, cores, query.rows, snapshot) - _query_us(query, cores, snapshot)


def _spare_us(starts: Mapping[int, Start], snapshot: Snapshot) -> float:
    """Return for how much longer queries that begin may have the machine until one that waits on is late by it.

    Negative if one is late in any case.
    """
    claims: list[tuple[float, float, bool]] = []  # deadline, time of the whole machine, waits on
    for query in snapshot.waiting:
        if query.deadline_us is not None and query.model_id in snapshot.models:
            start = starts.get(query.query_id)
            area_us = _query_us(query, _cores_of(query, start, snapshot), snapshot)
            claims.append((query.deadline_us, area_us, start is None))
    if not any(waits for _, _, waits in claims):
        return float("inf")
    for block in snapshot.running:
        if block.query.deadline_us is not None and block.query.model_id in snapshot.models:
            model = block.query.profile(snapshot.models)
            area_us = _area_us(model, block.layer, len(block.cores), block.query.rows, snapshot)
            claims.append((block.query.deadline_us, area_us, False))
    spare_us, planned_us = float("inf"), snapshot.now_us + snapshot.way_back_us
    for deadline_us, area_us, waits in sorted(claims, key=itemgetter(0)):
        planned_us += area_us
        if waits:
            spare_us = min(spare_us, deadline_us - planned_us)
    return spare_us


def _cores_of(query: Query, start: Start | None, snapshot: Snapshot) -> int:
    """Return the cores that a query begins on, or else those that it can use."""
    if start is not None:
        return len(start.cores)
    return max(1, min(query.profile(snapshot.models).max_ranks, snapshot.core_count))


def _query_us(query: Query, cores: int, snapshot: Snapshot) -> float:
    return _area_us(query.profile(snapshot.models), query.next_layer, cores, query.rows, snapshot)


def _area_us(model: ModelProfile, layer: int, cores: int, rows: int, snapshot: Snapshot) -> float:
    """Return how long the whole machine has to do with the layers from this one on."""
    return model.remaining_us(layer, min(cores, model.cores), rows) * cores / snapshot.core_count


def _in_fp32(start: Start, query: Query, snapshot: Snapshot) -> Start:
    """Return the Start of the same query in fp32, where the layers are others."""
    model = snapshot.models[query.model_id]
    versions = fastest_versions(model, snapshot.level, min(len(start.cores), model.cores))
    return _with_reason(replace(start, end_layer=model.layers, versions=versions, blocks=()), FP32, IN_TIME)


def _with_reason(start: Start, precision: str, why: str) -> Start:
    return replace(start, precision=precision, reason=f"{start.reason}; {why}" if start.reason else why)
