"""Instructions for 8-bit numbers: wrappers in LLVM's language.

A *word* is 32 bits, four numbers: of input channels 4i to 4i + 3. `vpdpbusd` multiplies words of unsigned numbers by
words of signed ones and adds the products to an int32. AMX does so with tiles (`amx/tiles.py`). Neither rounds.
"""

from tvm import tirx

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.templates.amx.tiles import LINES, WORDS, TileProduct
from gangway.compiler.kernels.templates.builder import Expr, splat

WORD_CHANNELS = 4
PRODUCT = TileProduct("int8", "tdpbusd")
READ_BEHIND_BYTES = 64 * 64  # of what a tile's last rows read, whatever the stride is


_VECTORS = """
declare <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32>, <64 x i8>, <64 x i8>)
declare <16 x i32> @llvm.x86.avx512.mask.cvtps2dq.512(<16 x float>, <16 x i32>, i16, i32)
define linkonce_odr <16 x i32> @gangway_int8_add_products(<16 x i32> %sum, <16 x i32> %a, <16 x i32> %b) #0 {
  %x = bitcast <16 x i32> %a to <64 x i8>
  %y = bitcast <16 x i32> %b to <64 x i8>
  %r = call <16 x i32> @llvm.x86.avx512.vpdpbusd.512(<16 x i32> %sum, <64 x i8> %x, <64 x i8> %y)
  ret <16 x i32> %r
}
define linkonce_odr <16 x i32> @gangway_int8_round(<16 x float> %x) #0 {
  %r = call <16 x i32> @llvm.x86.avx512.mask.cvtps2dq.512(<16 x float> %x, <16 x i32> zeroinitializer, i16 -1, i32 4)
  ret <16 x i32> %r
}
declare i32 @llvm.vector.reduce.add.v16i32(<16 x i32>)
define linkonce_odr i32 @gangway_int8_total(<16 x i32> %x) #0 {
  %r = call i32 @llvm.vector.reduce.add.v16i32(<16 x i32> %x)
  ret i32 %r
}
declare <16 x float> @llvm.arithmetic.fence.v16f32(<16 x float>)
define linkonce_odr <16 x float> @gangway_int8_scaled(<16 x float> %x, <16 x float> %y) #0 {
  %p = fmul <16 x float> %x, %y
  %r = call <16 x float> @llvm.arithmetic.fence.v16f32(<16 x float> %p)
  ret <16 x float> %r
}
declare <16 x i8> @llvm.x86.avx512.mask.pmovus.db.512(<16 x i32>, <16 x i8>, i16)
declare <16 x i32> @llvm.smax.v16i32(<16 x i32>, <16 x i32>)
define linkonce_odr <16 x i8> @gangway_int8_bytes(<16 x float> %numbers, <16 x i32> %zero) #0 {
  %i = call <16 x i32> @gangway_int8_round(<16 x float> %numbers)
  %z = add <16 x i32> %i, %zero
  %p = call <16 x i32> @llvm.smax.v16i32(<16 x i32> %z, <16 x i32> zeroinitializer)
  %r = call <16 x i8> @llvm.x86.avx512.mask.pmovus.db.512(<16 x i32> %p, <16 x i8> zeroinitializer, i16 -1)
  ret <16 x i8> %r
}
declare <32 x i16> @llvm.x86.avx512.packssdw.512(<16 x i32>, <16 x i32>)
declare <64 x i8> @llvm.x86.avx512.packuswb.512(<32 x i16>, <32 x i16>)
declare <32 x i16> @llvm.sadd.sat.v32i16(<32 x i16>, <32 x i16>)
define linkonce_odr <64 x i8> @gangway_int8_pack(FLOATS %a, FLOATS %b, FLOATS %c, FLOATS %d, <16 x i32> %zeros) #0 {
  %ai = call <16 x i32> @gangway_int8_round(<16 x float> %a)
  %bi = call <16 x i32> @gangway_int8_round(<16 x float> %b)
  %ci = call <16 x i32> @gangway_int8_round(<16 x float> %c)
  %di = call <16 x i32> @gangway_int8_round(<16 x float> %d)
  %l = call <32 x i16> @llvm.x86.avx512.packssdw.512(<16 x i32> %ai, <16 x i32> %bi)
  %h = call <32 x i16> @llvm.x86.avx512.packssdw.512(<16 x i32> %ci, <16 x i32> %di)
  %z = bitcast <16 x i32> %zeros to <32 x i16>
  %ls = call <32 x i16> @llvm.sadd.sat.v32i16(<32 x i16> %l, <32 x i16> %z)
  %hs = call <32 x i16> @llvm.sadd.sat.v32i16(<32 x i16> %h, <32 x i16> %z)
  %p = call <64 x i8> @llvm.x86.avx512.packuswb.512(<32 x i16> %ls, <32 x i16> %hs)
  %w = bitcast <64 x i8> %p to <16 x i32>
  %s = shufflevector <16 x i32> %w, <16 x i32> poison, <16 x i32> <ORDER>
  %r = bitcast <16 x i32> %s to <64 x i8>
  ret <64 x i8> %r
}
attributes #0 = { alwaysinline nounwind memory(none) }
""".replace("ORDER", ", ".join(f"i32 {4 * quarter + vector}" for vector in range(4) for quarter in range(4))).replace(
    "FLOATS", "<16 x float>"
)

