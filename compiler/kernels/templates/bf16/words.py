"""Instructions for bfloat16: wrappers in LLVM's language, and what they read and write.

A *word* is 32 bits, two numbers: of input channels 2i and 2i + 1. `vdpbf16ps` multiplies words and adds both products
to a float32. AMX does so with tiles (`amx/tiles.py`). Both round sums as float32 does, and take subnormal numbers for
zero.
"""

import numpy as np
from tvm import tirx

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.specs import Array, Layout
from gangway.compiler.kernels.templates.amx.tiles import LINES, WORDS, TileProduct
from gangway.compiler.kernels.templates.builder import Argument, Buffer, Expr, lanes_at, quotient, remainder, store

PLANE_CHANNELS = 2 * WORDS  # of an input plane, which has the words of a vector
PRODUCT = TileProduct("bf16", "tdpbf16ps")

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
attributes #0 = { alwaysinline nounwind memory(none) }
"""
_VECTORS = _VECTORS.replace(
    "INTERLEAVED", ", ".join(f"i32 {half * 16 + pixel}" for pixel in range(16) for half in range(2))
).replace("SIXTEEN", ", ".join(["i32 16"] * 16))


def has_tiles(target: TargetSpec) -> bool:
    """Whether the target multiplies tiles of bfloat16."""
    return {"amx_bf16", "amx_tile"} <= set(target.extensions)


def has_words(target: TargetSpec) -> bool:
    """Whether the target multiplies vectors of bfloat16; kernels with tiles need them, too."""
    return "avx512_bf16" in target.extensions


def functions(target: TargetSpec) -> str:
    """LLVM's text of what the functions below call."""
    text = _VECTORS + LINES
    if not has_tiles(target):
        return text
    return text + PRODUCT.functions


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

    def __init__(self, buffer: Buffer, plane: int, layout: Layout) -> None:
        self._buffer, self._plane, self._stored = buffer, plane, layout == "bf16"

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


def stored_argument(name: str, elements: int, layout: Layout) -> Argument:
    """A blocked tensor of so many float32 numbers, or half as many words."""
    return Argument(name, elements // 2, "int32") if layout == "bf16" else Argument(name, elements)


def interleave_words(even: Expr, odd: Expr) -> Expr:
    """Words of one number of `even` and one of `odd`."""
    return tirx.call_extern("int32x16", "gangway_bf16_interleave", even, odd)


def interleave_halves(even: Expr, odd: Expr) -> Expr:
    """Words of one bfloat16 of `even` and one of `odd`, each of which has 16."""
    return tirx.call_extern("int32x16", "gangway_bf16_interleave_halves", even, odd)


def rounded(numbers: Array) -> Array:
    """The nearest bfloat16 numbers, of ties the even one, as uint16."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
