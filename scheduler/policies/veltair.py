"""What VELTAIR's spatial policies share: units in order of arrival, conflicts, growing, and what is about to end."""

from abc import abstractmethod
from dataclasses import dataclass

from gangway.scheduler.policies.base import Policy
from gangway.scheduler.policy import Query, Resize, RunningBlock, Snapshot, Start
from gangway.scheduler.prediction import Block, Demands, demands, threshold_share
from gangway.scheduler.profiles import ModelProfile

# The paper gives the layers the whole target, though then every wait misses it. A tenth is left for waiting and for
# what is predicted wrongly, in all policies of this family alike (docs/measurements/papers.md has others).
TARGET_SHARE = 0.9
# What a unit takes beside its layers: from the decision to its first task, and until its cores can be used again. The
# paper's demands are measured in its own system, with whatever a unit costs there.
UNIT_US = 30.0
ABOUT_TO_END = 0.1  # of its time is left (section 4.3)


@dataclass(frozen=True, slots=True)
class InterferenceLoad:
    """What else runs: the level of interference that stays, and the sum of the queries' average demands."""

    level: float
    active_cores: float


class SpatialPolicy(Policy):
    """Ready units start in order of arrival, on as many free cores as they ask for.

    On a conflict, fewer are free, a unit starts with those and grows when cores come free: before any unit of a younger
    query starts. A subclass says which layers a unit has and what it asks for.
    """

    adapts_versions = False  # chooses versions, and knows demands, by the level of interference
    adapts_blocks = False  # needs the sum of the active queries' average demands

    def __init__(self) -> None:
        self._short: dict[int, int] = {}  # query -> cores asked for, of units that started with fewer

    @abstractmethod
    def unit(self, of: Demands, begin: int, core_count: int, active_cores: float) -> Block:
        """Return the unit of a query whose next layer is `begin`.

        `active_cores`: sum of the average demands of all queries that run, this one's included (if `adapts_blocks`).
        """

    def decide(self, snapshot: Snapshot) -> list[Start | Resize]:
        """Grow units in conflict and start waiting ones, from the oldest on, until no core is free."""
        short = self._units_in_conflict(snapshot)
        free = list(snapshot.free_cores)
        if not free or not (short or snapshot.waiting):
            return []
        decisions: list[Start | Resize] = []
        load = self._load(snapshot)
        active_cores, leases = load.active_cores, snapshot.free_leases
        for query in snapshot.waiting:
            while short and short[-1].query.query_id < query.query_id and free:
                decisions.append(self._grow(short.pop(), free, snapshot, load.level))
            if not free:
                break
            if not query.started:
                if leases <= 0:
                    continue
                leases -= 1
            of = self.demands_of(query.profile(snapshot.models), query, load.level)
            active_cores += of.average_cores
            block = self.unit(of, query.next_layer, snapshot.core_count, active_cores)
            decisions.append(self._start(query, block, of, snapshot.core_count, free))
        while short and free:
            decisions.append(self._grow(short.pop(), free, snapshot, load.level))
        return decisions

    def demands_of(self, profile: ModelProfile, query: Query, level: float) -> Demands:
        """Return what the query's model asks for; the level counts for policies that adapt versions."""
        adaptive = self.adapts_versions
        return demands(profile, level if adaptive else 0.0, query.rows, adaptive, TARGET_SHARE, UNIT_US)

    def _start(self, query: Query, block: Block, of: Demands, core_count: int, free: list[int]) -> Start:
        wanted = min(block.cores, core_count)
        cores = _take(free, wanted)
        if len(cores) < wanted:
            self._short[query.query_id] = wanted
        chosen = of.versions_on(len(cores))[block.begin : block.end]
        reason = f"layers {block.begin} to {block.end}: {len(cores)} of {wanted} cores"
        return Start(query.query_id, block.end, cores, chosen if any(chosen) else (), wanted, reason)

    def _grow(self, block: RunningBlock, free: list[int], snapshot: Snapshot, level: float) -> Resize:
        """Let a unit have more cores, in versions for these."""
        query_id = block.query.query_id
        wanted = self._short[query_id]
        cores = block.cores + _take(free, wanted - len(block.cores))
        if len(cores) >= wanted:
            del self._short[query_id]
        reason = f"in conflict: {len(cores)} of {wanted} cores now"
        if not self.adapts_versions:
            return Resize(query_id, cores, reason)
        of = self.demands_of(block.query.profile(snapshot.models), block.query, level)
        versions = of.versions_on(len(cores))[block.query.next_layer : block.end_layer]
        return Resize(query_id, cores, reason, versions if any(versions) else ())

    def _units_in_conflict(self, snapshot: Snapshot) -> list[RunningBlock]:
        """Return those that run on fewer cores than they asked for, the oldest last; forget those that ended."""
        if not self._short:
            return []
        short = [block for block in snapshot.running if block.query.query_id in self._short]
        self._short = {block.query.query_id: self._short[block.query.query_id] for block in short}
        growing = [
            block for block in short if not block.stopping and len(block.cores) < self._short[block.query.query_id]
        ]
        return sorted(growing, key=lambda block: -block.query.query_id)

    def _load(self, snapshot: Snapshot) -> InterferenceLoad:
        if not self.adapts_versions and not self.adapts_blocks:
            return InterferenceLoad(0.0, 0.0)
        busy = staying = 0
        blocks = []
        for block in snapshot.running:
            ends = about_to_end(block, snapshot)
            busy += len(block.cores)
            staying += 0 if ends else len(block.cores)
            if not ends or block.end_layer < block.query.profile(snapshot.models).layers:
                blocks.append(block)
        level = snapshot.level * staying / busy if busy else 0.0
        if not self.adapts_blocks:
            return InterferenceLoad(level, 0.0)
        return InterferenceLoad(level, sum(self._average(block, snapshot, level) for block in blocks))

    def _average(self, block: RunningBlock, snapshot: Snapshot, level: float) -> float:
        return self.demands_of(block.query.profile(snapshot.models), block.query, level).average_cores


