"""Fused attention: a task is a head and a block of queries, whose scores exist only in local memory.

Vectors run across queries. So keys and values are read in place, one number at a time, as the weights of a convolution
read pixels; the softmax over the keys needs no sum across lanes; and only queries and results, which are few, are
transposed. Long sequences are cut into blocks of keys with a running maximum and sum (Milakov and Gimelshein 2018;
Dao et al., "FlashAttention", 2022).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

from tvm import tirx

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.attention_specs import AttentionSpec, ScoreBias
from gangway.compiler.kernels.extents import expression, is_constant
from gangway.compiler.kernels.specs import KernelPlan, Layout
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates import tiling
from gangway.compiler.kernels.templates.bf16 import words as bf16
from gangway.compiler.kernels.templates.builder import Argument, Buffer, Expr, Register
from gangway.compiler.kernels.templates.float32_math import decay, tanh
from gangway.compiler.kernels.templates.matmul import Sums, most_numbers, multiply_add, unrolled, zero_sums
from gangway.compiler.kernels.templates.tiling import FLOAT_BYTES, UnsupportedSpecError

QUERY_VECTORS = 2  # of a block of queries
KEYS = 256  # most keys of a block: their scores for a block of queries fill the L1 cache
MOST_KEYS = 2 * KEYS
MOST_BIASES = 2
MOST_HEAD_SIZE = 512  # queries and results of a block take 128 KiB then
LOWEST = -3.4028234663852886e38
_OF_QUERIES, _OF_VALUES = (0, 3), (2, 3)  # of q, k, v and y


def candidates(spec: AttentionSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The default plan, then shorter and longer blocks of keys. Raises `UnsupportedSpecError`."""
    channels = spec.head_size + spec.value_channels
    if channels > 2 * MOST_HEAD_SIZE or len(spec.biases) > MOST_BIASES:
        raise UnsupportedSpecError(f"attention with heads of {spec.head_size} and {len(spec.biases)} biases")
    width = QUERY_VECTORS * target.lanes
    tasks = spec.windows * spec.heads * -(-spec.queries // width)
    for keys in dict.fromkeys(min(limit, spec.keys) for limit in (KEYS, KEYS // 2, MOST_KEYS)):
        local = (channels + keys) * width
        moved = (local + spec.keys * channels) * FLOAT_BYTES
        text = f"attention {min(width, spec.queries)} queries x {keys} keys"
        sums = most_numbers(target, QUERY_VECTORS) * QUERY_VECTORS
        yield tiling.make_plan(spec, {"keys": keys}, tasks, text, moved, sums)


def emit(spec: AttentionSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: q, k, v, [biases,] y."""
    return block_kernel(spec, plan, target, symbol, QueryBlock)


def block_kernel(
    spec: AttentionSpec,
    plan: KernelPlan,
    target: TargetSpec,
    symbol: str,
    written_by: "type[QueryBlock]",
    functions: str = "",
) -> Any:
    """The kernel whose blocks of queries `written_by` writes."""
    width = QUERY_VECTORS * target.lanes
    queries = tiling.parts_of(spec.queries, (target.lanes, width))
    blocks = -(-spec.queries // width)

    def task(number: Expr, buffers: tuple[Buffer, ...]) -> None:
        head, block = T.quotient(number, blocks), T.remainder(number, blocks)
        window: Expr = 0
        if not is_constant(spec.windows) or spec.windows > 1:
            window, head = T.quotient(head, spec.heads), T.remainder(head, spec.heads)

        def write(first: Expr, count: int) -> None:
            written_by(spec, target, tiling.knob(plan, "keys"), buffers, (window, head), first, count).write()

        tiling.each_of(queries, block, write)

    layout: Layout = "bf16" if spec.precision == "bf16" else "blocked"
    arguments = [
        bf16.stored_argument(name, numbers_of(spec, index), layout) for index, name in enumerate(("q", "k", "v"))
    ]
    arguments += [Argument(f"bias{i}", bias_elements(spec, bias)) for i, bias in enumerate(spec.biases)]
    y = bf16.stored_argument("y", numbers_of(spec, 3), spec.output_layout)
    return T.kernel(symbol, [*arguments, y], task, functions)


def numbers_of(spec: AttentionSpec, index: int) -> int:
    """Numbers of q, k, v or y, from the first to the last that a kernel touches."""
    positions = spec.queries if index in _OF_QUERIES else spec.keys
    heads = spec.heads if index in _OF_QUERIES else spec.heads // spec.sharing
    channels = spec.value_channels if index in _OF_VALUES else spec.head_size
    if not spec.is_plain(index):
        step = (spec.strides[index] or (channels,))[0]
        return spec.windows * positions * ((heads - 1) * step + channels)
    lengths = (spec.windows, heads, positions, channels)
    return 1 + sum((n - 1) * step for n, step in zip(lengths, spec.strides[index], strict=True))


def bias_elements(spec: AttentionSpec, bias: ScoreBias) -> int:
    """Numbers of a bias."""
    windows, heads = spec.windows if bias.per_window else 1, spec.heads if bias.per_head else 1
    return windows * heads * (spec.queries if bias.per_query else 1) * spec.keys


@dataclass(frozen=True)
class HeadPlace:
    """Where the numbers of one head lie: those of its first position begin at `begin`."""

    begin: Expr
    position: Expr  # numbers from a position to the next
    block: Expr  # and from the channels of a register to the next ones
    channel: Expr = 1

    def at(self, position: Expr, block: Expr = 0, lane: Expr = 0) -> Expr:
        """Where a number is."""
        return self.begin + block * self.block + position * self.position + lane * self.channel


def place_of(spec: AttentionSpec, lanes: int, index: int, window: Expr, head: Expr) -> HeadPlace:
    """Where a head of q, k, v or y is; `lanes`: channels side by side of a blocked sequence."""
    positions = spec.queries if index in _OF_QUERIES else spec.keys
    if index not in _OF_QUERIES and spec.sharing > 1:
        head = T.quotient(head, spec.sharing)
    if spec.is_plain(index):
        windows, heads, position, channel = spec.strides[index]
        return HeadPlace(window * windows + head * heads, position, lanes * channel, channel)
    size = spec.value_channels if index in _OF_VALUES else spec.head_size
    step, plane = (spec.strides[index] or (size,))[0], spec.windows * positions * lanes
    return HeadPlace(head * (step // lanes) * plane + window * (positions * lanes), lanes, plane)


class QueryBlock:
    """Writes the code for `count` queries from number `first`.

    Local memory is [head_size or keys][queries], queries rounded up to whole vectors. Those beyond `count` repeat the
    last one.
    """

    def __init__(
        self,
        spec: AttentionSpec,
        target: TargetSpec,
        keys: int,
        buffers: tuple[Buffer, ...],
        place: tuple[Expr, Expr],
        first: Expr,
        count: int,
    ):
        self._spec, self._lanes, self._first, self._count = spec, target.lanes, first, count
        self._window, self._head = place
        self._places = [place_of(spec, target.lanes, index, *place) for index in range(4)]
        self._q, self._k, self._v, *self._biases, self._y = buffers
        self._vectors = int(-(-count // target.lanes))
        self._width = self._vectors * target.lanes
        self._numbers = most_numbers(target, self._vectors)
        if not is_constant(spec.keys) and spec.keys <= MOST_KEYS:
            keys = MOST_KEYS
        self._runs = tiling.blocks_of(spec.keys, keys)
        self._head_blocks, self._head_rest = divmod(spec.head_size, target.lanes)
        self._value_blocks, self._value_rest = divmod(spec.value_channels, target.lanes)

    def write(self) -> None:
        """All of it."""
        spec, lanes = self._spec, self._lanes
        self._queries = T.scratch(spec.head_size * self._width)
        longest = max(run.width for run in self._runs)
        longest = longest if is_constant(longest) else MOST_KEYS  # so that one kernel serves all
        self._scores = T.scratch(longest * self._width)
        self._result = T.scratch(spec.value_channels * self._width)
        self._most = [Register(lanes, T.constant(LOWEST, lanes)) for _ in range(self._vectors)]
        self._total = [Register(lanes, T.constant(0.0, lanes)) for _ in range(self._vectors)]
        self._load_queries()
        if self._pieces > 1:
            zeros = T.constant(0.0, lanes)
            T.repeat(spec.value_channels * self._vectors, lambda i: T.store(self._result, i * lanes, zeros, lanes))
        tiling.each_tile(self._runs, self._keys)
        self._store_results()

    @property
    def _pieces(self) -> int:
        """Number of blocks of keys."""
        return sum(run.count for run in self._runs)

    def _place(self, row: Expr, vector: int) -> Expr:
        """Where a vector in local memory begins."""
        return row * self._width + vector * self._lanes

    def _local(self, row: Expr, vector: int) -> Expr:
        """Index of a vector in local memory."""
        return T.lanes_at(self._place(row, vector), self._lanes)

    def _put(self, buffer: Buffer, row: Expr, vector: int, value: Expr) -> None:
        T.store(buffer, self._place(row, vector), value, self._lanes)

    def _query(self, vector: int, lane: int) -> Expr:
        """Number of the query in a lane."""
        return self._first + T.at_most(vector * self._lanes + lane, self._count - 1)

    def _is_query(self, number: int) -> Expr | bool:
        """Whether the block has so many queries and one more."""
        return number < self._count if is_constant(self._count) else number < expression(self._count)

    def _load_queries(self) -> None:
        """Queries of this head, transposed and scaled."""
        lanes, place = self._lanes, self._places[0]

        def load(block: Expr) -> None:
            for j in range(self._vectors):
                rows = [self._q[T.lanes_at(place.at(self._query(j, i), block), lanes)] for i in range(lanes)]
                for i, column in enumerate(T.transposed(rows)):
                    self._put(self._queries, block * lanes + i, j, column * T.constant(self._spec.scale, lanes))

        if self._head_blocks:
            T.repeat(self._head_blocks, load)
        for lane, j, i in product(range(self._head_rest), range(self._vectors), range(lanes)):
            number = self._q[place.at(self._query(j, i), self._head_blocks, lane)] * T.constant(self._spec.scale, 1)
            T.store(self._queries, self._place(self._head_blocks * lanes + lane, j) + i, number, 1)

    def _share(self, total: Expr) -> Expr:
        """By what results are multiplied: a row without keys has a sum of 0, in which all exponentials are 0."""
        one = T.constant(1.0, self._lanes)
        share = one / total
        if self._spec.empty_rows == "nan":
            return T.bind(share)
        zero = T.constant(0.0, self._lanes)
        rest = one if self._spec.empty_rows == "zero" else tirx.Select(total >= zero, one, zero)
        return T.bind(tirx.Select(total > zero, share, rest))

    def _shared(self, value: Expr, share: Expr) -> Expr:
        """A vector of the result; a share of 0 is that of NaN."""
        if self._spec.empty_rows != "zero and nan":
            return value * share
        zero = T.constant(0.0, self._lanes)
        return tirx.Select(share > zero, value * share, zero)

    def _store_results(self) -> None:
        lanes, place = self._lanes, self._places[3]
        shares = [self._share(total.value) for total in self._total]

        def save(block: Expr) -> None:
            for j, share in enumerate(shares):
                rows = [self._shared(self._result[self._local(block * lanes + i, j)], share) for i in range(lanes)]
                for i, column in enumerate(T.transposed(rows)):
                    into = place.at(self._query(j, i), block)
                    T.when(self._is_query(j * lanes + i), partial(T.store, self._y, into, column, lanes))

        if self._value_blocks:
            T.repeat(self._value_blocks, save)
        for lane, (j, share) in product(range(self._value_rest), enumerate(shares)):
            channel = self._value_blocks * lanes + lane
            self._put(self._result, channel, j, self._shared(self._result[self._local(channel, j)], share))
            for i in range(lanes):
                into, number = place.at(self._query(j, i), self._value_blocks, lane), self._place(channel, j) + i
                T.when(self._is_query(j * lanes + i), partial(T.store, self._y, into, self._result[number], 1))

    def _keys(self, first: Expr, count: int) -> None:
        """Scores of a block of keys, their exponentials, and the values weighted by these."""
        before = [T.bind(most.value) for most in self._most]
        self._set_biases(first, count)
        once = any(bias.per_query for bias in self._spec.biases)  # what is added to scores
        tiling.each_tile(
            tiling.segments(int(count) if once else count, self._numbers), partial(self._score_tile, first)
        )
        factors = [T.bind(decay(b - most.value, self._lanes)) for b, most in zip(before, self._most, strict=True)]
        if self._pieces > 1:
            for total, factor in zip(self._total, factors, strict=True):
                total.set(total.value * factor)
        T.repeat(count, self._exponentials)
        for run in tiling.segments(self._spec.value_channels, self._numbers):
            for start in range(run.start, run.start + run.count * run.width, run.width):
                self._value_tile(first, count, range(start, start + run.width), factors)

    def _score_tile(self, first: Expr, start: Expr, count: int) -> None:
        """Scores of `count` keys, from key `start` of the block that begins at key `first`."""
        lanes, place = self._lanes, self._places[1]
        sums = zero_sums(count, self._vectors, lanes)

        def block(index: Expr, channels: int = lanes) -> None:
            base = place.at(first + start, index)

            def channel(lane: Expr) -> None:
                numbers = [self._k[base + i * place.position + lane * place.channel] for i in range(count)]
                vectors = [self._queries[self._local(index * lanes + lane, j)] for j in range(self._vectors)]
                multiply_add(sums, numbers, vectors, lanes)

            unrolled(channels, channel)

        if self._head_blocks:
            T.repeat(self._head_blocks, block)
        if self._head_rest:
            block(self._head_blocks, self._head_rest)
        for i, j in product(range(count), range(self._vectors)):
            if self._spec.softcap:
                cap = T.constant(self._spec.softcap, lanes)
                sums[i][j].set(cap * tanh(sums[i][j].value * T.constant(1 / self._spec.softcap, lanes), lanes))
            score = self._biased(sums, i, j, first, start)
            self._put(self._scores, start + i, j, score)
            self._most[j].set(tirx.Max(score, self._most[j].value))

    def _exponentials(self, key: Expr) -> None:
        for j in range(self._vectors):
            value = T.bind(decay(self._scores[self._local(key, j)] - self._most[j].value, self._lanes))
            self._put(self._scores, key, j, value)
            self._total[j].add(value)

    def _value_tile(self, first: Expr, count: int, channels: range, factors: list[Expr]) -> None:
        """Some channels of the result."""
        lanes, place = self._lanes, self._places[2]
        sums = zero_sums(len(channels), self._vectors, lanes)

        def key(index: Expr) -> None:
            numbers = [self._v[place.at(first + index, c // lanes, c % lanes)] for c in channels]
            vectors = [self._scores[self._local(index, j)] for j in range(self._vectors)]
            multiply_add(sums, numbers, vectors, lanes)

        unrolled(count, key)
        for (i, channel), j in product(enumerate(channels), range(self._vectors)):
            value = sums[i][j].value
            if self._pieces > 1:
                value = value + self._result[self._local(channel, j)] * factors[j]
            self._put(self._result, channel, j, value)

    def _offset(self, bias: ScoreBias, query: Expr, key: Expr) -> Expr:
        """Where a number of a bias lies."""
        spec = self._spec
        row = self._head if bias.per_head else 0
        if bias.per_window:
            row = row + self._window * (spec.heads if bias.per_head else 1)
        row = row * spec.queries + query if bias.per_query else row
        return row * spec.keys + key

    def _factor(self, bias: ScoreBias) -> float:
        return self._spec.scale if bias.scaled else 1.0

    def _biased(self, sums: Sums, i: int, j: int, first: Expr, start: Expr) -> Expr:
        """A vector of scores and all biases of it."""
        score = sums[i][j].value
        for bias, numbers in zip(self._spec.biases, self._biases, strict=True):
            if not bias.per_query:
                number = numbers[self._offset(bias, 0, first + start + i)]
                score = score + T.splat(number * T.constant(self._factor(bias), 1), self._lanes)
        if any(bias.per_query for bias in self._spec.biases):
            score = score + self._scores[self._local(start + i, j)]
        return T.bind(score)

    def _set_biases(self, first: Expr, count: int) -> None:
        """Put the sum of all biases that differ from query to query, transposed, where the scores will be."""
        lanes, added = self._lanes, False
        for bias, numbers in zip(self._spec.biases, self._biases, strict=True):
            if bias.per_query:
                whole, rest = divmod(count, lanes)
                if whole:
                    T.repeat(whole, partial(self._bias_tile, bias, numbers, first, added))
                for key, j in product(range(count - rest, count), range(self._vectors)):
                    self._bias_column(bias, numbers, first, key, j, added)
                added = True

    def _bias_tile(self, bias: ScoreBias, numbers: Buffer, first: Expr, added: bool, tile: Expr) -> None:
        """As many keys as a vector has lanes."""
        lanes, factor = self._lanes, T.constant(self._factor(bias), self._lanes)
        for j in range(self._vectors):
            places = [self._offset(bias, self._query(j, i), first + tile * lanes) for i in range(lanes)]
            for i, column in enumerate(T.transposed([numbers[T.lanes_at(place, lanes)] for place in places])):
                key, value = tile * lanes + i, column * factor
                self._put(self._scores, key, j, value + self._scores[self._local(key, j)] if added else value)

    def _bias_column(self, bias: ScoreBias, numbers: Buffer, first: Expr, key: int, j: int, added: bool) -> None:
        """One key, number by number."""
        for i in range(self._lanes):
            value = numbers[self._offset(bias, self._query(j, i), first + key)] * T.constant(self._factor(bias), 1)
            place = self._place(key, j) + i
            T.store(self._scores, place, value + self._scores[place] if added else value, 1)
