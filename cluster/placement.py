"""Which models are loaded on which machines. Pure and deterministic: no clock, no I/O, numbers of steps as bounds.

Greedy, after AlpaServe (Li et al., OSDI 2023, algorithm 1): of all replicas that fit, add the one that raises the
predicted share of requests in time most. AlpaServe predicts each by simulation. Here a queueing formula ranks them all,
and the simulator, which costs a thousand times as much, judges the result and improves it in a few steps.

What counts is the mean of two shares in time, that of all requests and that of all work: by the first alone a model of
some microseconds would be everything, by the second a large one.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

MIN_GAIN = 2e-5  # share in time that one more replica must bring
MIN_STEP = 1e-3  # that a step of improvement must bring, by simulation
KEEP_GAIN = 2e-4  # what a replica that is loaded already is preferred by
STEPS = 4  # of improvement by simulation
OPTIONS = 2  # that each of them simulates
WORTH_MOVING = 0.01  # share in time that a whole plan must bring, or nothing is moved

Placement = Mapping[str, frozenset[str]]  # the models of each machine, by its name
Loads = tuple[tuple[str, float], ...]  # models of a machine, sorted, and how many requests of each it gets a second


@dataclass(frozen=True)
class PlacedModel:
    """A model to be placed. `memory_bytes`: of one replica, weights and activations.

    `machines`: where its files are; None: everywhere.
    """

    name: str
    rate_per_s: float
    memory_bytes: int
    machines: frozenset[str] | None = None


@dataclass(frozen=True)
class PlacedMachine:
    """A machine. `memory_bytes`: for models."""

    name: str
    cores: int
    memory_bytes: int


@dataclass(frozen=True)
class Move:
    """One step: load a model on a server, or unload it there."""

    model: str
    server: str
    load: bool


@dataclass(frozen=True)
class PlacementPlan:
    """`moves`: in order. `before`, `after`: predicted shares in time by model, 0 for one that is loaded nowhere.

    `unplaced`: models for which no machine has the memory.
    """

    placement: Placement
    moves: tuple[Move, ...]
    before: Mapping[str, float]
    after: Mapping[str, float]
    unplaced: tuple[str, ...] = ()


class Predictor(Protocol):
    """Predicts which share of each model's requests a machine of so many cores answers in time."""

    def estimate(self, cores: int, loads: Loads) -> tuple[float, ...]:
        """Return the shares in the order of the loads, by a formula."""
        ...

    def simulate(self, cores: int, loads: Loads) -> tuple[float, ...]:
        """Return them by simulation."""
        ...

    def work_us(self, model: str) -> float:
        """Return what a request costs on one core."""
        ...


def make_plan(
    models: Sequence[PlacedModel], machines: Sequence[PlacedMachine], present: Placement, predictor: Predictor
) -> PlacementPlan:
    """Return the plan for these rates; without moves if they would bring too little.

    `present`: what is loaded now, by machine; a model that is not in `models` is left where it is, its memory is not.
    """
    planner = _Planner(models, machines, present, predictor)
    placement, unplaced = planner.greedy()
    placement = planner.keep_loaded(planner.improve(placement))
    before, after = planner.shares(planner.present), planner.shares(placement)
    hosted = {model for names in planner.present.values() for model in names}
    homeless = any(model.name not in hosted and model.name not in unplaced for model in models)
    if not homeless and planner.total(after) < planner.total(before) + WORTH_MOVING:
        return PlacementPlan(planner.present, (), before, before, unplaced)
    moves = tuple(ordered_moves(planner.present, placement, models, machines))
    return PlacementPlan(placement, moves, before, after, unplaced)