def about_to_end(block: RunningBlock, snapshot: Snapshot) -> bool:
    """Tell whether less than a tenth of a unit's predicted time is left."""
    profile, query = block.query.profile(snapshot.models), block.query
    level = snapshot.level
    time_us = profile.span_us(query.next_layer, block.end_layer, len(block.cores), query.rows, level)
    return snapshot.now_us - block.started_us > (1 - ABOUT_TO_END) * time_us


def _take(free: list[int], count: int) -> tuple[int, ...]:
    taken = tuple(free[:count])
    del free[:count]
    return taken


# Veltair-AS (ASPLOS 2022, section 5.1): adaptive scheduling alone.
#
# Layer blocks by the dynamic threshold (Algorithm 2, section 4.3), every layer in its first version. Demands are those
# of a quiet machine: the proxy of interference belongs to the other half.
#
# Algorithm 3 gives all idle cores to each query (`thres = C_total - sum`); the text of 4.3 and its example share them
# out in proportion to the models' averages, which is done here. "Active" are the queries that run, but for those about
# to end.
#
# The threshold has two readings (`Demands.next_block`): "veltair_as" takes it as a limit, "veltair_as:use" as the cores
# that a block can use beyond its average.

USE = "use"


class VeltairAs(SpatialPolicy):
    """Layer blocks whose size and cores follow the load."""

    name = "veltair_as"
    adapts_blocks = True

    def __init__(self, uses_threshold: bool = False) -> None:
        super().__init__()
        self._uses_threshold = uses_threshold
        if uses_threshold:
            self.name = f"{self.name}:{USE}"

    def unit(self, of: Demands, begin: int, core_count: int, active_cores: float) -> Block:
        """Return the block up to the next pivot, by the threshold of this moment."""
        threshold = threshold_share(core_count, of.average_cores, active_cores)
        return of.next_block(begin, threshold, self._uses_threshold)


# VELTAIR (ASPLOS 2022), Algorithm 3: adaptive scheduling and adaptive compilation together (its Veltair-FULL).
#
# Whenever a unit ends: read the level of interference, without units that are about to end; take each layer's version
# for it; compute the threshold; cut the next block; run it. Levels are measured as one number for the machine. Units
# about to end are taken out in proportion to the cores they hold, since the paper does not say how its counters would
# tell them apart.
#
# The paper's workers fetch a task and keep it to its end. Here units are ordered by their queries' arrival, so one
# that has begun goes on before younger ones begin.


class Veltair(VeltairAs):
    """Layer blocks and versions that follow load and interference."""

    name = "veltair"
    adapts_versions = True


def make_veltair(argument: str) -> Veltair:
    """Make the policy with one of the readings of its threshold: of "" or "use". Raises ValueError."""
    return Veltair(_uses_threshold("veltair", argument))


def make_veltair_as(argument: str) -> VeltairAs:
    """Make the policy without the choice of versions, as above. Raises ValueError."""
    return VeltairAs(_uses_threshold("veltair_as", argument))


def _uses_threshold(name: str, argument: str) -> bool:
    if argument not in ("", USE):
        raise ValueError(f"scheduler {name!r} takes no argument or {USE!r}, got {argument!r}")
    return argument == USE


# Planaria's scheduling (MICRO 2020) as VELTAIR ports it to CPUs (ASPLOS 2022, sections 3.2 and 5.1): layer by layer.
#
# Each layer asks for the fewest cores that meet its share of the target, takes what is free and grows later. The paper
# gives no pseudo-code, and "tile-wise preemption" of its section 3.2 is what growing does here: a gang's tasks are
# shared out anew among more cores. Interference and versions are unknown to it.


class Planaria(SpatialPolicy):
    """Every layer is a unit."""

    name = "planaria"

    def unit(self, of: Demands, begin: int, core_count: int, active_cores: float) -> Block:
        """Return the next layer."""
        return Block(begin, begin + 1, of.layer_cores[begin])


