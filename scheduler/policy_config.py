"""Every number that steers the default policy and its driver, with its unit and its source.

A part with `enabled` can be left out: `DEFAULT.without("fairness")`, or `--scheduler gangway:without=fairness+aging`.
`benchmarks/scheduling/ablation.py` says what each part is worth. Where a comment names a paper, the rule is the
paper's; "measured by" names the benchmark that a number was chosen with; "bound" marks one that only has to be about
right.
"""

from typing import Final

import msgspec
from msgspec.structs import fields, replace

SWITCH_US: Final = 300.0  # stop a query and start it again; a cost, measured by benchmarks.kernels.live_gang


class PredictionUse(msgspec.Struct, frozen=True):
    """How predictions of the profile are used where a deadline depends on them."""

    min_margin_factor: float = 1.04  # times the prediction, at least; measured by gangway simulate
    max_level: float = 1.0  # of interference: what slows down more is not memory, and ends soon; bound


class PredictionError(msgspec.Struct, frozen=True):
    """A model's predictions are stretched by what its blocks lately took beyond theirs: mean plus deviation.

    The estimator of TCP's retransmission time-out (Jacobson, SIGCOMM 1988).
    """

    enabled: bool = True
    mean_gain: float = 1 / 8  # weight of the latest block in the mean; Jacobson's
    deviation_gain: float = 1 / 4  # the same in the deviation; Jacobson's
    min_predicted_us: float = 500.0  # in shorter blocks waking up counts for more than anything else; bound
    max_factor: float = 2.0  # a machine that stood still says nothing about the next query; bound


class GangSlowdown(msgspec.Struct, frozen=True):
    """A query asks for fewer cores while gangs of several exceed their predictions more than gangs of one."""

    enabled: bool = True
    gain: float = 1 / 32  # weight of the latest block, of all models together; bound
    max_ratio: float = 4.0  # times its prediction that a block counts at most; bound


class InterferenceLevel(msgspec.Struct, frozen=True):
    """Predictions depend on how much running queries slow each other down (VELTAIR, ASPLOS 2022, section 4.1).

    The level is the median over the last blocks of (time - isolated time) / (what a level of 1 adds to it).
    """

    enabled: bool = True
    window_us: float = 250_000.0  # older blocks say nothing about now; bound
    max_samples: int = 15  # blocks in the window; bound
    min_spacing_us: float = 2_000.0  # between two samples: more cost more than they tell; bound
    min_block_us: float = 100.0  # in shorter blocks waking up counts for more than caches; bound
    min_slope: float = 0.2  # mean of a block: below it noise counts for more than interference; bound
    tolerance_factor: float = 1.05  # so far from its isolated time a block may be when it is alone; bound
    max_level: float = 4.0  # bound


class Planning(msgspec.Struct, frozen=True):
    """Of very many waiting queries a decision plans only those that may be served next."""

    enabled: bool = True
    min_queries: int = 32  # planned, or as many as there are cores; measured by benchmarks.scheduling.decisions


class VirtualDeadlines(msgspec.Struct, frozen=True):
    """When a query that has no deadline, or cannot meet it, should be answered all the same."""

    late_factor: float = 10.0  # times its latency target after its arrival; bound
    best_effort_factor: float = 30.0  # times its isolated latency after its arrival; bound
    best_effort_min_us: float = 1_000_000.0  # after its arrival, at least; bound


class Triage(msgspec.Struct, frozen=True):
    """As few queries as possible are given up so that the others are in time (Moore and Hodgson, 1968)."""

    enabled: bool = True


class Backfill(msgspec.Struct, frozen=True):
    """A late query goes before longer ones that can spare the time."""

    enabled: bool = True


class LatestStart(msgspec.Struct, frozen=True):
    """A query that uses few of many cores is ordered nearly by its latest start instead of its deadline."""

    enabled: bool = True


class ForesightConfig(msgspec.Struct, frozen=True):
    """While deadlines ask for the whole machine, a query is given up for which those to come leave too little."""

    enabled: bool = True
    min_load: float = 1.0  # share of the machine's time that queries with deadlines ask for; by definition of overload
    review_us: float = 10_000.0  # between two sums of the load; bound


class Fairness(msgspec.Struct, frozen=True):
    """The deadlines of a model weigh more, the more of them it missed lately."""

    enabled: bool = True
    goal_share: float = 0.98  # of a model's queries in time; above the 95 % of benchmarks.serving
    gain: float = 0.02  # weight of the latest query in the share: about the last 50; bound
    weight_per_share: float = 100.0  # per missing share; measured by gangway simulate
    max_weight: float = 10.0  # bound


