"""Instructions for bfloat16: wrappers in LLVM's language, and what they read and write.

A *word* is 32 bits, two numbers: of input channels 2i and 2i + 1. `vdpbf16ps` multiplies words and adds both products
to a float32. AMX does so with tiles of 16 rows of 16 words: sums[pixel][output] += inputs[pixel][word] x
weights[word][output]. Both round sums as float32 does, and take subnormal numbers for zero.

Tiles have numbers that are part of an instruction: 0 to 3 are sums, 4 and 5 inputs, 6 and 7 weights.
"""

from itertools import product
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as ir

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.specs import Array
from gangway.compiler.kernels.templates.builder import (
    Argument,
    Buffer,
    Expr,
    bind,
    lanes_at,
    quotient,
    remainder,
    scratch,
    store,
)

WORDS = 16  # of a vector, of a tile's row, and of an input plane: 32 channels
TILE_ROWS = 16
TILE_ELEMENTS = TILE_ROWS * WORDS
PLANE_CHANNELS = 2 * WORDS

_VECTORS = """
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
declare <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float>, <16 x float>)
define linkonce_odr <16 x float> @gangway_bf16_add_products(<16 x float> %sum, <16 x i32> %a, <16 x i32> %b) #0 {
  %x = bitcast <16 x i32> %a to <32 x bfloat>
  %y = bitcast <16 x i32> %b to <32 x bfloat>
  %r = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %sum, <32 x bfloat> %x, <32 x bfloat> %y)
  ret <16 x float> %r
}
define linkonce_odr <16 x i32> @gangway_bf16_pack(<16 x float> %low, <16 x float> %high) #0 {
  %r = call <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float> %high, <16 x float> %low)
  %w = bitcast <32 x bfloat> %r to <16 x i32>
  ret <16 x i32> %w
}
define linkonce_odr <16 x i32> @gangway_bf16_interleave(<16 x float> %even, <16 x float> %odd) #0 {
  %r = call <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float> %odd, <16 x float> %even)
  %h = bitcast <32 x bfloat> %r to <32 x i16>
  %s = shufflevector <32 x i16> %h, <32 x i16> poison, <32 x i32> <INTERLEAVED>
  %w = bitcast <32 x i16> %s to <16 x i32>
  ret <16 x i32> %w
}
define linkonce_odr <16 x float> @gangway_bf16_unpack(<8 x i32> %words) #0 {
  %h = bitcast <8 x i32> %words to <16 x i16>
  %w = zext <16 x i16> %h to <16 x i32>
  %s = shl <16 x i32> %w, <SIXTEEN>
  %r = bitcast <16 x i32> %s to <16 x float>
  ret <16 x float> %r
}
define linkonce_odr <16 x i32> @gangway_bf16_interleave_halves(<8 x i32> %even, <8 x i32> %odd) #0 {
  %a = bitcast <8 x i32> %even to <16 x i16>
  %b = bitcast <8 x i32> %odd to <16 x i16>
  %s = shufflevector <16 x i16> %a, <16 x i16> %b, <32 x i32> <INTERLEAVED>
  %w = bitcast <32 x i16> %s to <16 x i32>
  ret <16 x i32> %w
}
declare <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float>)
define linkonce_odr <8 x i32> @gangway_bf16_half(<16 x float> %numbers) #0 {
  %r = call <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float> %numbers)
  %w = bitcast <16 x bfloat> %r to <8 x i32>
  ret <8 x i32> %w
}
define linkonce_odr i32 @gangway_bf16_skipped(ptr %memory) #0 {
  %a = ptrtoint ptr %memory to i64
  %n = sub i64 0, %a
  %m = and i64 %n, 63
  %s = lshr i64 %m, 2
  %r = trunc i64 %s to i32
  ret i32 %r
}
attributes #0 = { alwaysinline nounwind memory(none) }
"""
_VECTORS = _VECTORS.replace(
    "INTERLEAVED", ", ".join(f"i32 {half * 16 + pixel}" for pixel in range(16) for half in range(2))
).replace("SIXTEEN", ", ".join(["i32 16"] * 16))

