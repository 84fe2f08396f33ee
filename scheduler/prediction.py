"""How much longer a query runs, on how many cores: what the `gangway` policy decides by. Pure.

Times come from the profile, in the versions that are fastest at the present level of interference, and as long as they
are at that level (`blocks.demands`).
"""

from gangway.scheduler.blocks import Demands, demands, query_level
from gangway.scheduler.model_profile import ModelProfile
from gangway.scheduler.policy import Query, RunningBlock, Snapshot

MARGIN = 1.04  # at least: predictions are stretched by this where a deadline depends on them
MOST_LEVEL = 1.0  # what slows layers down more than this is not memory, and passes as it came


class Work:
    """A waiting query, or a running one with its block, and what is predicted of it. Times are microseconds.

    `slack_us`: from now to its deadline, less the answer's way back. `due_us`: its place in the order. `least_us`: its
    rest on all cores that it can use. `isolated_us`: the whole query, likewise. `margin`: by how much to stretch these
    where a deadline depends on them. `worth`: of its deadline. `gang`: cores it asks for, `grant`: cores it shall have.
    """

    __slots__ = (
        "block", "cores", "due_us", "elapsed_us", "fixed", "gang", "grant", "isolated_us", "layer", "least_us", "level",
        "margin", "model", "most", "query", "slack_us", "table", "tier", "way_back_us", "worth",
    )  # fmt: skip

    def __init__(self, query: Query, block: RunningBlock | None, snapshot: Snapshot) -> None:
        model = snapshot.models[query.model_id]
        self.query = query
        self.block = block
        self.model = model
        self.level = min(snapshot.level, MOST_LEVEL)
        self.margin = max(MARGIN, snapshot.stretches.get(query.model_id, 1.0))
        self.table: Demands = demands(model, self.level, query.rows, True)
        self.most = min(len(self.table.time_us), snapshot.core_count)
        self.fixed = False  # nothing stops or resizes it
        if block is None:
            self.layer, self.elapsed_us, self.cores = query.next_layer, 0.0, 0
        else:
            self.layer, self.cores = block.layer, len(block.cores)
            self.elapsed_us = snapshot.now_us - max(block.layer_started_us, block.started_us)
            self.fixed = block.stopping or model.indivisible
        self.isolated_us = self.table.span_us(0, self.table.layers, self.most)
        self.least_us = self.remaining_us(self.most)
        self.way_back_us = snapshot.way_back_us
        self.slack_us = float("inf")
        if query.deadline_us is not None:
            self.slack_us = query.deadline_us - snapshot.now_us - self.way_back_us
        self.worth = 1.0
        self.due_us = 0.0
        self.tier = 0  # of `gangway_order`
        self.gang = self.grant = 0

    def remaining_us(self, cores: int) -> float:
        """Return the rest of the query on so many cores, the part of the present layer that is done taken off."""
        table = self.table
        rest_us = table.span_us(self.layer, table.layers, cores)
        if self.elapsed_us > 0:
            rest_us -= min(self.elapsed_us, table.span_us(self.layer, self.layer + 1, cores))
        return rest_us

    @property
    def is_lost(self) -> bool:
        """Whether it misses its deadline even if nothing disturbs it from now on, or has none to meet."""
        if self.query.deadline_us is None:
            return True
        next_layer = self.layer + (self.block is not None)  # a running layer may end at any moment
        return self.slack_us + self.way_back_us < self.model.fastest_us(next_layer, self.most, self.query.rows)

    def boundary_us(self) -> float:
        """Return how long the present layer of a running query still takes."""
        return max(0.0, self.table.span_us(self.layer, self.layer + 1, self.cores) - self.elapsed_us)

    def fewest_cores(self, within_us: float) -> int:
        """Return the fewest cores with which the rest takes no longer; all that it can use if there are none."""
        low, high = 1, self.most
        while low < high:
            middle = (low + high) // 2
            if self.remaining_us(middle) <= within_us:
                high = middle
            else:
                low = middle + 1
        return low


def efficient_cores(model: ModelProfile, level: float, rows: int, core_count: int, efficiency: float) -> int:
    """Return the most cores of which each does at least this share of the work that a single one does.

    Remembered for each model, like its demands.
    """
    key = (efficient_cores, query_level(level), (rows - 1).bit_length(), core_count, efficiency)
    known: int | None = model.derived.get(key)
    if known is None:
        table = demands(model, level, rows, True)
        alone_us = table.time_us[0][-1]
        counts = range(1, min(len(table.time_us), core_count) + 1)
        known = max(count for count in counts if alone_us >= efficiency * count * table.time_us[count - 1][-1])
        model.derived[key] = known
    return known
