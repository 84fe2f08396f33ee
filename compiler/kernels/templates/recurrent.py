"""Recurrent layers: a task computes all steps of a few sequences in one direction, or some units of a single step.

The recurrent matrix is packed tile by tile: for each number of the state the vectors of all gates of a few units. A
tile adds up its products in registers for all sequences of the task, so one load of a weight serves all of them. Then
it applies the activations and stores the new state, which replaces the old one when all tiles are done. A GRU that
resets its state before the product takes two passes, since the hidden gate needs the reset gates of all units.

A matrix of integers becomes float32 in registers. Their sums are scaled before the input's products are added.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
from tvm import tirx

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.extents import at_hand
from gangway.compiler.kernels.specs import (
    Activation,
    Array,
    BatchPlan,
    KernelPlan,
    PackedWeights,
    RawWeights,
    RecurrentSpec,
)
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates import tiling
from gangway.compiler.kernels.templates.builder import REFUSED, Argument, Buffer, Expr, Register
from gangway.compiler.kernels.templates.float32_math import activate, clip
from gangway.compiler.kernels.templates.matmul import UNROLLED, Sums, most_numbers, multiply_add, zero_sums
from gangway.compiler.kernels.templates.tiling import FLOAT_BYTES, Tasks, UnsupportedSpecError

TILE_VECTORS = 4  # of all gates together: so many loads for each number of the state
CHAINS = 8  # sums in flight, more than a multiply-add takes cycles
CACHED_SEQUENCES = 4  # more gain little by a matrix in the second level cache: they are tasks for other cores
STATE_BYTES = 192 << 10  # of a task, on the stack
STATES = 4  # vectors of `units` numbers that a sequence has there, at most


@dataclass(frozen=True)
class Pass:
    """Gates whose products with one vector, the state or the reset state, a tile computes for `vectors` of units."""

    gates: tuple[int, ...]
    vectors: int
    offset: int  # of its matrices among the packed weights

    @property
    def sums(self) -> int:
        """Vectors of a tile."""
        return len(self.gates) * self.vectors


@dataclass(frozen=True)
class RecurrentLayout:
    """How the units are cut into tiles, and the sequences into groups."""

    spec: RecurrentSpec
    target: TargetSpec

    @cached_property
    def blocks(self) -> int:
        """Vectors of one gate."""
        return self.spec.units // self.target.lanes

    @cached_property
    def passes(self) -> tuple[Pass, ...]:
        """One, or two if the reset gate comes before the product."""
        spec = self.spec
        result, offset = [], 0
        for gates in spec.gate_groups:
            most = max(1, TILE_VECTORS // len(gates))
            vectors = max(n for n in range(1, most + 1) if self.blocks % n == 0)
            result.append(Pass(gates, vectors, offset))
            offset += spec.directions * len(gates) * spec.units * spec.hidden
        return tuple(result)

    @cached_property
    def matrices(self) -> int:
        """Numbers of all packed matrices; biases or peepholes follow."""
        gates = sum(len(item.gates) for item in self.passes)
        return self.spec.directions * gates * self.spec.units * self.spec.hidden

    @cached_property
    def scales(self) -> int:
        """Scales of integers, in the order of the outputs of all tiles, those of one pass after the other."""
        return self.matrices // self.spec.hidden if self.spec.int8 else 0

    @cached_property
    def vectors_at(self) -> int:
        """Where the vectors begin in the argument that has them."""
        return self.scales if self.spec.int8 else self.matrices

    @cached_property
    def constants(self) -> tuple[Argument, ...]:
        """Matrices, scales and vectors."""
        vectors = self.spec.directions * self.vectors * self.spec.units
        if self.spec.int8:
            return Argument("weights", self.matrices, "int8"), Argument("scales", self.scales + vectors)
        return (Argument("weights", self.matrices + vectors),)

    @cached_property
    def vectors(self) -> int:
        """Vectors of `units` numbers behind the matrices, or scales, for each direction."""
        return 3 if self.spec.peepholes else int(self.spec.linear_before_reset)

    @cached_property
    def most_sequences(self) -> int:
        """Sequences of a task: their sums fit into the registers, and their states into local memory."""
        fitting = STATE_BYTES // (STATES * self.spec.units * FLOAT_BYTES)
        if not fitting:
            raise UnsupportedSpecError(f"recurrent layer of {self.spec.hidden} units")
        useful = CACHED_SEQUENCES if self.spec.is_cached else fitting
        return max(1, min(fitting, useful, *(most_numbers(self.target, item.sums) for item in self.passes)))

    @cached_property
    def groups(self) -> tuple[tuple[int, int, int], ...]:
        """Runs of groups of sequences: (first sequence, number of groups, sequences of each)."""
        return tiling.balanced(self.spec.sequences, self.most_sequences)

    @cached_property
    def group_count(self) -> int:
        """Number of groups."""
        return sum(count for _, count, _ in self.groups)

    @cached_property
    def bands(self) -> int:
        """Tiles that may be computed apart, since no other step or pass needs them: those of a single step."""
        alone = self.spec.steps == 1 and len(self.passes) == 1
        return self.blocks // self.passes[0].vectors if alone else 1

    @cached_property
    def tasks(self) -> Tasks:
        """Groups of sequences in either direction, and bands. How many tasks there are, plans say."""
        moved = self.matrices * self.group_count * at_hand(self.spec.steps) * (1 if self.spec.int8 else FLOAT_BYTES)
        planes = self.spec.directions * self.group_count
        return tiling.plane_tasks(planes, self.bands, at_hand(self.spec.flops), moved, self.target)

    @cached_property
    def arguments(self) -> list[Argument]:
        """Those of one row, but for `refused`."""
        spec = self.spec
        positions = spec.positions or spec.steps * spec.sequences
        state = spec.directions * spec.sequences * spec.hidden
        halves = ("reset", state, spec.part is not None), ("update", state, spec.part is not None)
        given: tuple[tuple[str, int, bool], ...] = (
            ("h", state, spec.initial_h),
            ("c", state, spec.initial_c),
            ("lengths", spec.sequences, spec.lengths),
        )
        results = list(zip(("y", "y_h", "y_c"), (spec.steps * state, state, state), spec.outputs, strict=True))
        if spec.part == "gates":
            results = list(halves[::-1])
        elif spec.part == "candidate":
            given = (*given, *halves)
        first = next(item for item in results if item[2])
        ordered = [*given, *(item for item in results if item is not first), first]
        return [
            Argument("x", spec.channels * positions),
            *self.constants,
            *(Argument(name, n, "int32" if name == "lengths" else "float32") for name, n, wanted in ordered if wanted),
        ]


def candidates(spec: RecurrentSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The only plan. Raises `UnsupportedSpecError`."""
    layout = RecurrentLayout(spec, target)
    tasks, sequences = layout.tasks, layout.groups[0][2]
    knobs: dict[str, int | str] = {"planes": tasks.groups_per_task, "bands": tasks.bands_per_task}
    text = f"recurrent {sequences} sequences x {tasks.bands_per_task} tiles"
    sums = sequences * layout.passes[0].sums
    yield tiling.make_plan(spec, knobs, tasks.count, text, layout.matrices // spec.directions * FLOAT_BYTES, sums)


def pack(spec: RecurrentSpec, target: TargetSpec, raw: RawWeights) -> PackedWeights:
    """For each pass [directions][tiles][hidden][gates][vectors][lanes], then the vectors of each direction.

    That is one array or, of integers, two: the vectors are behind the scales. What fills up the units is zero.
    """
    layout = RecurrentLayout(spec, target)
    matrices, vectors = _tiled(layout, raw["recurrent"], spec.hidden), []
    if layout.vectors:
        given = raw["peepholes" if spec.peepholes else "bias"].reshape(spec.directions, layout.vectors, spec.hidden)
        vectors.append(np.pad(given, ((0, 0), (0, 0), (0, spec.units - spec.hidden))).reshape(-1))
    if spec.int8:
        scales = _tiled(layout, raw["scales"].astype(np.float32), 1)
        return np.concatenate(matrices).astype(np.int8), np.concatenate([*scales, *vectors]).astype(np.float32)
    return (np.concatenate([*matrices, *vectors]).astype(np.float32),)


def _tiled(layout: RecurrentLayout, values: Array, columns: int) -> list[Array]:
    """Values [directions][gates x hidden][columns] in the order of the tiles of each pass."""
    spec = layout.spec
    shape = (spec.directions, spec.gates, spec.hidden, columns)
    padded = np.pad(values.reshape(shape), ((0, 0), (0, 0), (0, spec.units - spec.hidden), (0, 0)))
    parts: list[Array] = []
    for item in layout.passes:
        count = len(item.gates)
        tiled = padded[:, list(item.gates)].reshape(
            spec.directions, count, -1, item.vectors, layout.target.lanes, columns
        )
        parts.append(tiled.transpose(0, 2, 5, 1, 3, 4).reshape(-1))
    return parts


def emit(spec: RecurrentSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: see `RecurrentSpec`."""
    layout = RecurrentLayout(spec, target)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        memory = _memory(layout, buffers, max(size for _, _, size in layout.groups))

        def plane(index: Expr, first_band: Expr) -> None:
            direction, group = T.quotient(index, layout.group_count), T.remainder(index, layout.group_count)
            bands = T.at_most(layout.tasks.bands_per_task, layout.bands - first_band)

            def write(run: tuple[int, int, int], first_group: int) -> None:
                first = T.bind(run[0] + (group - first_group) * run[2])
                places = [SequencePlaces(spec, target.lanes, direction, first + i) for i in range(run[2])]
                _each_direction(layout, direction, memory, places, (first_band, bands))

            first_run, *others = layout.groups
            T.either(
                group < first_run[1] if others else True,
                lambda: write(first_run, 0),
                lambda: write(others[0], first_run[1]),
            )

        layout.tasks.each_group(number, plane)

    return T.kernel(symbol, [*layout.arguments, *([REFUSED] if spec.lengths else [])], task)


def batch_plan(spec: RecurrentSpec, target: TargetSpec) -> BatchPlan | None:
    """The kernel for several rows of one sequence each; None where more of them are no use, or numbers are refused."""
    layout = RecurrentLayout(spec, target)
    rows = layout.most_sequences
    if spec.sequences > 1 or spec.lengths or rows == 1:
        return None
    return BatchPlan(spec, rows, layout.tasks.count, f"recurrent {rows} rows")


def batch_emit(spec: RecurrentSpec, plan: BatchPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: those of one row, batch; see `artifact.format.BatchKernel`."""
    layout = RecurrentLayout(spec, target)
    arguments = [Argument(item.name, item.elements * plan.rows, item.dtype) for item in layout.arguments]

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        *tensors, batch = buffers
        memory = _memory(layout, tensors, plan.rows)
        strides = {name: T.bind(T.quotient(batch[1 + n], FLOAT_BYTES)) for n, name in enumerate(memory.tensors)}

        def plane(direction: Expr, first_band: Expr) -> None:
            bands = T.at_most(layout.tasks.bands_per_task, layout.bands - first_band)

            def write(rows: int) -> None:
                places = [SequencePlaces(spec, target.lanes, direction, 0, i, strides) for i in range(rows)]
                _each_direction(layout, direction, memory, places, (first_band, bands))

            T.choose(batch[0].astype("int32"), range(1, plan.rows + 1), write)

        layout.tasks.each_group(number, plane)

    return T.kernel(symbol, [*arguments, T.batch_argument(arguments)], task)


@dataclass(frozen=True)
class SequencePlaces:
    """Where the numbers of one sequence lie, in one direction; `row`: of a batch, with these distances of two rows."""

    spec: RecurrentSpec
    lanes: int
    direction: Expr
    sequence: Expr
    row: int = 0
    strides: dict[str, Expr] | None = None

    def _of_row(self, name: str) -> Expr:
        return self.row * self.strides[name] if self.strides else 0

    def x(self, step: Expr, gate: int, block: Expr) -> Expr:
        """A vector of one gate."""
        spec = self.spec
        channel = (self.direction * spec.gates + gate) * (spec.units // self.lanes) + block
        position = step * spec.sequences + self.sequence
        if spec.sequences_first:
            position = self.sequence * spec.steps + step
        positions = spec.positions or spec.steps * spec.sequences
        return self._of_row("x") + (channel * positions + position) * self.lanes

    def state(self, name: str) -> Expr:
        """The first number of a tensor with one vector of units: h, c, y_h, y_c, reset or update."""
        spec = self.spec
        index = self.direction * spec.sequences + self.sequence
        if spec.sequences_first:
            index = self.sequence * spec.directions + self.direction
        return self._of_row(name) + index * spec.hidden

    def y(self, step: Expr) -> Expr:
        """The first number of a step's result."""
        spec = self.spec
        index = (step * spec.directions + self.direction) * spec.sequences + self.sequence
        if spec.sequences_first:
            index = (self.sequence * spec.steps + step) * spec.directions + self.direction
        return self._of_row("y") + index * spec.hidden


@dataclass(frozen=True)
class RecurrentMemory:
    """The tensors of a kernel, and its local memory: vectors of `units` numbers of each sequence.

    These are the state `h`, the `new` one, the cells `c`, and the `reset` state and `update` gate of a GRU.
    """

    tensors: Mapping[str, Buffer]
    local: Mapping[str, Buffer]


def _memory(layout: RecurrentLayout, buffers: Sequence[Buffer], sequences: int) -> RecurrentMemory:
    """Allocate local memory, once: what several branches would allocate lay on the stack several times."""
    spec = layout.spec
    resets_first = spec.gate_groups != (tuple(range(spec.gates)),)
    needed = {
        "h": True,
        "new": spec.part != "gates",
        "c": spec.cell == "LSTM",
        "reset": resets_first,
        "update": resets_first,
    }
    local = {name: T.scratch(sequences * spec.units) for name, here in needed.items() if here}
    names = [*(item.name for item in layout.arguments), *([REFUSED.name] if spec.lengths else [])]
    return RecurrentMemory(dict(zip(names, buffers, strict=True)), local)


def _each_direction(
    layout: RecurrentLayout,
    direction: Expr,
    memory: RecurrentMemory,
    places: list[SequencePlaces],
    bands: tuple[Expr, Expr],
) -> None:
    """Write the steps once, or for either direction if these have different activations."""
    kinds = layout.spec.activations

    def write(index: int) -> None:
        Steps(layout, kinds[index], direction, memory, places, bands).write()

    if len(set(kinds)) == 1:
        write(0)
    else:
        T.choose(direction, range(len(kinds)), write)


class Steps:
    """Writes all steps of some sequences, in one direction, for some tiles."""

    def __init__(
        self,
        layout: RecurrentLayout,
        activations: tuple[Activation, ...],
        direction: Expr,
        memory: RecurrentMemory,
        places: Sequence[SequencePlaces],
        bands: tuple[Expr, Expr],
    ):
        self._layout, self._spec, self._lanes = layout, layout.spec, layout.target.lanes
        self._activations, self._direction = activations, direction
        self._buffers, self._local = memory.tensors, memory.local
        self._places, self._count = places, len(places)
        self._first_band, self._bands = bands

    def write(self) -> None:
        """All of it."""
        spec = self._spec
        self._load("h", spec.initial_h)
        if spec.cell == "LSTM":
            self._load("c", spec.initial_c)
        if spec.part == "candidate":
            self._load("reset", True)
            self._load("update", True)
        self._lengths = [self._length(place.sequence) for place in self._places] if spec.lengths else []
        T.repeat(spec.steps, self._step)
        for name in ("h", "c"):
            if f"y_{name}" in self._buffers:
                self._each_block(partial(self._deliver, name))

    def _length(self, sequence: Expr) -> Expr:
        """The length of a sequence; one that is impossible is refused."""
        length = T.bind(self._buffers["lengths"][sequence])
        outside = tirx.Or(length < 0, length > self._spec.steps)
        T.when(outside, lambda: T.refuse(self._buffers[REFUSED.name], 1, length))
        return length

    def _is_before(self, step: Expr, number: int) -> Expr:
        """Whether a step is one of a sequence, for every lane."""
        return T.splat(step, self._lanes) < T.splat(self._lengths[number], self._lanes)

    def _get(self, name: str, number: int, block: Expr) -> Expr:
        """A vector of local memory."""
        return self._local[name][T.lanes_at(number * self._spec.units + block * self._lanes, self._lanes)]

    def _set(self, name: str, number: int, block: Expr, value: Expr) -> None:
        T.store(self._local[name], number * self._spec.units + block * self._lanes, value, self._lanes)

    def _load(self, name: str, given: bool) -> None:
        """Fill a state with zeros, or from memory."""
        whole, rest = divmod(self._spec.hidden, self._lanes) if given else (0, 0)
        for number, place in enumerate(self._places):
            if given:
                self._copy(name, number, place.state(name), whole)
            zeros = partial(self._set, name, number, value=T.constant(0.0, self._lanes))
            T.repeat(self._layout.blocks - whole, lambda block: zeros(block=whole + block))  # noqa: B023
            for unit in range(whole * self._lanes, whole * self._lanes + rest):
                value = self._buffers[name][place.state(name) + unit]
                T.store(self._local[name], number * self._spec.units + unit, value, 1)

    def _copy(self, name: str, number: int, base: Expr, blocks: int) -> None:
        """Whole vectors of a state."""
        lanes = self._lanes
        if blocks:
            source = self._buffers[name]
            T.repeat(
                blocks, lambda block: self._set(name, number, block, source[T.lanes_at(base + block * lanes, lanes)])
            )

    def _each_block(self, body: Callable[[Expr], None]) -> None:
        """Every vector of units whose tiles are computed here."""
        if self._layout.bands == 1:
            T.repeat(self._layout.blocks, body)
            return
        vectors = self._layout.passes[0].vectors
        T.repeat(self._bands * vectors, lambda index: body(self._first_band * vectors + index))

    def _step(self, index: Expr) -> None:
        spec = self._spec
        last = spec.steps - 1
        step = last - index if spec.reverse else index
        if spec.directions == 2:
            step = T.bind(index + self._direction * (last - 2 * index))
        for item in self._layout.passes:
            if self._layout.bands == 1:
                T.repeat(self._layout.blocks // item.vectors, partial(self._tile, item, step))
            else:
                T.repeat(self._bands, lambda band: self._tile(item, step, self._first_band + band))  # noqa: B023
        self._each_block(partial(self._finish, step))

    def _tile(self, item: Pass, step: Expr, tile: Expr) -> None:
        """The gates of a few units."""
        lanes, hidden = self._lanes, self._spec.hidden
        width = item.sums * lanes
        tiles = self._layout.blocks // item.vectors
        base = T.bind(item.offset + (self._direction * tiles + tile) * (hidden * width))
        state = self._local["reset" if item.gates[0] else "h"]
        start = self._start(item, step, tile)
        chains = [zero_sums(self._count, item.sums, lanes) if self._spec.int8 else start]
        while len(chains) * self._count * item.sums < CHAINS:
            chains.append(zero_sums(self._count, item.sums, lanes))
        weights = self._buffers["weights"]

        def product(unit: Expr, chain: int) -> None:
            numbers = [state[number * self._spec.units + unit] for number in range(self._count)]
            vectors = [weights[T.lanes_at(base + unit * width + j * lanes, lanes)] for j in range(item.sums)]
            if self._spec.int8:
                vectors = [tirx.Cast(f"float32x{lanes}", vector) for vector in vectors]
            multiply_add(chains[chain % len(chains)], numbers, vectors, lanes)

        unroll = max(UNROLLED, len(chains))
        whole, rest = divmod(hidden, unroll)

        def products(index: Expr) -> None:
            for u in range(unroll):
                product(index * unroll + u, u)

        if whole:
            T.repeat(whole, products)
        for u in range(rest):
            product(whole * unroll + u, u)
        if self._spec.int8:
            self._scale(chains, start, T.bind(T.quotient(base, hidden)))
            chains = [start]
        for number in range(self._count):
            for j in range(item.vectors):
                sums = {gate: self._total(chains, number, n * item.vectors + j) for n, gate in enumerate(item.gates)}
                self._cell(number, step, T.bind(tile * item.vectors + j), sums)

    def _scale(self, chains: Sequence[Sums], start: Sums, base: Expr) -> None:
        """Add sums of products with integers, of which scale `base` is the first one's, to the first values."""
        lanes = self._lanes
        for number, row in enumerate(start):
            for j, total in enumerate(row):
                scale = self._buffers["scales"][T.lanes_at(base + j * lanes, lanes)]
                total.add(self._total(chains, number, j) * scale)

    def _start(self, item: Pass, step: Expr, tile: Expr) -> Sums:
        """The first values of a tile's sums: products of the input or, if that is to be added later, a bias."""
        lanes = self._lanes

        def first(place: SequencePlaces, gate: int, block: Expr) -> Expr:
            if self._spec.linear_before_reset and gate == 2:
                return self._vector(0, block)
            return self._buffers["x"][T.lanes_at(place.x(step, gate, block), lanes)]

        return [
            [
                Register(lanes, first(place, gate, tile * item.vectors + j))
                for gate in item.gates
                for j in range(item.vectors)
            ]
            for place in self._places
        ]

    def _total(self, chains: Sequence[Sums], number: int, index: int) -> Expr:
        value = chains[0][number][index].value
        for sums in chains[1:]:
            value = value + sums[number][index].value
        return T.keep(value)

    def _vector(self, index: int, block: Expr) -> Expr:
        """A vector of the biases or peepholes."""
        row = self._direction * self._layout.vectors + index
        base = self._layout.vectors_at + row * self._spec.units + block * self._lanes
        return self._buffers["scales" if self._spec.int8 else "weights"][T.lanes_at(base, self._lanes)]

    def _activated(self, value: Expr, function: int) -> Expr:
        """An activation (0: f, 1: g, 2: h) of what is clipped before."""
        limit, lanes = self._spec.clip, self._lanes
        return T.keep(activate(T.keep(clip(value, -limit, limit, lanes)), self._activations[function], lanes))

    def _cell(self, number: int, step: Expr, block: Expr, sums: dict[int, Expr]) -> None:
        """The new state of some units."""
        match self._spec.cell, sorted(sums):
            case "LSTM", _:
                self._lstm(number, step, block, sums)
            case "RNN", _:
                self._set("new", number, block, self._activated(sums[0], 0))
            case _, [0, 1, 2]:
                own = self._buffers["x"][T.lanes_at(self._places[number].x(step, 2, block), self._lanes)]
                update, reset = self._activated(sums[0], 0), self._activated(sums[1], 0)
                self._update(number, block, update, own + reset * sums[2])
            case _, [0, 1]:
                self._set("update", number, block, self._activated(sums[0], 0))
                reset = self._activated(sums[1], 0)
                self._set("reset", number, block, reset * self._get("h", number, block))
            case _:
                self._update(number, block, T.keep(self._get("update", number, block)), sums[2])

    def _update(self, number: int, block: Expr, update: Expr, own: Expr) -> None:
        """(1 - z) h' + z h of a GRU."""
        candidate = self._activated(own, 1)
        kept = update * self._get("h", number, block)
        self._set("new", number, block, (T.constant(1.0, self._lanes) - update) * candidate + kept)

    def _lstm(self, number: int, step: Expr, block: Expr, sums: dict[int, Expr]) -> None:
        """Gates i, o, f, c; peepholes i, o, f."""
        before = T.keep(self._get("c", number, block))

        def gate(index: int, cells: Expr) -> Expr:
            value = sums[index]
            return self._activated(value + cells * self._vector(index, block) if self._spec.peepholes else value, 0)

        i = gate(0, before)
        f = T.keep(T.constant(1.0, self._lanes) - i) if self._spec.input_forget else gate(2, before)
        cells = T.keep(f * before + i * self._activated(sums[3], 1))
        shown = T.keep(activate(cells, self._activations[2], self._lanes))
        self._set("new", number, block, gate(1, cells) * shown)
        kept = tirx.Select(self._is_before(step, number), cells, before) if self._spec.lengths else cells
        self._set("c", number, block, kept)

    def _finish(self, step: Expr, block: Expr) -> None:
        """The new state becomes the state, and the step's result; beyond a sequence's end that is zero."""
        for number, place in enumerate(self._places):
            if self._spec.part == "gates":
                for name in ("reset", "update"):
                    self._put(name, place.state(name), block, self._get(name, number, block))
                continue
            value = shown = T.keep(self._get("new", number, block))
            if self._spec.lengths:
                inside = self._is_before(step, number)
                shown = tirx.Select(inside, value, T.constant(0.0, self._lanes))
                value = tirx.Select(inside, value, self._get("h", number, block))
            self._set("h", number, block, value)
            if "y" in self._buffers:
                self._put("y", place.y(step), block, shown)

    def _deliver(self, name: str, block: Expr) -> None:
        """The last state of some units; zero if a sequence has no steps."""
        for number, place in enumerate(self._places):
            value = self._get(name, number, block)
            if self._spec.lengths:
                value = tirx.Select(self._is_before(0, number), value, T.constant(0.0, self._lanes))
            self._put(f"y_{name}", place.state(f"y_{name}"), block, value)

    def _put(self, name: str, base: Expr, block: Expr, value: Expr) -> None:
        """Write a vector of units to memory, without those that do not exist."""
        buffer, lanes = self._buffers[name], self._lanes
        whole, rest = divmod(self._spec.hidden, lanes)
        existing = Register(lanes, value)

        def part() -> None:
            for lane in range(rest):
                T.store(buffer, base + (block * lanes + lane), existing.lane(lane), 1)

        T.either(
            block < whole if whole < self._layout.blocks else True,
            lambda: T.store(buffer, base + block * lanes, existing.value, lanes),
            lambda: T.when(block < whole + 1 if whole + 1 < self._layout.blocks else True, part),
        )
