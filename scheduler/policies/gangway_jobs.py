"""The queries of one decision as the `gangway` policy sees them: what is predicted, and what is decided of each."""

from collections.abc import Iterable

from gangway.scheduler.policy import Query, RunningBlock, Snapshot
from gangway.scheduler.policy_config import DEFAULT, PolicyConfig
from gangway.scheduler.prediction import LEVEL_STEP, forecast

INFINITE = float("inf")
BRIEF, AHEAD, PROMOTED, ON_TIME, BEST_EFFORT = range(5)  # tiers: the first ones are served first (`gangway_order.py`)


class DecisionContext:
    """What all queries of a decision have in common.

    `level`: of interference, as far as predictions follow it. `efficiency`: what a further core of a gang must add, by
    the profile, while others want it. `margin`: what times are multiplied by, at least, where a deadline depends on
    them; `errors`: by model, where that is more. `kind`: what predictions depend on beside the query and its model.
    """

    __slots__ = (
        "config", "core_count", "efficiency", "errors", "kind", "level", "margin", "models", "now_us", "way_back_us",
    )  # fmt: skip

    def __init__(self, snapshot: Snapshot, config: PolicyConfig = DEFAULT) -> None:
        self.config = config
        self.now_us = snapshot.now_us
        self.way_back_us = snapshot.way_back_us
        self.core_count = core_count = snapshot.core_count
        self.models = snapshot.models
        level = snapshot.level if config.interference.enabled else 0.0
        self.level = level = min(level, config.prediction.max_level) if level else 0.0
        self.efficiency = efficiency = busy_efficiency(snapshot.gang_slowdown, config)
        self.kind = (core_count, efficiency, round(level / LEVEL_STEP) if level else 0)
        self.margin = config.prediction.min_margin_factor
        self.errors = snapshot.prediction_errors if config.prediction_error.enabled else {}


