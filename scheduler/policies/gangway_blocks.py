"""Versions and layer blocks of what the `gangway` policy runs: VELTAIR's Algorithms 2 and 3 (ASPLOS 2022).

Each layer has the version that is fastest at the present level of interference on the cores that the query really has.
A query begins with a plan of blocks (Algorithm 2): a layer that needs as many cores as the dynamic threshold begins
one. In each block the query keeps the cores that are efficient there, or what it needs for the block's share of the
target; the others come free at its first layer.

The plan stands in the lease, so a gang finds it at a layer's end without a decision. A decision changes the plans of
those that run when level, load or cores have changed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gangway.scheduler.policies.gangway_jobs import Job
from gangway.scheduler.policy import PlannedBlock, Replan
from gangway.scheduler.policy_config import DEFAULT, PolicyConfig
from gangway.scheduler.prediction import Demands, efficient_cores, threshold_share

FEW_CORES = 2  # of a machine: there a query has one or all, and a decision says so
REASON = "interference, load or free cores have changed"


@dataclass(frozen=True, slots=True)
class BlockCut:
    """A model's blocks on so many cores, and by how much they lengthen the whole model. Times are microseconds."""

    blocks: tuple[PlannedBlock, ...]
    longer_us: float


def cut(table: Demands, cores: int, least: int, threshold_cores: float, efficiency: float) -> BlockCut:
    """Return the blocks of a query that begins on so many cores, and keeps some of them at least.

    Each has the cores that are efficient there, by the given share, unless the target needs more. A
    block has never more cores than the one before it: that takes a decision. Where it has as many, its beginning costs
    nothing.
    """
    found: list[PlannedBlock] = []
    left, time_us = cores, 0.0
    for block in table.blocks(threshold_cores):
        if block.begin:
            times_us = [table.span_us(block.begin, block.end, count) for count in range(1, left + 1)]
            left = min(left, max(least, block.cores, efficient_cores(times_us, efficiency)))
            found.append(PlannedBlock(block.begin, left))
        time_us += table.span_us(block.begin, block.end, left)
    return BlockCut(tuple(found), time_us - table.span_us(0, table.layers, cores))


def narrowings(blocks: Sequence[PlannedBlock], layer: int, cores: int) -> tuple[PlannedBlock, ...]:
    """Return the blocks behind a layer that have fewer cores than what comes before them."""
    found = []
    for block in blocks:
        if block.layer > layer and block.cores < cores:
            found.append(block)
            cores = block.cores
    return tuple(found)


class BlockPlanner:
    """Plans what queries do on the cores that one decision gives them. `jobs`: all, each with its grant."""

    __slots__ = ("_active_cores", "_enabled", "may_change")

    def __init__(self, jobs: Sequence[Job], config: PolicyConfig = DEFAULT) -> None:
        self._enabled = config.blocks.enabled
        self._active_cores = 0.0
        changes = False
        for job in jobs:
            changes = changes or job.plans or self._has_blocks(job, job.cores)
            if job.grant:
                self._active_cores += job.forecast.table.average_cores
        self.may_change = changes

    def _has_blocks(self, job: Job, cores: int) -> bool:
        """Whether blocks can matter on so many cores: others want some, or the query could do without some."""
        if not self._enabled or cores < 2:
            return False
        return job.grant < cores or job.context.core_count > FEW_CORES or job.forecast.has_versions

    def versions(self, job: Job, cores: int) -> tuple[int, ...]:
        """Return the versions of a query on so many cores, as a Start has them."""
        if not job.forecast.has_versions:
            return ()
        versions = job.forecast.table.versions_on(cores)
        if versions and (next_layer := job.query.next_layer):
            versions = versions[next_layer:]
            versions = versions if any(versions) else ()
        return versions

    def blocks(self, job: Job, cores: int) -> tuple[PlannedBlock, ...]:
        """Return the blocks of a query on so many cores, as a Start has them: those that it has not come to."""
        if not self._has_blocks(job, cores):
            return ()
        average = job.forecast.table.average_cores
        threshold = round(threshold_share(job.context.core_count, average, max(self._active_cores, average)))
        least = max(job.grant, 1) if job.grant < cores else 1
        key = (cores, least, threshold, job.context.efficiency)
        found = job.forecast.cuts.get(key)
        if found is None:
            found = job.forecast.cuts[key] = cut(job.forecast.table, *key)
        if not found.blocks or job.remaining_us(cores) * job.margin + found.longer_us > job.slack_us:
            return ()
        end = job.model.layers if job.block is None else job.block.end_layer
        return tuple([block for block in found.blocks if job.layer < block.layer < end])

    def changes(self, jobs: Sequence[Job], resized: Sequence[int]) -> Iterator[Replan]:
        """Yield a new plan for each query that runs by another one. `resized`: those that a decision is about.

        Blocks that begin elsewhere, on as many cores as before, are no reason for one.
        """
        for job in jobs:
            running = job.block
            if running is None or job.fixed or job.query.query_id in resized:
                continue
            versions, blocks = self.versions(job, job.cores), self.blocks(job, job.cores)
            now, before = (narrowings(plan, job.layer, job.cores) for plan in (blocks, running.blocks))
            if versions != running.versions or now != before:
                yield Replan(job.query.query_id, versions, blocks, REASON)