def ordered_moves(
    present: Placement, planned: Placement, models: Sequence[PlacedModel], machines: Sequence[PlacedMachine]
) -> Iterator[Move]:
    """Yield loads and unloads in an order in which no machine's memory overflows and no model is without replica.

    Where both is impossible, a model is unloaded before it is loaded elsewhere.
    """
    size = {model.name: model.memory_bytes for model in models}
    free = {m.name: m.memory_bytes - sum(size[name] for name in present.get(m.name, ())) for m in machines}
    loads = [(name, m.name) for m in machines for name in sorted(planned[m.name] - present.get(m.name, frozenset()))]
    unloads = [(name, m.name) for m in machines for name in sorted(present.get(m.name, frozenset()) - planned[m.name])]
    replicas = {name: sum(name in hosted for hosted in present.values()) for name in size}
    while loads or unloads:
        fitting = [move for move in loads if size[move[0]] <= free[move[1]]]
        spare = [move for move in unloads if replicas[move[0]] > 1]
        room_for = {server for _, server in loads}
        if fitting:
            # What has no replica yet first: its requests wait.
            name, server = min(fitting, key=lambda move: (replicas[move[0]] > 0, loads.index(move)))
            loads.remove((name, server))
            free[server] -= size[name]
            replicas[name] += 1
            yield Move(name, server, load=True)
        elif unloads:
            candidates = spare or unloads
            name, server = min(candidates, key=lambda move: (move[1] not in room_for, unloads.index(move)))
            unloads.remove((name, server))
            free[server] += size[name]
            replicas[name] -= 1
            yield Move(name, server, load=False)
        else:  # memory is short for what is planned: whoever measures it says so at the load
            name, server = loads.pop(0)
            replicas[name] += 1
            yield Move(name, server, load=True)


