"""A layer block on its gang: how far it is, and when it reaches its target."""

from bisect import bisect_right
from enum import IntEnum

from gangway.scheduler.policy import PlannedBlock, Query, RunningBlock
from gangway.scheduler.profiles import ModelProfile
from gangway.scheduler.timeline import ALONE, BatchPart


class BlockControl(IntEnum):
    """What a block is told to do, as in `executor/leases.py`; a smaller gang is one of the things."""

    RUN = 0  # up to its end layer
    STOP = 1  # at the next layer boundary
    STOP_NOW = 2  # inside a layer
    SHRINK = 3  # at the next layer boundary


class SimulatedBlock:
    """Its progress is a point of a time table (`machine.py`): `offset_us` at time `since_us`, `scale` times as slow.

    `since_us` may lie in the future: until then nothing proceeds (dispatching, ranks that are on their way).
    """

    __slots__ = (
        "batch_part",
        "begin",
        "control",
        "cores",
        "demand",
        "due_us",
        "end_layer",
        "held_layer",
        "held_us",
        "keep",
        "model",
        "offset_us",
        "plan",
        "query",
        "scale",
        "since_us",
        "started_us",
        "steps",
        "table",
        "target",
        "token",
        "versions",
        "view",
        "view_until_us",
    )

    def __init__(
        self,
        query: Query,
        model: ModelProfile,
        end_layer: int,
        cores: tuple[int, ...],
        versions: tuple[int, ...],
        plan: tuple[PlannedBlock, ...] = (),
    ) -> None:
        self.query = query
        self.batch_part: BatchPart = ALONE  # which part of which batch it is, for timelines
        self.model = model
        self.begin = query.next_layer
        self.end_layer = end_layer
        self.target = end_layer
        self.control = BlockControl.RUN
        self.cores = cores
        self.keep = 0  # number of cores that stay at the target; 0: none leaves there before the end
        self.versions = versions
        self.plan = plan
        self.scale = 1.0
        self.started_us = 0.0
        self.held_us = 0.0  # since when it has had its present cores,
        self.held_layer = query.next_layer  # and in which layer it was then
        self.since_us = 0.0
        self.offset_us = 0.0
        self.due_us = 0.0
        self.table: list[float] = []
        self.steps = 0  # interference level that it sees, in steps of the machine's
        self.demand = 0.0
        self.token = 0  # number of its valid event; older ones are void
        self.view: RunningBlock | None = None
        self.view_until_us = 0.0
        self.aim(self.begin + 1)

    def aim(self, layer: int) -> None:
        """Run to the end, or to the next planned block, from this layer on, that has fewer cores."""
        self.control, self.target, self.keep = BlockControl.RUN, self.end_layer, 0
        for begin, cores in self.plan:
            if begin >= layer and cores < len(self.cores):
                self.target, self.keep = begin, cores
                return

    def enter(self, fraction: float, now_us: float, delay_us: float) -> None:
        """Begin at layer `begin`, of which a fraction is done, so much later than now."""
        table = self.table
        self.offset_us = table[self.begin] + fraction * (table[self.begin + 1] - table[self.begin])
        self.started_us = self.held_us = now_us
        self.since_us = now_us + delay_us

    def position_us(self, now_us: float) -> float:
        """Return how far it is in its table."""
        passed_us = now_us - self.since_us
        return self.offset_us + passed_us / self.scale if passed_us > 0 else self.offset_us

    def layer(self, position_us: float) -> int:
        """Return the layer at a point of the table; the last one of the block at its end."""
        return bisect_right(self.table, position_us, self.begin + 1, self.end_layer) - 1

    def fraction(self, layer: int, position_us: float) -> float:
        """Return which part of this layer is done at a point of the table."""
        table = self.table
        layer_us = table[layer + 1] - table[layer]
        return min(1.0, max(0.0, (position_us - table[layer]) / layer_us)) if layer_us > 0 else 1.0

    def use_table(self, table: list[float], now_us: float, scale: float) -> None:
        """Go on from where it is at other speeds."""
        position_us = self.position_us(now_us)
        layer = self.layer(position_us)
        fraction = self.fraction(layer, position_us)
        self.table = table
        self.offset_us = table[layer] + fraction * (table[layer + 1] - table[layer])
        self.scale = scale
        self.since_us = max(self.since_us, now_us)

    def arrive(self, now_us: float) -> None:
        """Stand at the beginning of the target layer, which is reached now.

        By the clock alone it may be short of it by a rounding. Policies would take it for the layer before, and decide
        on that again and again while no time passes.
        """
        self.offset_us, self.since_us = self.table[self.target], now_us

    def pause(self, now_us: float, delay_us: float) -> None:
        """Stand still for some time."""
        self.offset_us = self.position_us(now_us)
        self.since_us = max(now_us, self.since_us) + delay_us

    def reach_us(self, layer: int) -> float:
        """Return when the beginning of a layer that lies ahead will be reached, under these conditions."""
        return self.since_us + (self.table[layer] - self.offset_us) * self.scale

    def at(self, now_us: float) -> RunningBlock:
        """Return what a policy sees of it. The same object as long as it is in the same layer."""
        if self.view is not None and now_us < self.view_until_us:
            return self.view
        position_us = self.position_us(now_us)
        layer = self.layer(position_us)
        self.view = RunningBlock(
            self.query,
            self.end_layer,
            self.cores,
            self.started_us,
            layer,
            self.since_us + (self.table[layer] - self.offset_us) * self.scale,
            self.control is not BlockControl.RUN,
            self.versions,
            blocks=self.plan,
        )
        self.view_until_us = self.reach_us(layer + 1)
        return self.view