_PERMUTATION = """
declare <64 x i8> @llvm.x86.avx512.vpermi2var.qi.512(<64 x i8>, <64 x i8>, <64 x i8>)
define linkonce_odr <64 x i8> @gangway_int8_look_up(BYTES %x, BYTES %a, BYTES %b, BYTES %c, BYTES %d) #0 {
  %l = call <64 x i8> @llvm.x86.avx512.vpermi2var.qi.512(<64 x i8> %a, <64 x i8> %x, <64 x i8> %b)
  %h = call <64 x i8> @llvm.x86.avx512.vpermi2var.qi.512(<64 x i8> %c, <64 x i8> %x, <64 x i8> %d)
  %s = icmp slt <64 x i8> %x, zeroinitializer
  %r = select <64 x i1> %s, <64 x i8> %h, <64 x i8> %l
  ret <64 x i8> %r
}
""".replace("BYTES", "<64 x i8>")


def has_words(target: TargetSpec) -> bool:
    """Whether the target multiplies vectors of bytes."""
    return "avx512_vnni" in target.extensions


def has_permutation(target: TargetSpec) -> bool:
    """Whether the target looks up 64 bytes at once."""
    return "avx512vbmi" in target.extensions


def has_tiles(target: TargetSpec) -> bool:
    """Whether it multiplies tiles of bytes."""
    return {"amx_int8", "amx_tile"} <= set(target.extensions)


def functions(target: TargetSpec) -> str:
    """LLVM's text of what the functions below call."""
    vectors = _VECTORS + LINES + (_PERMUTATION if has_permutation(target) else "")
    return vectors + (PRODUCT.functions if has_tiles(target) else "")


def add_products(total: Expr, a: Expr, b: Expr) -> Expr:
    """The vector of sums, and all four products of each of the unsigned words `a` and the signed words `b`."""
    return tirx.call_extern("int32x16", "gangway_int8_add_products", total, a, b)


def total(words: Expr) -> Expr:
    """The sum of a vector of int32."""
    return tirx.call_extern("int32", "gangway_int8_total", words)


def scaled(numbers: Expr, factors: Expr) -> Expr:
    """The products of 16 float32 numbers, rounded before anything is added to them."""
    return tirx.call_extern("float32x16", "gangway_int8_scaled", numbers, factors)


def bytes_of(numbers: Expr, zero: Expr) -> Expr:
    """The nearest integers, of ties the even one, of 16 float32 numbers below 2^31, plus the zero point, as bytes."""
    return tirx.call_extern("uint8x16", "gangway_int8_bytes", numbers, zero)


def looked_up(numbers: Expr, parts: list[Expr]) -> Expr:
    """The bytes of a table of 256, in four parts of 64, that 64 numbers point at."""
    return tirx.call_extern("uint8x64", "gangway_int8_look_up", numbers, *parts)


def packed(numbers: list[Expr], zeros: Expr) -> Expr:
    """The nearest integers of four vectors of 16 numbers, plus the zero point, as 64 bytes. `zeros`: see `twice`."""
    return tirx.call_extern("uint8x64", "gangway_int8_pack", *numbers, zeros)


def twice(zero: Expr) -> Expr:
    """A vector of words with an integer of 16 bits in each half."""
    return splat(zero * tirx.const(0x00010001, "int32"), WORDS)