# What `ldtilecfg` reads, in words: palette 1; 64 bytes in a row of each of eight tiles; 16 rows of each.
_CONFIGURATION = [1, 0, 0, 0, *[0x00400040] * 4, 0, 0, 0, 0, *[0x10101010] * 2, 0, 0]
_TILES = """
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8 immarg)
declare void @llvm.x86.tileloadd64(i8 immarg, ptr, i64)
declare void @llvm.x86.tilestored64(i8 immarg, ptr, i64)
declare void @llvm.x86.tdpbf16ps(i8 immarg, i8 immarg, i8 immarg)
define linkonce_odr i32 @gangway_tiles_begin(ptr %memory) #1 {
  store <16 x i32> <CONFIGURATION>, ptr %memory, align 4
  call void @llvm.x86.ldtilecfg(ptr %memory)
  ret i32 0
}
define linkonce_odr i32 @gangway_tiles_end() #1 {
  call void @llvm.x86.tilerelease()
  ret i32 0
}
attributes #1 = { alwaysinline nounwind }
""".replace("CONFIGURATION", ", ".join(f"i32 {word}" for word in _CONFIGURATION))


def _sum_tile(i: int, j: int) -> int:
    return 2 * i + j


def _tile_functions(rows: int, columns: int) -> str:
    """Functions for `rows` x `columns` tiles of sums: set to zero, add products, load, store."""
    sums = list(product(range(rows), range(columns)))
    zero = "".join(f"  call void @llvm.x86.tilezero(i8 {_sum_tile(i, j)})\n" for i, j in sums)
    inputs = "".join(f"  call void @llvm.x86.tileloadd64(i8 {4 + i}, ptr %a{i}, i64 %as)\n" for i in range(rows))
    weights = "".join(f"  call void @llvm.x86.tileloadd64(i8 {6 + j}, ptr %b{j}, i64 %bs)\n" for j in range(columns))
    products = "".join(
        f"  call void @llvm.x86.tdpbf16ps(i8 {_sum_tile(i, j)}, i8 {4 + i}, i8 {6 + j})\n" for i, j in sums
    )
    loaded = "".join(
        f"  call void @llvm.x86.tileloadd64(i8 {_sum_tile(i, j)}, ptr %y{_sum_tile(i, j)}, i64 64)\n" for i, j in sums
    )
    stored = "".join(
        f"  call void @llvm.x86.tilestored64(i8 {_sum_tile(i, j)}, ptr %y{_sum_tile(i, j)}, i64 64)\n" for i, j in sums
    )
    places = ", ".join([*(f"ptr %a{i}" for i in range(rows)), *(f"ptr %b{j}" for j in range(columns))])
    results = ", ".join(f"ptr %y{_sum_tile(i, j)}" for i, j in sums)
    name = f"{rows}x{columns}"
    return f"""
define linkonce_odr i32 @gangway_tiles_zero_{name}() #1 {{
{zero}  ret i32 0
}}
define linkonce_odr i32 @gangway_tiles_add_{name}({places}, i32 %a_bytes, i32 %b_bytes) #1 {{
  %as = sext i32 %a_bytes to i64
  %bs = sext i32 %b_bytes to i64
{inputs}{weights}{products}  ret i32 0
}}
define linkonce_odr i32 @gangway_tiles_load_{name}({results}) #1 {{
{loaded}  ret i32 0
}}
define linkonce_odr i32 @gangway_tiles_store_{name}({results}) #1 {{
{stored}  ret i32 0
}}
"""


def has_tiles(target: TargetSpec) -> bool:
    """Whether the target multiplies tiles of bfloat16."""
    return {"amx_bf16", "amx_tile"} <= set(target.extensions)


def has_words(target: TargetSpec) -> bool:
    """Whether the target multiplies vectors of bfloat16; kernels with tiles need them, too."""
    return "avx512_bf16" in target.extensions


def functions(target: TargetSpec) -> str:
    """LLVM's text of what the functions below call."""
    if not has_tiles(target):
        return _VECTORS
    return _VECTORS + _TILES + "".join(_tile_functions(*shape) for shape in product((1, 2), (1, 2)))


def add_products(total: Expr, a: Expr, b: Expr) -> Expr:
    """The vector of sums, and both products of each of the words `a` and `b`."""
    return tirx.call_extern("float32x16", "gangway_bf16_add_products", total, a, b)


def pack_words(low: Expr, high: Expr) -> Expr:
    """32 numbers as words, those of `low` first."""
    return tirx.call_extern("int32x16", "gangway_bf16_pack", low, high)


