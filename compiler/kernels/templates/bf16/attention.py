"""Fused attention by tiles of AMX, with queries, keys and values that are stored in bfloat16.

A task is that of the template for float32: a head and a block of queries, scores [key][query] in local memory. Rows of
tiles are keys as they are stored, for the scores, and then queries, whose shares of keys are transposed for it. So no
key and no value is transposed; of values, words of two neighbouring keys are made.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from tvm import tirx

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.attention_specs import AttentionSpec
from gangway.compiler.kernels.specs import KernelPlan
from gangway.compiler.kernels.templates import attention
from gangway.compiler.kernels.templates import builder as T
from gangway.compiler.kernels.templates.amx.tiles import (
    TILE_ELEMENTS,
    TILE_ROWS,
    WORDS,
    begin_tiles,
    end_tiles,
    line_scratch,
    store_tiles,
    zero_tiles,
)
from gangway.compiler.kernels.templates.attention import QueryBlock
from gangway.compiler.kernels.templates.bf16 import words as bf16
from gangway.compiler.kernels.templates.bf16.words import PLANE_CHANNELS
from gangway.compiler.kernels.templates.builder import Expr, Register
from gangway.compiler.kernels.templates.float32_math import decay
from gangway.compiler.kernels.templates.tiling import UnsupportedSpecError, each_tile

LANES = 16
KEYS_OF_TILES = 2 * TILE_ROWS  # of a pair of tiles of keys, and of a row of a tile of shares


def computes(spec: AttentionSpec, target: TargetSpec) -> bool:
    """Whether this template has a kernel for an attention."""
    return (
        bf16.has_tiles(target)
        and (spec.windows, spec.sharing, spec.softcap, spec.value_channels) == (1, 1, 0, spec.head_size)
        and not any(spec.strides)
        and spec.head_size % PLANE_CHANNELS == 0
        and spec.head_size <= attention.MOST_HEAD_SIZE // 2
        and min(spec.queries, spec.keys) >= TILE_ROWS
        and len(spec.biases) <= attention.MOST_BIASES
    )


def candidates(spec: AttentionSpec, target: TargetSpec) -> Iterator[KernelPlan]:
    """The plans of the template for float32, with tiles. Raises `UnsupportedSpecError`."""
    if not computes(spec, target):
        raise UnsupportedSpecError(f"attention in bfloat16: {spec}")
    for plan in attention.candidates(spec, target):
        text = plan.description.replace("attention", "attention bf16 tiles")
        yield replace(plan, description=text)


def emit(spec: AttentionSpec, plan: KernelPlan, target: TargetSpec, symbol: str) -> Any:
    """The kernel. Arguments: q, k, v, [biases,] y."""
    return attention.block_kernel(spec, plan, target, symbol, _TileBlock, bf16.functions(target))


class _TileBlock(QueryBlock):
    """Writes the code for `count` queries from number `first`.

    Local memory beside the scores: queries [plane][word][query], shares as words of two keys [pair of keys][query] and
    as tiles [vector of queries][32 keys][query][word], values [32 keys][block of channels][pair of keys][channel], and
    results [block of channels][query][channel].
    """

    def write(self) -> None:
        """All of it."""
        spec, width = self._spec, self._width
        longest = max(run.width for run in self._runs)
        chunks = -(-longest // KEYS_OF_TILES)
        self._planes, self._blocks = spec.head_size // PLANE_CHANNELS, spec.head_size // LANES
        self._words, self._first_word = line_scratch(self._planes * WORDS * width, "int32")
        self._raw, self._first_raw = line_scratch(2 * self._vectors * TILE_ELEMENTS, "float32")
        self._scores, self._first_score = line_scratch(longest * width, "float32")
        self._pairs, self._first_pair = line_scratch(chunks * WORDS * width, "int32")
        self._shares, self._first_share = line_scratch(chunks * WORDS * width, "int32")
        self._values, self._first_value = line_scratch(chunks * self._blocks * TILE_ELEMENTS, "int32")
        self._result, self._first_result = line_scratch(self._blocks * width * LANES, "float32")
        self._factors, _ = line_scratch(width, "float32")
        self._most = [Register(LANES, T.constant(attention.LOWEST, LANES)) for _ in range(self._vectors)]
        self._total = [Register(LANES, T.constant(0.0, LANES)) for _ in range(self._vectors)]
        begin_tiles(self._pairs)  # which has room, and is not in use yet
        self._load_queries()
        if self._pieces > 1:
            zeros = T.constant(0.0, LANES)
            vectors = self._blocks * width
            T.repeat(vectors, lambda i: T.store(self._result, self._first_result + i * LANES, zeros, LANES))
        each_tile(self._runs, self._keys)
        end_tiles()
        self._store_results()

    def _place(self, row: Expr, vector: int) -> Expr:
        return self._first_score + super()._place(row, vector)

    def _load_queries(self) -> None:
        """Queries of this head, as tiles of weights are."""
        plane_words = self._spec.queries * WORDS

        def load(plane: Expr) -> None:
            base = (self._head * self._planes + plane) * plane_words
            for j in range(self._vectors):
                rows = [self._q[T.lanes_at(base + self._query(j, i) * WORDS, WORDS)] for i in range(LANES)]
                for i, column in enumerate(T.transposed(rows)):
                    place = self._first_word + (plane * WORDS + i) * self._width + j * LANES
                    T.store(self._words, place, column, LANES)

        T.repeat(self._planes, load)

    def _keys(self, first: Expr, count: int) -> None:
        """Scores of a block of keys, their exponentials, and the values weighted by these."""
        before = [T.bind(most.value) for most in self._most]
        self._set_biases(first, count)
        whole, rest = divmod(count, KEYS_OF_TILES)
        if whole:
            T.repeat(whole, lambda i: self._score_pair(first, i * KEYS_OF_TILES, KEYS_OF_TILES))
        if rest:
            self._score_pair(first, whole * KEYS_OF_TILES, rest)
        factors = [T.bind(decay(b - most.value, LANES)) for b, most in zip(before, self._most, strict=True)]
        if self._pieces > 1:
            for j, (total, factor) in enumerate(zip(self._total, factors, strict=True)):
                total.set(total.value * factor)
                T.store(self._factors, j * LANES, factor, LANES)
        self._make_shares(count)
        self._make_values(first, count)
        for j in range(0, self._vectors, 2):
            for block in range(0, self._blocks, 2):
                self._multiply(range(j, min(j + 2, self._vectors)), block, -(-count // KEYS_OF_TILES))

    def _score_pair(self, first: Expr, start: Expr, count: int) -> None:
        """Scores of `count` keys, up to 32, from key `start` of the block that begins at key `first`."""
        tiles = -(-count // TILE_ROWS)
        for j in range(0, self._vectors, 2):
            vectors = range(j, min(j + 2, self._vectors))
            zero_tiles(tiles, len(vectors))

            def add(plane: Expr, vectors: range = vectors) -> None:
                keys = (self._head * self._planes + plane) * (self._spec.keys * WORDS) + (first + start) * WORDS
                rows = [keys + i * TILE_ELEMENTS for i in range(tiles)]
                queries = [self._first_word + plane * (WORDS * self._width) + v * LANES for v in vectors]
                bf16.PRODUCT.add(self._k, rows, WORDS, self._words, queries, self._width)

            T.repeat(self._planes, add)
            store_tiles(self._raw, [[self._raw_at(i, v) for v in vectors] for i in range(tiles)])
        scale = T.constant(self._spec.scale, LANES)
        for i in range(count):
            raw = [
                Register(LANES, self._raw[T.lanes_at(self._raw_at(i // TILE_ROWS, j) + i % TILE_ROWS * LANES, LANES)])
                for j in range(self._vectors)
            ]
            for total in raw:
                total.set(total.value * scale)
            sums = [raw] * (i + 1)
            for j in range(self._vectors):
                score = self._biased(sums, i, j, first, start)
                self._put(self._scores, start + i, j, score)
                self._most[j].set(tirx.Max(score, self._most[j].value))

    def _raw_at(self, tile: int, vector: int) -> Expr:
        return self._first_raw + (tile * self._vectors + vector) * TILE_ELEMENTS

    def _make_shares(self, count: int) -> None:
        """Exponentials as words of two keys, and these transposed: rows of tiles."""
        whole, odd, chunks = count // 2, count % 2, -(-count // KEYS_OF_TILES)

        def exponential(key: Expr, j: int) -> Expr:
            value = T.bind(decay(self._scores[self._local(key, j)] - self._most[j].value, LANES))
            self._total[j].add(value)
            return value

        def put(pair: Expr, j: int, value: Expr) -> None:
            T.store(self._pairs, self._first_pair + pair * self._width + j * LANES, value, LANES)

        def pair(index: Expr) -> None:
            for j in range(self._vectors):
                put(index, j, bf16.interleave_words(exponential(2 * index, j), exponential(2 * index + 1, j)))

        T.repeat(whole, pair)
        for j in range(self._vectors):
            if odd:
                put(whole, j, bf16.interleave_words(exponential(count - 1, j), T.constant(0.0, LANES)))
            for index in range(whole + odd, chunks * WORDS):
                put(index, j, T.constant(0, LANES, "int32"))

        def transpose(chunk: Expr) -> None:
            for j in range(self._vectors):
                places = [self._first_pair + (chunk * WORDS + i) * self._width + j * LANES for i in range(WORDS)]
                rows = T.transposed([self._pairs[T.lanes_at(place, LANES)] for place in places])
                for i, row in enumerate(rows):
                    T.store(self._shares, self._share_at(chunk, j) + i * WORDS, row, WORDS)

        T.repeat(chunks, transpose)

    def _share_at(self, chunk: Expr, vector: int) -> Expr:
        return self._first_share + (chunk * self._vectors + vector) * TILE_ELEMENTS

    def _make_values(self, first: Expr, count: int) -> None:
        """Values as words of two keys."""
        plane = self._spec.keys * WORDS
        zero = T.constant(0, WORDS // 2, "int32")

        def pair(index: Expr, both: bool = True) -> None:
            chunk = T.quotient(index, WORDS)
            into = self._first_value + chunk * (self._blocks * TILE_ELEMENTS) + T.remainder(index, WORDS) * LANES
            for block in range(self._blocks):
                base = (self._head * self._planes + block // 2) * plane + (first + 2 * index) * WORDS
                base = base + block % 2 * (WORDS // 2)
                even = self._v[T.lanes_at(base, WORDS // 2)]
                odd = self._v[T.lanes_at(base + WORDS, WORDS // 2)] if both else zero
                T.store(self._values, into + block * TILE_ELEMENTS, bf16.interleave_halves(even, odd), LANES)

        T.repeat(count // 2, pair)
        if count % 2:
            pair(count // 2, both=False)
        pairs = -(-count // 2)
        for index in range(pairs, -(-count // KEYS_OF_TILES) * WORDS):
            for block in range(self._blocks):
                place = (index // WORDS * self._blocks + block) * TILE_ELEMENTS + index % WORDS * LANES
                T.store(self._values, self._first_value + place, T.constant(0, LANES, "int32"), LANES)

    def _multiply(self, vectors: range, block: int, chunks: int) -> None:
        """Add shares times values, of two blocks of channels."""
        zero_tiles(len(vectors), 2)

        def add(chunk: Expr) -> None:
            shares = [self._share_at(chunk, j) for j in vectors]
            values = [self._first_value + (chunk * self._blocks + block + b) * TILE_ELEMENTS for b in range(2)]
            bf16.PRODUCT.add(self._shares, shares, WORDS, self._values, values, WORDS)

        T.repeat(chunks, add)
        if self._pieces == 1:
            places = [[self._result_at(block + b, j * LANES) for b in range(2)] for j in vectors]
            store_tiles(self._result, places)
            return
        raw = [[self._raw_at(b, j - vectors.start) for b in range(2)] for j in vectors]
        store_tiles(self._raw, raw)
        for (j, line), b in ((pair, b) for pair in zip(vectors, raw, strict=True) for b in range(2)):

            def row(index: Expr, j: int = j, b: int = b, place: Expr = line[b]) -> None:
                into = self._result_at(block + b, j * LANES + index)
                factor = T.splat(self._factors[j * LANES + index], LANES)
                value = (
                    self._result[T.lanes_at(into, LANES)] * factor + self._raw[T.lanes_at(place + index * LANES, LANES)]
                )
                T.store(self._result, into, value, LANES)

            T.repeat(LANES, row)

    def _result_at(self, block: Expr, query: Expr) -> Expr:
        return self._first_result + (block * self._width + query) * LANES

    def _store_results(self) -> None:
        y = bf16.Blocked(self._y, self._spec.queries * LANES, self._spec.output_layout)
        for j, total in enumerate(self._total):
            T.store(self._factors, j * LANES, self._share(total.value), LANES)

        def save(block: Expr) -> None:
            for query in range(self._width):
                share = T.splat(self._factors[query], LANES)
                value = self._shared(self._result[T.lanes_at(self._result_at(block, query), LANES)], share)
                place = (self._first + query) * LANES
                output = self._head * self._blocks + block
                T.when(self._is_query(query), partial(y.store, output, place, value, LANES))

        T.repeat(self._blocks, save)