class Job:
    """A waiting query, or a running one with its block, and what is predicted of it. Times are microseconds.

    As of `context`: `slack_us`: from now to its deadline, less the answer's way back. `least_us`: its rest on all cores
    that it can use; `usual_us`: on as many as it usually asks for. `is_lost`: it misses its deadline even if nothing
    disturbs it from now on, or has none to meet. `margin`: what its times are multiplied by where its deadline depends
    on them.

    As it is decided: `due_us`: its place in the order. `weight`: of its deadline. `gang`: cores it asks for; `area_us`:
    how long the whole machine has to do with it then. `grant`: cores it shall have.

    Always: `efficient`: as many cores as add enough while others want them; `idle`: while nobody does.
    `usual`: cores that it asks for where no deadline needs more.
    `request_us`: what the largest of its requests takes on all cores that it can use. A batch counts as no longer than
    that: else equal requests that come later, in smaller batches, would be shorter.
    """

    __slots__ = (
        "_fastest_us",
        "area_us",
        "block",
        "context",
        "cores",
        "due_us",
        "efficient",
        "elapsed_us",
        "fixed",
        "forecast",
        "gang",
        "grant",
        "idle",
        "is_lost",
        "isolated_us",
        "layer",
        "least_us",
        "margin",
        "model",
        "most",
        "query",
        "request_us",
        "slack_us",
        "tier",
        "times_us",
        "usual",
        "usual_us",
        "weight",
    )  # fmt: skip

    def __init__(self, query: Query, block: RunningBlock | None, context: DecisionContext) -> None:
        self.query = query
        self.block: RunningBlock | None = None
        self.layer = query.next_layer
        self.model = model = query.profile(context.models)
        self.forecast = known = forecast(model, context.level, query.rows, context.core_count)
        self.times_us = known.table.time_us
        self.most = known.most
        self.isolated_us = self.request_us = known.isolated_us
        if query.request_rows and query.request_rows != query.rows:
            self.request_us = forecast(model, context.level, query.request_rows, context.core_count).isolated_us
        self.efficient = known.efficient_cores(context.efficiency)
        self.idle = known.efficient_cores(context.config.growth.idle_efficiency)
        self.usual = min(query.cores or self.efficient, self.most)
        self.slack_us = INFINITE
        self.is_lost = True
        self.due_us = self.area_us = 0.0
        self.tier = BRIEF
        self.gang = 0
        self._wait()
        self.update(block, context)

    def update(self, block: RunningBlock | None, context: DecisionContext) -> None:
        """Bring everything up to date that depends on the time. Nothing is decided yet."""
        query = self.query
        if block is not None:
            if self.block is None or block.layer != self.layer:
                self.layer = block.layer
                self._fastest_us = self._fastest_from(block.layer + 1)  # a running layer may end at any moment
            self.cores = len(block.cores)
            began_us = block.layer_started_us
            self.elapsed_us = context.now_us - (began_us if began_us > block.started_us else block.started_us)
            self.fixed = block.stopping or self.model.indivisible
            self.block = block
            self.least_us = self.remaining_us(self.most)
            self.usual_us = self.remaining_us(self.usual)
        elif self.block is not None:
            self._wait()
        else:
            self.cores = 0  # those that it was to start on
        if query.deadline_us is not None:
            slack_us = query.deadline_us - context.now_us - context.way_back_us
            self.slack_us = slack_us
            self.is_lost = slack_us + context.way_back_us < self._fastest_us
        self.context = context
        self.margin = margin = context.margin
        if context.errors:
            self.margin = max(margin, context.errors.get(self.model.model_id, margin))
        self.weight = 1.0
        self.grant = 0

    def _wait(self) -> None:
        self.block = None
        self.layer = self.query.next_layer
        self.cores = 0
        self.elapsed_us = 0.0
        self.fixed = False  # nothing stops or resizes it
        self.least_us = self.remaining_us(self.most)
        self.usual_us = self.remaining_us(self.usual)
        self._fastest_us = self._fastest_from(self.layer)

    def _fastest_from(self, layer: int) -> float:
        fastest_us = self.forecast.fastest_us
        return fastest_us[layer] if fastest_us else self.model.fastest_us(layer, self.most, self.query.rows)

    @property
    def plans(self) -> bool:
        """Whether it runs by versions or blocks, or may by other versions of layers."""
        block = self.block
        return block is not None and bool(block.blocks or block.versions or self.forecast.has_versions)

    def remaining_us(self, cores: int) -> float:
        """Return the rest of the query on so many cores, the part of the present layer that is done taken off."""
        layer = self.layer
        times = self.times_us[cores - 1 if cores < len(self.times_us) else -1]
        rest_us = times[-1] - times[layer]
        elapsed_us = self.elapsed_us
        if elapsed_us > 0:
            layer_us = times[layer + 1] - times[layer]
            return rest_us - (elapsed_us if elapsed_us < layer_us else layer_us)
        return rest_us

    def boundary_us(self) -> float:
        """Return how long the present layer of a running query still takes."""
        return max(0.0, self.forecast.table.span_us(self.layer, self.layer + 1, self.cores) - self.elapsed_us)

    def cores_within(self, within_us: float) -> int:
        """Return the cheapest number of cores on which the rest takes no longer; all that it can use if none is."""
        known, elapsed_us = self.forecast, self.elapsed_us
        if elapsed_us <= 0:
            return known.cores_within(self.layer, within_us)
        by_now = known.cores_within(self.layer, within_us + elapsed_us)
        return max(by_now, known.cores_within(self.layer + 1, within_us))  # the layer may take longer than predicted


class JobTable:
    """The jobs of one decision after another. Of a query that is still there only what the time changes is new."""

    def __init__(self, config: PolicyConfig = DEFAULT) -> None:
        self._config = config
        self._jobs: dict[int, Job] = {}  # by query, as of the last decision
        self._kind: object = None  # of that decision

    def at(self, snapshot: Snapshot, waiting: Iterable[Query]) -> list[Job]:
        """Return the jobs of these waiting queries, then of all that run. They are good until the next call."""
        context = DecisionContext(snapshot, self._config)
        if context.kind != self._kind:
            self._jobs = {}
        jobs = [self._job(query, None, context) for query in waiting]
        jobs += [self._job(block.query, block, context) for block in snapshot.running]
        self._jobs = {job.query.query_id: job for job in jobs}
        self._kind = context.kind
        return jobs

    def _job(self, query: Query, block: RunningBlock | None, context: DecisionContext) -> Job:
        job = self._jobs.get(query.query_id)
        if job is None or job.query is not query or job.model is not query.profile(context.models):
            return Job(query, block, context)
        job.update(block, context)
        return job


def busy_efficiency(gang_slowdown: float, config: PolicyConfig) -> float:
    """Return what a further core must add by the profile, of which gangs of several cores fall short by so much."""
    slowdown = gang_slowdown if config.gang_slowdown.enabled else 1.0
    step = config.shares.efficiency_step
    return min(1.0, round(config.shares.busy_efficiency * slowdown / step) * step)