def unpack_words(words: Expr) -> Expr:
    """The 16 numbers of 8 words."""
    return tirx.call_extern("float32x16", "gangway_bf16_unpack", words)


class Blocked:
    """The vectors of a blocked tensor in memory, stored as float32 or, 32 channels side by side, as bfloat16.

    A pixel has 16 elements of 32 bits in a plane of either, so places within planes are the same.
    """

    def __init__(self, buffer: Buffer, plane: int, stored: bool) -> None:
        self._buffer, self._plane, self._stored = buffer, plane, stored

    def load(self, block: Expr, at: Expr, lanes: int) -> Expr:
        """The vector of a channel block that begins at element `at` of its plane."""
        if not self._stored:
            return self._buffer[lanes_at(block * self._plane + at, lanes)]
        return unpack_words(self._buffer[lanes_at(self._half(block, at), WORDS // 2)])

    def store(self, block: Expr, at: Expr, value: Expr, lanes: int) -> None:
        """Write it."""
        if self._stored:
            half = tirx.call_extern("int32x8", "gangway_bf16_half", value)
            store(self._buffer, self._half(block, at), half, WORDS // 2)
        else:
            store(self._buffer, block * self._plane + at, value, lanes)

    def _half(self, block: Expr, at: Expr) -> Expr:
        return quotient(block, 2) * self._plane + at + remainder(block, 2) * (WORDS // 2)


def stored_argument(name: str, elements: int, stored: bool) -> Argument:
    """A blocked tensor of so many float32 numbers, or half as many words."""
    return Argument(name, elements // 2, "int32") if stored else Argument(name, elements)


def interleave_words(even: Expr, odd: Expr) -> Expr:
    """Words of one number of `even` and one of `odd`."""
    return tirx.call_extern("int32x16", "gangway_bf16_interleave", even, odd)


def interleave_halves(even: Expr, odd: Expr) -> Expr:
    """Words of one bfloat16 of `even` and one of `odd`, each of which has 16."""
    return tirx.call_extern("int32x16", "gangway_bf16_interleave_halves", even, odd)


def line_scratch(elements: int, dtype: str) -> tuple[Buffer, Expr]:
    """Scratch memory of numbers of 32 bits, and which element begins a cache line: rows of tiles should be lines."""
    buffer = scratch(elements + WORDS, dtype)
    return buffer, bind(tirx.call_extern("int32", "gangway_bf16_skipped", ir.address_of(buffer[0])))


def _call(name: str, *arguments: Any) -> None:
    ir.evaluate(tirx.call_extern("int32", f"gangway_tiles_{name}", *arguments))


def begin_tiles(memory: Buffer) -> None:
    """Set up all tiles as 16 rows of 16 words; `memory` has 64 bytes for the instruction to read."""
    _call("begin", ir.address_of(memory[0]))


def end_tiles() -> None:
    """Release the tiles: then neither a switch of tasks nor other code has to care for them."""
    _call("end")


def zero_tiles(rows: int, columns: int) -> None:
    """Set sums to zero."""
    _call(f"zero_{rows}x{columns}")


def add_tiles(
    inputs: Buffer, input_places: list[Expr], input_step: int, weights: Buffer, weight_places: list[Expr], step: int
) -> None:
    """Add products of tiles that begin at these words, whose rows are `input_step` and `step` words apart."""
    places = [ir.address_of(inputs[place]) for place in input_places]
    places += [ir.address_of(weights[place]) for place in weight_places]
    steps = [tirx.const(4 * words, "int32") for words in (input_step, step)]
    _call(f"add_{len(input_places)}x{len(weight_places)}", *places, *steps)


def load_tiles(sums: Buffer, places: list[list[Expr]]) -> None:
    """Read each tile of sums from its place."""
    _call(f"load_{len(places)}x{len(places[0])}", *_addresses(sums, places))


def store_tiles(sums: Buffer, places: list[list[Expr]]) -> None:
    """Write each tile of sums to its place."""
    _call(f"store_{len(places)}x{len(places[0])}", *_addresses(sums, places))


def _addresses(sums: Buffer, places: list[list[Expr]]) -> list[Expr]:
    return [ir.address_of(sums[place]) for row in places for place in row]


def rounded(numbers: Array) -> Array:
    """The nearest bfloat16 numbers, of ties the even one, as uint16."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
