"""How much longer a query runs, on how many cores: what the `gangway` policy decides by. Pure.

Times come from the profile, in the versions that are fastest at the present level of interference, and as long as they
are at that level (`blocks.demands`).
"""

from gangway.scheduler.blocks import LEVEL_STEP, Demands, demands, query_level
from gangway.scheduler.model_profile import ModelProfile
from gangway.scheduler.policy import Query, RunningBlock, Snapshot

MARGIN = 1.04  # at least: predictions are stretched by this where a deadline depends on them
INFINITE = float("inf")
MOST_LEVEL = 1.0  # what slows layers down more than this is not memory, and passes as it came


class Outlook:
    """What is predicted of all queries of a model with about as many rows, at one level, on so many cores.

    Computed once: see `outlook`. Times are microseconds. `most`: cores that such a query can use.
    `whole_us[cores - 1]`: the whole query. `isolated_us`: on all cores that it can use. `fastest_us[layer]`: the
    profile's for one row, from that layer on; empty for more rows. `versions`: of the layers; empty if all are the
    default ones.
    """

    __slots__ = ("_efficient", "_of", "fastest_us", "isolated_us", "most", "table", "versions", "whole_us")

    def __init__(self, model: ModelProfile, level: float, rows: int, core_count: int) -> None:
        self.table = table = demands(model, level, rows, True)
        self.most = min(len(table.time_us), core_count)
        self.whole_us = tuple([table.span_us(0, table.layers, cores + 1) for cores in range(len(table.time_us))])
        self.isolated_us = self.whole_us[self.most - 1]
        layers = range(table.layers + 1) if rows == 1 else ()
        self.fastest_us = tuple([model.fastest_us(layer, self.most) for layer in layers])
        self.versions = table.versions if any(table.versions) else ()
        self._of = (model, level, rows, core_count)
        self._efficient: dict[float, int] = {}

    def efficient_cores(self, efficiency: float) -> int:
        """Return what `efficient_cores` does for such a query."""
        known = self._efficient.get(efficiency)
        if known is None:
            known = self._efficient[efficiency] = efficient_cores(*self._of, efficiency)
        return known


def outlook(model: ModelProfile, level: float, rows: int, core_count: int) -> Outlook:
    """Return what is predicted of such queries, remembered for each model, like its demands."""
    key = (outlook, round(level / LEVEL_STEP) if level else 0, (rows - 1).bit_length(), core_count)
    known: Outlook | None = model.derived.get(key)
    if known is None:
        known = model.derived[key] = Outlook(model, level, rows, core_count)
    return known


class Work:
    """A waiting query, or a running one with its block, and what is predicted of it. Times are microseconds.

    `slack_us`: from now to its deadline, less the answer's way back. `due_us`: its place in the order. `margin`: by how
    much to stretch times where a deadline depends on them. `worth`: of its deadline. `gang`: cores it asks for,
    `grant`: cores it shall have.
    """

    __slots__ = (
        "block", "cores", "due_us", "elapsed_us", "fixed", "gang", "grant", "isolated_us", "layer", "level",
        "margin", "model", "most", "now_us", "outlook", "query", "slack_us", "table", "tier", "way_back_us", "worth",
    )  # fmt: skip

    def __init__(self, query: Query, block: RunningBlock | None, snapshot: Snapshot) -> None:
        model_id = query.model_id
        model = snapshot.models[model_id]
        level = snapshot.level
        self.query = query
        self.block = block
        self.model = model
        self.level = level = level if level < MOST_LEVEL else MOST_LEVEL
        stretch = snapshot.stretches.get(model_id, MARGIN)
        self.margin = stretch if stretch > MARGIN else MARGIN
        self.outlook = known = outlook(model, level, query.rows, snapshot.core_count)
        self.table: Demands = known.table
        self.most = known.most
        self.isolated_us = known.isolated_us
        self.way_back_us = snapshot.way_back_us
        self.slack_us = INFINITE
        if query.deadline_us is not None:
            self.slack_us = query.deadline_us - snapshot.now_us - self.way_back_us
        self.fixed = False  # nothing stops or resizes it
        self.elapsed_us = 0.0
        self.cores = 0
        self.layer = query.next_layer
        if block is not None:
            self.layer, self.cores = block.layer, len(block.cores)
            self.elapsed_us = snapshot.now_us - max(block.layer_started_us, block.started_us)
            self.fixed = block.stopping or model.indivisible
        self.worth = 1.0
        self.due_us = 0.0
        self.now_us = snapshot.now_us
        self.tier = 0  # of `gangway_order`
        self.gang = self.grant = 0

    @property
    def least_us(self) -> float:
        """Its rest on all cores that it can use."""
        return self.remaining_us(self.most)

    def remaining_us(self, cores: int) -> float:
        """Return the rest of the query on so many cores, the part of the present layer that is done taken off."""
        layer, known = self.layer, self.outlook
        if not layer:
            rest_us = known.whole_us[cores - 1 if cores < len(known.whole_us) else -1]
        else:
            rest_us = self.table.span_us(layer, self.table.layers, cores)
        if self.elapsed_us > 0:
            rest_us -= min(self.elapsed_us, self.table.span_us(layer, layer + 1, cores))
        return rest_us

    @property
    def is_lost(self) -> bool:
        """Whether it misses its deadline even if nothing disturbs it from now on, or has none to meet."""
        query = self.query
        if query.deadline_us is None:
            return True
        next_layer = self.layer + (self.block is not None)  # a running layer may end at any moment
        known = self.outlook.fastest_us
        fastest_us = known[next_layer] if known else self.model.fastest_us(next_layer, self.most, query.rows)
        return self.slack_us + self.way_back_us < fastest_us

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
