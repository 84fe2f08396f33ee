"""A mix of models on a machine of N cores, ready to be simulated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from gangway.artifact.profile import ProfileError
from gangway.scheduler.policies.targets import alone_us, least_target_us, target_us
from gangway.scheduler.profiles import ModelProfile
from gangway.simulator.batching import Batching
from gangway.simulator.contention import Contention
from gangway.simulator.loop import LoadDetails
from gangway.simulator.machine import NO_OVERHEADS, Machine, Overheads
from gangway.simulator.measured import MeasuredModel, one_row, read_measured, shipped_models
from gangway.simulator.scaling import LEVEL_OF_A_FULL_CORE, scale_model
from gangway.simulator.turn_cost import FRONT_END_US_PER_MB, front_end_us
from gangway.workload.arrivals import Arrivals, bursts, closed_loop, poisson
from gangway.workload.mix import Mix
from gangway.workload.qos import Qos, WorkloadError

# docs/explanation/simulator.md says how these were measured.
WAKE_UP_US = 15.0
STOP_AT_ONCE_US = 100.0
SPARE_CORES = Overheads(275.0, 275.0, WAKE_UP_US, WAKE_UP_US, WAKE_UP_US, STOP_AT_ONCE_US)
SHARED_CORES = Overheads(
    submit_us=300.0,
    dispatch_us=WAKE_UP_US,
    answer_us=300.0,
    leave_us=WAKE_UP_US,
    grow_us=WAKE_UP_US,
    stop_us=STOP_AT_ONCE_US,
    stolen_us=900.0,
    submit_us_per_mb=2100.0,
    stolen_us_per_mb=2600.0,
)
WHOLE_TURNS = replace(SPARE_CORES, submit_us_per_mb=FRONT_END_US_PER_MB)
CONTENTION_STEP = 0.1  # of levels of interference on a contended machine, where every start changes all of them
OVERHEADS = {"spare": SPARE_CORES, "turns": WHOLE_TURNS, "shared": SHARED_CORES, "none": NO_OVERHEADS}


@dataclass(frozen=True)
class Requests:
    """What arrives: `burst` requests of `rows` rows each at a time. `batching`: what becomes of them; None: nothing.

    `clients`: in a closed loop, so many requests under way at any time; None: an open loop.
    """

    rows: int = 1
    burst: int = 1
    batching: Batching | None = None
    clients: int | None = None

    @property
    def in_batches(self) -> bool:
        """Whether more than one row may run at a time."""
        return self.rows > 1 or self.batching is not None


@dataclass(frozen=True)
class Scenario:
    """`models` by index of the mix, which is resolved: targets in milliseconds, shares as weights."""

    mix: Mix
    models: Mapping[int, ModelProfile]
    machine: Machine
    requests: Requests = Requests()
    doubts: tuple[str, ...] = ()  # why results may be wrong: what is known of the models' measurements
    row_bytes: Mapping[int, int] = field(default_factory=dict)  # of inputs and outputs
    served_alone_us: tuple[float, ...] = ()  # what a server says of each model; empty: targets are no server's

    @property
    def details(self) -> LoadDetails:
        """What a simulation knows of its models beside their profiles."""
        return LoadDetails(row_bytes=self.row_bytes)

    @property
    def targets_us(self) -> tuple[float | None, ...]:
        """Each model's latency target."""
        return tuple(model.qos_us for model in self.models.values())

    @property
    def isolated_us(self) -> tuple[float, ...]:
        """Each model's latency alone on all cores, of a request of so many rows."""
        return tuple(isolated_us(model, self.requests.rows) for model in self.models.values())

    @property
    def front_end_us(self) -> float:
        """The mean processor time of a front end for a request."""
        rows, sizes = self.requests.rows, (self.row_bytes.get(index, 0) for index in self.models)
        return sum(share * front_end_us(rows * size / 1e6) for share, size in zip(self.mix.shares, sizes, strict=True))

    def arrivals(self, rate_per_s: float, count: int, seed: int) -> Arrivals:
        """Return at least `count` requests: of clients in a closed loop, or Poisson arrivals, in bursts if wanted."""
        if self.requests.clients is not None:
            rows = None if self.requests.rows == 1 else np.full(count, self.requests.rows, dtype=np.int64)
            return replace(closed_loop(self.mix, self.requests.clients, count, seed), rows=rows)
        burst = self.requests.burst
        return bursts(poisson(self.mix, rate_per_s / burst, -(-count // burst), seed), burst, self.requests.rows)


@dataclass(frozen=True)
class MachineLayout:
    """Parts of the machine: `nodes` and `schedulers`, each with as many cores.

    `memory_share`: bandwidth and shared cache per core, as a part of what the measured machine has.
    """

    memory_share: float = 1.0
    nodes: int = 1
    schedulers: int = 1


def make_scenario(
    mix: Mix,
    cores: int,
    measured: Mapping[str, MeasuredModel] | None = None,
    overheads: Overheads = SPARE_CORES,
    requests: Requests = Requests(),
    contention: Contention | None = None,
    in_bf16: Mapping[str, MeasuredModel] | None = None,
    layout: MachineLayout = MachineLayout(),
    as_served: bool = False,
) -> Scenario:
    """Scale the mix's models to a machine of `cores` cores.

    `measured`: in place of, and beside, the models that come with the simulator. Targets that are multiples are so of a
    request's isolated latency, on the cores that a gang can have. `contention`: a machine of VELTAIR's premise in place
    of the measured one. The time of the scheduler's decisions counts where it has a core of its own (SPARE_CORES), and
    that of its whole turns with WHOLE_TURNS; elsewhere `stolen_us` has it. `in_bf16`: models of the mix as measured in
    bf16, whose precision is chosen by deadlines. `as_served`: multiples are those of a server of these models, for one
    row (`scheduler/policies/targets.py`).

    Raises WorkloadError for a model without a measurement or a target that cannot be resolved, ProfileError for a file
    that is wrong, ValueError for a machine that cannot be.
    """
    memory_share = layout.memory_share
    if not memory_share > 0:
        raise ValueError(f"the share of memory must be positive, not {memory_share}")
    turns = overheads == WHOLE_TURNS
    charges = turns or overheads == SPARE_CORES
    level = level_per_demand(cores, memory_share)
    machine = Machine(cores, overheads, level, charges_decisions=charges, charges_turns=turns,
                      nodes=layout.nodes, schedulers=layout.schedulers)  # fmt: skip
    widest = machine.widest
    if contention is not None:
        machine = replace(machine, level_per_demand=1 / max(1, cores - 1), level_step=CONTENTION_STEP,
                          cores_contend=True)  # fmt: skip
    sources = [_measured(name, measured or {}, requests.in_batches) for name in mix.names]
    served_us = tuple(alone_us(_compute_us(model, widest)) for model in sources) if as_served else ()
    if as_served:
        mix = _with_served_targets(mix, served_us, least_target_us(overheads.stolen_us > 0))
    scaled = (scale_model(model, widest, 0, memory_share=memory_share) for model in sources)
    alone = {model.name: isolated_us(model, requests.rows) for model in scaled}
    resolved = mix.resolve(alone)
    fast = {name: model if requests.in_batches else one_row(model) for name, model in (in_bf16 or {}).items()}
    models = {}
    for index, (source, entry) in enumerate(zip(sources, resolved.models, strict=True)):
        qos_us = entry.qos.resolve_us(None) if entry.qos else None
        both = [source, fast[entry.name]] if entry.name in fast else [source]
        tables = [scale_model(each, widest, index, qos_us, memory_share) for each in both]
        if contention is not None:
            tables = [contention.apply(each) for each in tables]
        models[index] = replace(tables[0], in_bf16=tables[1]) if len(tables) > 1 else tables[0]
    doubts = tuple(f"{source.model_name}: {doubt}" for source in sources for doubt in source.doubts)
    if unknown := sorted(set(in_bf16 or {}) - set(mix.names)):
        raise WorkloadError(f"measured in bf16, but not in the mix: {', '.join(unknown)}")
    row_bytes = {index: source.row_bytes for index, source in enumerate(sources)}
    return Scenario(resolved, models, machine, requests, doubts, row_bytes, served_us)


def isolated_us(model: ModelProfile, rows: int = 1) -> float:
    """Return how long so many rows take alone on all cores, as one gang."""
    return model.rows_us(model.cores, rows)


def _compute_us(model: MeasuredModel, cores: int) -> float:
    """Return how long one row computes alone on so many cores: as measured, or in proportion to what was."""
    known = max(count for count in model.cores if count <= cores)
    measured_us = model.isolated_us[model.cores.index(known)][0]
    if known == cores:
        return measured_us
    return measured_us * isolated_us(scale_model(model, cores, 0)) / isolated_us(scale_model(model, known, 0))


def _with_served_targets(mix: Mix, served_us: Sequence[float], least_us: float) -> Mix:
    """Return the mix with targets in milliseconds in place of multiples."""
    models = [
        model
        if model.qos is None or model.qos.multiple is None
        else replace(model, qos=Qos(milliseconds=target_us(model.qos.multiple, time_us, least_us) / 1e3))
        for model, time_us in zip(mix.models, served_us, strict=True)
    ]
    return replace(mix, models=tuple(models))


def level_per_demand(cores: int, memory_share: float = 1.0) -> float:
    """Return the interference level per demand of other blocks: that of one full core among `cores`.

    A machine of N cores has N / 2 times the shared cache and bandwidth of the measured one of two, for all its cores in
    common: so what counts is the mean demand of the other cores.
    """
    return LEVEL_OF_A_FULL_CORE / max(1, cores - 1) / memory_share


def read_models(paths: list[Path]) -> dict[str, MeasuredModel]:
    """Return the measured models in these files by name. Raises ProfileError."""
    models = [read_measured(path) for path in paths]
    return {model.model_name: model for model in models}


def _measured(name: str, given: Mapping[str, MeasuredModel], in_batches: bool) -> MeasuredModel:
    if name in given:
        return given[name]
    shipped = shipped_models()
    if name not in shipped:
        known = ", ".join(sorted({*shipped, *given}))
        raise WorkloadError(f"nobody measured '{name}'; known: {known}; `gangway profile` and --profile add others")
    model = read_measured(shipped[name])
    if model.model_name != name:
        raise ProfileError(f"{shipped[name]}: it is of {model.model_name}")
    return model if in_batches else one_row(model)