class PrecisionChoice(msgspec.Struct, frozen=True):
    """A query that may be computed in fp32 or in bf16 is so in fp32 if nobody is late by it; left out: never."""

    enabled: bool = True
    max_load: float = 0.9  # share of the machine's time that others are taken to want, at most; bound
    crowding_step: float = 0.25  # of the factor that the load makes: not every request changes what may begin; bound


class LateBound(msgspec.Struct, frozen=True):
    """A late query goes first once it has waited so much longer than whom order of arrival would serve now."""

    enabled: bool = True
    factor: float = 3.0  # times that wait; a price that is set
    shorter_share: float = 0.5  # of its rest: shorter queries still go first; bound
    max_waiting: int = 32  # requests: with more, the machine is overloaded, and who is late is refused; as of shedding
    max_wait_us: float = 1_000_000.0  # if order of arrival made requests wait for longer, they are too many; bound


class AgingConfig(msgspec.Struct, frozen=True):
    """The oldest query behind its virtual deadline has the machine for a bounded share of the time: nothing starves."""

    enabled: bool = True
    machine_share: float = 0.05  # of the time of the whole machine; a price that is set
    burst_us: float = 20_000.0  # of the whole machine at once; about one long query


class BriefConfig(msgspec.Struct, frozen=True):
    """A query that computes no longer than a switch takes goes first, for a bounded share of the time."""

    enabled: bool = True
    machine_share: float = 0.05  # of the time of the whole machine; a price that is set
    burst_us: float = 20_000.0  # of the whole machine at once; bound


class Restarts(msgspec.Struct, frozen=True):
    """Of the late queries that were stopped only so many keep their leases and memory; the others start over."""

    enabled: bool = True
    max_stopped_per_core: int = 2  # measured by gangway simulate at 3 x capacity


class CoreShares(msgspec.Struct, frozen=True):
    """How many cores a query asks for."""

    busy_efficiency: float = 0.7  # that the last cores of a gang add, against one alone; measured by gangway simulate
    efficiency_step: float = 0.02  # efficiencies are rounded to it, since what follows is remembered; bound


class DeadlineGangs(msgspec.Struct, frozen=True):
    """A query asks for more cores than are efficient if its deadline needs them."""

    enabled: bool = True


class Growth(msgspec.Struct, frozen=True):
    """Running queries grow into idle cores."""

    enabled: bool = True
    idle_efficiency: float = 0.15  # that the last cores of a gang add, against one alone; measured by gangway simulate
    min_gain_us: float = 150.0  # that growing saves; what joining costs, measured by benchmarks.kernels.live_gang
    min_gain_share: float = 0.03  # of the rest; bound


class Blocks(msgspec.Struct, frozen=True):
    """A query gives up the cores that are not efficient in its next blocks (VELTAIR, Algorithm 2)."""

    enabled: bool = True


class Preemption(msgspec.Struct, frozen=True):
    """A running query makes room for a more urgent one."""

    enabled: bool = True
    min_wake_us: float = 50.0  # a moment that is nearer is not waited for; bound


class Trading(msgspec.Struct, frozen=True):
    """A query that was given up yields to a shorter one that it would make late."""

    enabled: bool = True
    min_length_factor: float = 2.0  # of cores x time, the longer over the shorter one; measured by gangway simulate


class LatencyPreemption(msgspec.Struct, frozen=True):
    """A query yields, though no deadline is saved, if latencies in sum become shorter and none is lost."""

    enabled: bool = True


class StopAtOnce(msgspec.Struct, frozen=True):
    """A query is stopped between two tasks if its next layer boundary is far away."""

    enabled: bool = True
    min_boundary_us: float = 300.0  # farther is far; measured by benchmarks.kernels.live_gang


class DecisionGap(msgspec.Struct, frozen=True):
    """While no core is free, newcomers wait for the next decision, so that deciding takes half of a core at most."""

    enabled: bool = True
    min_gap_factor: float = 1.0  # times the last decision's duration
    max_gap_us: float = 5_000.0  # whatever held up the scheduler; bound


class BestEffortGap(msgspec.Struct, frozen=True):
    """A newcomer without a deadline takes cores from nobody: it waits longest, and does not wake the scheduler."""

    enabled: bool = True
    gap_us: float = 50_000.0  # bound


class Crowding(msgspec.Struct, frozen=True):
    """Waiting requests without hope make room before a front end's request slots run out."""

    enabled: bool = True
    max_waiting_share: float = 7 / 8  # of the slots; bound
    room_share: float = 1 / 16  # of the slots is made at once; bound