# Veltair-AC (ASPLOS 2022, section 5.1): adaptive compilation alone.
#
# Layers are scheduled one by one, as by the paper's baseline, Planaria; each in the version that is fastest at the
# present level of interference, on the cores which that version needs at this level. The paper does not say what
# granularity its AC has; section 5.2 blames its conflicts on the missing layer blocks, so it is the baseline's.


class VeltairAc(Planaria):
    """Every layer is a unit, in the version for the level of interference."""

    name = "veltair_ac"
    adapts_versions = True


# Blocks of a fixed number of layers: VELTAIR's motivation (ASPLOS 2022, section 3.2, Fig. 3 to 5), with 6 and 11.
#
# The paper says no more of it than the size. A block asks for the fewest cores that meet the sum of its layers'
# targets; on a conflict it does what the layer-wise baseline does.

DEFAULT_LAYERS = 6


class FixedBlock(SpatialPolicy):
    """Units of `layers` layers, the last one of what is left."""

    def __init__(self, layers: int = DEFAULT_LAYERS) -> None:
        super().__init__()
        self._layers = layers
        self.name = f"fixed_block:{layers}"

    def unit(self, of: Demands, begin: int, core_count: int, active_cores: float) -> Block:
        """Return the next layers."""
        end = min(begin + self._layers, of.layers)
        return Block(begin, end, of.block_cores(begin, end))


def fixed_block(argument: str) -> FixedBlock:
    """Make the policy of the number of layers, as text; empty for 6. Raises ValueError."""
    if argument and not (argument.isascii() and argument.isdigit() and int(argument) > 0):
        raise ValueError(f"scheduler 'fixed_block' takes a number of layers, as in fixed_block:6, got {argument!r}")
    return FixedBlock(int(argument or DEFAULT_LAYERS))


# Model-wise first come, first served: VELTAIR's simplest baseline (ASPLOS 2022, section 3.2).
#
# "The tasks will be served immediately if there are available resources while waiting otherwise", and model-wise
# scheduling "evenly assigns a fixed number of cores to all layers": the fewest that meet the model's target (the black
# line of Fig. 4b). The paper does not say whether a later query may overtake one that waits; first come, first served
# says that none does.


class ModelFcfs(Policy):
    """Each query runs as one block on its model's fixed number of cores, strictly in order of arrival.

    The oldest query waits until its whole gang is free, and nobody overtakes it: one that started on the leftovers of
    another would crawl on them to its end. A model without a target has no demand of its own: it takes all cores that
    it can use, `min(core_count, max_ranks)`.
    """

    name = "model_fcfs"

    def decide(self, snapshot: Snapshot) -> list[Start]:
        """Start waiting queries from the oldest on, until one does not fit."""
        free, leases = snapshot.free_cores, snapshot.free_leases
        starts: list[Start] = []
        for query in snapshot.waiting:
            if not free or (not query.started and leases <= 0):
                break
            profile = query.profile(snapshot.models)
            of = self.demands_of(profile, query, snapshot.level)
            wanted = min(_gang_size(profile, of, query), snapshot.core_count)
            if not 0 < wanted <= len(free):
                break
            gang, free = free[:wanted], free[wanted:]
            leases -= not query.started
            chosen = of.versions_on(wanted)[query.next_layer :] if of else ()
            versions = chosen if any(chosen) else ()
            starts.append(
                Start(query.query_id, profile.layers, gang, versions, wanted, f"the whole gang of {wanted} is free")
            )
        return starts

    def demands_of(self, profile: ModelProfile, query: Query, level: float) -> Demands | None:
        """Return what the query asks for; None if it has no target."""
        return (
            demands(profile, 0.0, query.rows, share=TARGET_SHARE, unit_us=UNIT_US)
            if profile.qos_us is not None
            else None
        )


def _gang_size(profile: ModelProfile, of: Demands | None, query: Query) -> int:
    return of.block_cores(query.next_layer, profile.layers) if of else profile.max_ranks


# Protean's place in VELTAIR's Table 1 (ASPLOS 2022): spatial, static granularity, adaptive compilation.
#
# Protean (MICRO 2014) rewrites batch programs online so that they pollute a shared cache less; it knows no layers, and
# VELTAIR gives no figures of it. What its row of the table describes is done here: the whole model is the unit, as
# with first come, first served, and each of its layers takes the version for the level of interference when it starts.
# The fixed number of cores is that which those versions need at this level.


class Protean(ModelFcfs):
    """Whole models in versions that follow the level of interference."""

    name = "protean"

    def demands_of(self, profile: ModelProfile, query: Query, level: float) -> Demands:
        """Return what the query asks for at the level; without a target it is 3 times the isolated latency."""
        return demands(profile, level, query.rows, adaptive=True, share=TARGET_SHARE, unit_us=UNIT_US)