class _Planner:
    """The models, machines and predictions of one plan."""

    def __init__(
        self, models: Sequence[PlacedModel], machines: Sequence[PlacedMachine], present: Placement, predictor: Predictor
    ) -> None:
        self._models = {model.name: model for model in sorted(models, key=lambda model: model.name)}
        self._machines = {machine.name: machine for machine in machines}
        self._predictor = predictor
        self._load_of = {name: model.rate_per_s * predictor.work_us(name) for name, model in self._models.items()}
        rate_per_s = math.fsum(model.rate_per_s for model in models) or 1.0
        load = math.fsum(self._load_of.values()) or 1.0
        self._weights = {
            name: (model.rate_per_s / rate_per_s + self._load_of[name] / load) / 2
            for name, model in self._models.items()
        }
        self._estimates: dict[tuple[int, Loads], tuple[float, ...]] = {}
        self._simulated: dict[tuple[int, Loads], tuple[float, ...]] = {}
        self.present: Placement = {
            machine.name: present.get(machine.name, frozenset()) & self._models.keys() for machine in machines
        }

    def greedy(self) -> tuple[Placement, tuple[str, ...]]:
        """Return a placement and the models that fit nowhere: one replica of each model, then the most useful ones."""
        placement: dict[str, frozenset[str]] = {name: frozenset() for name in self._machines}
        unplaced = []
        for name in sorted(
            self._models, key=lambda name: (-self._load_of[name], -self._models[name].memory_bytes, name)
        ):
            if (best := self._best_place(placement, name)) is None:
                unplaced.append(name)
            else:
                placement[best] |= {name}
        while (added := self._best_replica(placement)) is not None:
            name, machine = added
            placement[machine] |= {name}
        return placement, tuple(unplaced)

    def improve(self, placement: Placement) -> Placement:
        """Return a placement that the simulator likes at least as well, after some steps."""
        shares = self.shares(placement)
        for _ in range(STEPS):
            missed = {name: weight * (1 - shares[name]) for name, weight in self._weights.items()}
            worst = max(missed, key=lambda name: (missed[name], name))
            if missed[worst] < MIN_STEP:
                break
            changed = sorted(self._changes(placement, worst), key=lambda other: -self._estimated_total(other))[:OPTIONS]
            simulated = [(self.total(self.shares(other)), other) for other in changed]
            best = max(simulated, key=lambda pair: pair[0], default=(0.0, placement))
            if best[0] < self.total(shares) + MIN_STEP:
                break
            placement = best[1]
            shares = self.shares(placement)
        return placement

    def keep_loaded(self, placement: Placement) -> Placement:
        """Return the placement with those replicas more that are loaded, fit, and do no harm."""
        kept = dict(placement)
        for machine in self._machines:
            for name in sorted(self.present[machine] - kept[machine]):
                if self._fits(kept, name, machine) and self._gain(kept, name, machine) > -KEEP_GAIN:
                    kept[machine] |= {name}
        return kept

    def shares(self, placement: Placement) -> dict[str, float]:
        """Return the share in time of each model, by simulation."""
        in_time = dict.fromkeys(self._models, 0.0)
        for machine in self._machines.values():
            loads = self._loads(placement, machine.name)
            key = (machine.cores, loads)
            if key not in self._simulated:
                self._simulated[key] = self._predictor.simulate(*key)
            for (name, rate_per_s), share in zip(loads, self._simulated[key], strict=True):
                in_time[name] += rate_per_s * share
        hosted = {name for names in placement.values() for name in names}
        return {
            name: (in_time[name] / model.rate_per_s if model.rate_per_s else 1.0) if name in hosted else 0.0
            for name, model in self._models.items()
        }

    def total(self, shares: Mapping[str, float]) -> float:
        """Return the share in time of all models together."""
        return math.fsum(weight * shares[name] for name, weight in self._weights.items())

    # -- candidates

    def _best_place(self, placement: Placement, name: str) -> str | None:
        """Return where one replica of a model is best, None if it fits nowhere."""
        machines = [machine for machine in self._machines if self._fits(placement, name, machine)]
        return max(
            machines,
            key=lambda machine: (self._gain(placement, name, machine), self._free(placement, machine)),
            default=None,
        )

    def _best_replica(self, placement: Placement) -> tuple[str, str] | None:
        """Return the replica that brings most, None if none brings enough."""
        candidates = [
            (self._gain(placement, name, machine), name, machine)
            for machine in self._machines
            for name in self._models
            if name not in placement[machine] and self._fits(placement, name, machine)
        ]
        best = max(candidates, default=None)
        return None if best is None or best[0] < MIN_GAIN else best[1:]

    def _changes(self, placement: Placement, name: str) -> Iterator[Placement]:
        """Yield placements in which a model has one replica more, perhaps in place of another model's."""
        hosts = [machine for machine in self._machines if name in placement[machine]]
        for machine in self._machines:
            if machine in hosts:
                continue
            if self._fits(placement, name, machine):
                yield {**placement, machine: placement[machine] | {name}}
                for host in hosts:
                    yield {**placement, machine: placement[machine] | {name}, host: placement[host] - {name}}
                continue
            for other in sorted(placement[machine]):
                changed = {**placement, machine: placement[machine] - {other}}
                if not self._fits(changed, name, machine):
                    continue
                changed[machine] |= {name}
                if any(other in names for names in changed.values()):
                    yield changed
                for place in self._machines:
                    if place != machine and other not in changed[place] and self._fits(changed, other, place):
                        yield {**changed, place: changed[place] | {other}}

    def _gain(self, placement: Placement, name: str, machine: str) -> float:
        """Return by how much the share in time of all models rises, estimated, with one replica more."""
        wider = {**placement, machine: placement[machine] | {name}}
        touched = [host for host in self._machines if host == machine or name in placement[host]]
        gain = sum(self._estimated(wider, host) - self._estimated(placement, host) for host in touched)
        return gain + (KEEP_GAIN if name in self.present[machine] else 0.0)

    def _estimated_total(self, placement: Placement) -> float:
        return sum(self._estimated(placement, machine) for machine in self._machines)

    def _estimated(self, placement: Placement, machine: str) -> float:
        """Return what a machine adds to the share in time of all models."""
        key = (self._machines[machine].cores, self._loads(placement, machine))
        if key not in self._estimates:
            self._estimates[key] = self._predictor.estimate(*key)
        return sum(
            self._weights[name] * rate_per_s / self._models[name].rate_per_s * share
            for (name, rate_per_s), share in zip(key[1], self._estimates[key], strict=True)
        )

    def _loads(self, placement: Placement, machine: str) -> Loads:
        """Return what a machine gets: of each model as many requests as its part of the cores that have the model."""
        loads = []
        for name in sorted(placement[machine]):
            cores = sum(each.cores for each in self._machines.values() if name in placement[each.name])
            if rate_per_s := self._models[name].rate_per_s * self._machines[machine].cores / cores:
                loads.append((name, rate_per_s))
        return tuple(loads)

    def _fits(self, placement: Placement, name: str, machine: str) -> bool:
        model = self._models[name]
        has_files = model.machines is None or machine in model.machines
        return has_files and model.memory_bytes <= self._free(placement, machine)

    def _free(self, placement: Placement, machine: str) -> int:
        taken = sum(self._models[name].memory_bytes for name in placement[machine])
        return self._machines[machine].memory_bytes - taken