class Shedding(msgspec.Struct, frozen=True):
    """Beyond two seconds of late work the oldest of the lowest class is refused, and the newest best effort."""

    enabled: bool = True
    max_late_us: float = 2_000_000.0  # of the whole machine's time may wait; measured by benchmarks.scheduling.ablation
    room_share: float = 1 / 8  # of that is made at once; bound
    min_waiting: int = 32  # requests; fewer are no overload, and so many of best effort may wait; bound


class BatchingConfig(msgspec.Struct, frozen=True):
    """How batches are formed and split (Packrat; docs/explanation/batching.md)."""

    max_fill_cost_share: float = 0.5  # of what rows take alone, that filling up a batch with them may cost; bound
    min_shown: int = 4  # batches of a kind are shown to the policy, or as many as there are cores; bound
    min_gain_share: float = 0.02  # of a split, or of a larger batch; measured by benchmarks.batching
    min_gang_gain_share: float = 0.05  # of one gang over several, for rows that are requests; by benchmarks.batching
    gang_loss_share: float = 0.5  # what one gang loses in addition, of what others take from a gang of one core
    error_steps: int = 20  # that loss is rounded to twentieths; bound
    gang_us: float = 50.0  # a further gang: a lease to write, to send, to hear of; by benchmarks.kernels.live_gang
    round_us: float = 250.0  # from the end of a part to the next one on its cores; by benchmarks.kernels.live_gang
    unknown_doubt: float = 1.0  # of a time that too few runs stand behind
    max_steps: int = 128  # more rows are counted in steps of 2, 4, ...: finer than what is measured
    max_queue_rows: int = 1024  # in a longer queue the next batch is the same; bound
    max_busy_batches: int = 4  # so far a busy period is looked ahead; bound
    max_load: float = 0.95  # share of the machine's time; with more, a busy period has no end to plan for


class ArrivalSmoothing(msgspec.Struct, frozen=True):
    """How often a model is asked, smoothed over its requests."""

    gain: float = 1 / 8  # weight of the latest gap, as in TCP's round-trip time (Jacobson, SIGCOMM 1988)
    load_gain: float = 1 / 32  # the same for the load: a burst is not yet a load; bound
    max_gap_us: float = 1_000_000.0  # a longer pause says no more about the next request; bound


class PolicyConfig(msgspec.Struct, frozen=True):
    """The parts of the default policy, of the dispatcher that drives it, and of admission."""

    prediction: PredictionUse = PredictionUse()
    prediction_error: PredictionError = PredictionError()
    gang_slowdown: GangSlowdown = GangSlowdown()
    interference: InterferenceLevel = InterferenceLevel()
    planning: Planning = Planning()
    virtual_deadlines: VirtualDeadlines = VirtualDeadlines()
    triage: Triage = Triage()
    backfill: Backfill = Backfill()
    latest_start: LatestStart = LatestStart()
    foresight: ForesightConfig = ForesightConfig()
    fairness: Fairness = Fairness()
    precision_choice: PrecisionChoice = PrecisionChoice()
    late_bound: LateBound = LateBound()
    aging: AgingConfig = AgingConfig()
    brief: BriefConfig = BriefConfig()
    restarts: Restarts = Restarts()
    shares: CoreShares = CoreShares()
    deadline_gangs: DeadlineGangs = DeadlineGangs()
    growth: Growth = Growth()
    blocks: Blocks = Blocks()
    preemption: Preemption = Preemption()
    trading: Trading = Trading()
    latency_preemption: LatencyPreemption = LatencyPreemption()
    stop_at_once: StopAtOnce = StopAtOnce()
    decision_gap: DecisionGap = DecisionGap()
    best_effort_gap: BestEffortGap = BestEffortGap()
    crowding: Crowding = Crowding()
    shedding: Shedding = Shedding()
    batching: BatchingConfig = BatchingConfig()
    arrivals: ArrivalSmoothing = ArrivalSmoothing()

    def without(self, *names: str) -> "PolicyConfig":
        """Return it with these parts left out. Raises ValueError for what is no part, or cannot be left out."""
        parts = self.parts()
        for name in names:
            if name not in parts:
                raise ValueError(f"no part of the policy: {name!r}; known: {', '.join(parts)}")
        return replace(self, **{name: replace(getattr(self, name), enabled=False) for name in names})

    @classmethod
    def parts(cls) -> tuple[str, ...]:
        """Return the names of the parts that can be left out."""
        return tuple(each.name for each in fields(cls) if hasattr(getattr(DEFAULT, each.name), "enabled"))


DEFAULT: Final = PolicyConfig()
BATCHING: Final = DEFAULT.batching
ARRIVALS: Final = DEFAULT.arrivals
INTERFERENCE: Final = DEFAULT.interference
ERROR: Final = DEFAULT.prediction_error
SLOWDOWN: Final = DEFAULT.gang_slowdown
