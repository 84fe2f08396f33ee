"""The modelled machine: cores, what scheduling costs on them, and how much their tenants disturb each other."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Overheads:
    """What a query costs beside its layers, us. `docs/explanation/simulator.md` says how each was measured.

    `submit_us`, `answer_us`: from arrival until the scheduler has the request, and from the last layer's end until the
    client has the answer. `dispatch_us`: from a decision to the first task. `leave_us`: from a block's end until the
    scheduler may use its cores again. `grow_us`: from a decision until a joining rank works. `stop_us`: how long a Stop
    `at_once` lets the tasks in hand go on. `stolen_us`: CPU that front end and scheduler take from the workers for one
    query, where all share the cores; while a gang uses the first core they get half of it, so they take so much longer.
    """

    submit_us: float = 0.0
    answer_us: float = 0.0
    dispatch_us: float = 0.0
    leave_us: float = 0.0
    grow_us: float = 0.0
    stop_us: float = 0.0
    stolen_us: float = 0.0


NO_OVERHEADS = Overheads()


@dataclass(frozen=True)
class Machine:
    """Cores that share caches and memory.

    Contention: a running block's demand is the share of one core's memory bandwidth that its compulsory traffic takes.
    The interference level that a block sees is `level_per_demand` times the demand of all OTHER running blocks; levels
    are rounded to multiples of `level_step`, so that a block is timed anew only when it matters.
    `leases`: how many queries can be on the way at once; 0: as many as in the live server.
    """

    cores: int
    overheads: Overheads = NO_OVERHEADS
    level_per_demand: float = 0.0
    level_step: float = 0.02
    leases: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError for a machine that cannot be."""
        if self.cores < 1:
            raise ValueError(f"a machine has at least one core, not {self.cores}")
        if self.level_per_demand < 0 or self.level_step <= 0 or self.leases < 0:
            raise ValueError("level_per_demand and leases are not negative, level_step is positive")
