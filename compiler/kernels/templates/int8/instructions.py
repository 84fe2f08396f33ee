"""Instructions for 8-bit numbers: wrappers in LLVM's language.

A *word* is 32 bits, four numbers: of input channels 4i to 4i + 3. `vpdpbusd` (VNNI) multiplies words of unsigned
numbers by words of signed ones and adds the products to an int32. AMX does so with tiles (`amx/tiles.py`). Neither
rounds.

Without VNNI, `vpmaddubsw` adds products by twos in 16 bits, `vpmaddwd` these in 32. The first one saturates, unless
weights are *narrow*: no two beside each other, times 255, leave 16 bits. Other weights need *pairs*: words of two
numbers of 16 bits, which `vpmaddwd` multiplies.
"""

from tvm import tirx

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.templates.amx.tiles import LINES, TileProduct
from gangway.compiler.kernels.templates.builder import Buffer, Expr, lanes_at, splat, store

WORD_CHANNELS, PAIR_CHANNELS = 4, 2
PRODUCT = TileProduct("int8", "tdpbusd")
READ_BEHIND_BYTES = 64 * 64  # of what a tile's last rows read, whatever the stride is
MOST_BESIDE = 128  # the sum of two narrow weights of one sign: 255 times more is beyond 16 bits

# INTS and FLOATS are vectors of 32 bits, SHORTS and BYTES the same bits by 16 and 8; HALF and QUARTER are less bytes.
_VECTORS = """
declare i32 @llvm.vector.reduce.add.vLANESi32(INTS)
define linkonce_odr i32 @gangway_int8_total(INTS %x) #0 {
  %r = call i32 @llvm.vector.reduce.add.vLANESi32(INTS %x)
  ret i32 %r
}
declare FLOATS @llvm.arithmetic.fence.vLANESf32(FLOATS)
define linkonce_odr FLOATS @gangway_int8_scaled(FLOATS %x, FLOATS %y) #0 {
  %p = fmul FLOATS %x, %y
  %r = call FLOATS @llvm.arithmetic.fence.vLANESf32(FLOATS %p)
  ret FLOATS %r
}
declare INTS @llvm.smax.vLANESi32(INTS, INTS)
declare INTS @llvm.smin.vLANESi32(INTS, INTS)
define linkonce_odr QUARTER @gangway_int8_bytes(FLOATS %numbers, INTS %zero) #0 {
  %i = call INTS @gangway_int8_round(FLOATS %numbers)
  %z = add INTS %i, %zero
  %p = call INTS @llvm.smax.vLANESi32(INTS %z, INTS zeroinitializer)
  %c = call INTS @llvm.smin.vLANESi32(INTS %p, INTS splat (i32 255))
  %r = trunc INTS %c to QUARTER
  ret QUARTER %r
}
attributes #0 = { alwaysinline nounwind memory(none) }
"""

_VNNI = """
declare INTS @llvm.x86.avx512.vpdpbusd.512(INTS, BYTES, BYTES)
define linkonce_odr INTS @gangway_int8_add_words(INTS %sum, INTS %a, INTS %b) #0 {
  %x = bitcast INTS %a to BYTES
  %y = bitcast INTS %b to BYTES
  %r = call INTS @llvm.x86.avx512.vpdpbusd.512(INTS %sum, BYTES %x, BYTES %y)
  ret INTS %r
}
"""

# Sums are added by an instruction that LLVM does not know: it would add products to each other first, for which there
# are too few registers.
_PAIRS = """
declare SHORTS @llvm.x86.BY_TWOS(BYTES, BYTES)
declare INTS @llvm.x86.BY_PAIRS(SHORTS, SHORTS)
define linkonce_odr INTS @gangway_int8_add_words(INTS %sum, INTS %a, INTS %b) #0 {
  %x = bitcast INTS %a to BYTES
  %y = bitcast INTS %b to BYTES
  %p = call SHORTS @llvm.x86.BY_TWOS(BYTES %x, BYTES %y)
  %q = call INTS @llvm.x86.BY_PAIRS(SHORTS %p, SHORTS splat (i16 1))
  %r = call INTS asm "vpaddd $1, $0, $0", "=CLASS,CLASS,0"(INTS %q, INTS %sum) #1
  ret INTS %r
}
define linkonce_odr INTS @gangway_int8_add_pairs(INTS %sum, INTS %a, INTS %b) #0 {
  %x = bitcast INTS %a to SHORTS
  %y = bitcast INTS %b to SHORTS
  %q = call INTS @llvm.x86.BY_PAIRS(SHORTS %x, SHORTS %y)
  %r = call INTS asm "vpaddd $1, $0, $0", "=CLASS,CLASS,0"(INTS %q, INTS %sum) #1
  ret INTS %r
}
define linkonce_odr INTS @gangway_int8_unsigned_pairs(FEWER_INTS %words) #0 {
  %b = bitcast FEWER_INTS %words to HALF
  %w = zext HALF %b to SHORTS
  %r = bitcast SHORTS %w to INTS
  ret INTS %r
}
define linkonce_odr INTS @gangway_int8_signed_pairs(HALF %bytes) #0 {
  %w = sext HALF %bytes to SHORTS
  %r = bitcast SHORTS %w to INTS
  ret INTS %r
}
attributes #1 = { nounwind memory(none) }
"""

_OF_512_BITS = """
declare INTS @llvm.x86.avx512.mask.cvtps2dq.512(FLOATS, INTS, i16, i32)
define linkonce_odr INTS @gangway_int8_round(FLOATS %x) #0 {
  %r = call INTS @llvm.x86.avx512.mask.cvtps2dq.512(FLOATS %x, INTS zeroinitializer, i16 -1, i32 4)
  ret INTS %r
}
declare SHORTS @llvm.x86.avx512.packssdw.512(INTS, INTS)
declare BYTES @llvm.x86.avx512.packuswb.512(SHORTS, SHORTS)
declare SHORTS @llvm.sadd.sat.v32i16(SHORTS, SHORTS)
define linkonce_odr BYTES @gangway_int8_pack(FLOATS %a, FLOATS %b, FLOATS %c, FLOATS %d, INTS %zeros) #0 {
  %ai = call INTS @gangway_int8_round(FLOATS %a)
  %bi = call INTS @gangway_int8_round(FLOATS %b)
  %ci = call INTS @gangway_int8_round(FLOATS %c)
  %di = call INTS @gangway_int8_round(FLOATS %d)
  %l = call SHORTS @llvm.x86.avx512.packssdw.512(INTS %ai, INTS %bi)
  %h = call SHORTS @llvm.x86.avx512.packssdw.512(INTS %ci, INTS %di)
  %z = bitcast INTS %zeros to SHORTS
  %ls = call SHORTS @llvm.sadd.sat.v32i16(SHORTS %l, SHORTS %z)
  %hs = call SHORTS @llvm.sadd.sat.v32i16(SHORTS %h, SHORTS %z)
  %p = call BYTES @llvm.x86.avx512.packuswb.512(SHORTS %ls, SHORTS %hs)
  %w = bitcast BYTES %p to INTS
  %s = shufflevector INTS %w, INTS poison, INTS <ORDER>
  %r = bitcast INTS %s to BYTES
  ret BYTES %r
}
""".replace("ORDER", ", ".join(f"i32 {4 * quarter + vector}" for vector in range(4) for quarter in range(4)))

_OF_256_BITS = """
declare INTS @llvm.x86.avx.cvt.ps2dq.256(FLOATS)
define linkonce_odr INTS @gangway_int8_round(FLOATS %x) #0 {
  %r = call INTS @llvm.x86.avx.cvt.ps2dq.256(FLOATS %x)
  ret INTS %r
}
declare SHORTS @llvm.x86.avx2.packssdw(INTS, INTS)
declare HALF @llvm.x86.sse2.packuswb.128(<8 x i16>, <8 x i16>)
declare SHORTS @llvm.sadd.sat.v16i16(SHORTS, SHORTS)
define linkonce_odr HALF @gangway_int8_pack(FLOATS %a, FLOATS %b, INTS %zeros) #0 {
  %ai = call INTS @gangway_int8_round(FLOATS %a)
  %bi = call INTS @gangway_int8_round(FLOATS %b)
  %p = call SHORTS @llvm.x86.avx2.packssdw(INTS %ai, INTS %bi)
  %z = bitcast INTS %zeros to SHORTS
  %s = call SHORTS @llvm.sadd.sat.v16i16(SHORTS %p, SHORTS %z)
  %l = shufflevector SHORTS %s, SHORTS poison, INTS <LOW>
  %h = shufflevector SHORTS %s, SHORTS poison, INTS <HIGH>
  %n = call HALF @llvm.x86.sse2.packuswb.128(<8 x i16> %l, <8 x i16> %h)
  %w = bitcast HALF %n to <4 x i32>
  %o = shufflevector <4 x i32> %w, <4 x i32> poison, <4 x i32> <i32 0, i32 2, i32 1, i32 3>
  %r = bitcast <4 x i32> %o to HALF
  ret HALF %r
}
""".replace("LOW", ", ".join(f"i32 {i}" for i in range(8))).replace("HIGH", ", ".join(f"i32 {i + 8}" for i in range(8)))

_PERMUTATION = """
declare BYTES @llvm.x86.avx512.vpermi2var.qi.512(BYTES, BYTES, BYTES)
define linkonce_odr BYTES @gangway_int8_look_up(BYTES %x, BYTES %a, BYTES %b, BYTES %c, BYTES %d) #0 {
  %l = call BYTES @llvm.x86.avx512.vpermi2var.qi.512(BYTES %a, BYTES %x, BYTES %b)
  %h = call BYTES @llvm.x86.avx512.vpermi2var.qi.512(BYTES %c, BYTES %x, BYTES %d)
  %s = icmp slt BYTES %x, zeroinitializer
  %r = select <64 x i1> %s, BYTES %h, BYTES %l
  ret BYTES %r
}
"""

_BY_LANES = {16: _OF_512_BITS, 8: _OF_256_BITS}
_PACKED_VECTORS = {16: 4, 8: 2}  # of what `gangway_int8_pack` makes bytes of
_CLASSES = {16: "v", 8: "x"}  # of registers
_BY_TWOS = {16: "avx512.pmaddubs.w.512", 8: "avx2.pmadd.ub.sw"}
_BY_PAIRS = {16: "avx512.pmaddw.d.512", 8: "avx2.pmadd.wd"}


def multiplies(target: TargetSpec) -> bool:
    """Whether the target multiplies vectors of integers."""
    return "avx2" in target.features


def has_words(target: TargetSpec) -> bool:
    """Whether the target multiplies words, whatever numbers they have."""
    return "avx512_vnni" in target.extensions


def has_permutation(target: TargetSpec) -> bool:
    """Whether the target looks up 64 bytes at once."""
    return "avx512vbmi" in target.extensions


def has_tiles(target: TargetSpec) -> bool:
    """Whether it multiplies tiles of bytes."""
    return {"amx_int8", "amx_tile"} <= set(target.extensions)


def name_of(target: TargetSpec) -> str:
    """Return what multiplies integers, for people."""
    if has_tiles(target):
        return "AMX"
    if has_words(target):
        return "VNNI"
    return "AVX-512 without VNNI" if target.name == "avx512" else "AVX2"


def functions(target: TargetSpec) -> str:
    """LLVM's text of what the functions below call."""
    lanes = target.lanes
    text = _BY_LANES[lanes] + _VECTORS + (_VNNI if has_words(target) else _PAIRS)
    text += _PERMUTATION if has_permutation(target) else ""
    names = {
        "CLASS": _CLASSES[lanes],
        "BY_TWOS": _BY_TWOS[lanes],
        "BY_PAIRS": _BY_PAIRS[lanes],
        "FEWER_INTS": f"<{lanes // 2} x i32>",
        "INTS": f"<{lanes} x i32>",
        "FLOATS": f"<{lanes} x float>",
        "SHORTS": f"<{2 * lanes} x i16>",
        "BYTES": f"<{4 * lanes} x i8>",
        "HALF": f"<{2 * lanes} x i8>",
        "QUARTER": f"<{lanes} x i8>",
        "LANES": str(lanes),
    }
    for name, meaning in names.items():
        text = text.replace(name, meaning)
    return text + LINES + (PRODUCT.functions if has_tiles(target) else "")


def add_words(total: Expr, a: Expr, b: Expr, lanes: int) -> Expr:
    """The vector of sums, and all four products of each of the unsigned words `a` and the signed words `b`.

    Without VNNI the words `b` must be narrow.
    """
    return tirx.call_extern(f"int32x{lanes}", "gangway_int8_add_words", total, a, b)


def add_pairs(total: Expr, a: Expr, b: Expr, lanes: int) -> Expr:
    """The vector of sums, and both products of each of the pairs `a` and `b`."""
    return tirx.call_extern(f"int32x{lanes}", "gangway_int8_add_pairs", total, a, b)


def unsigned_pairs(words: Expr, lanes: int) -> Expr:
    """The pairs of half as many words of unsigned numbers."""
    return tirx.call_extern(f"int32x{lanes}", "gangway_int8_unsigned_pairs", words)


def signed_pairs(numbers: Expr, lanes: int) -> Expr:
    """The pairs of twice as many bytes of signed numbers."""
    return tirx.call_extern(f"int32x{lanes}", "gangway_int8_signed_pairs", numbers)


def total(words: Expr) -> Expr:
    """The sum of a vector of int32."""
    return tirx.call_extern("int32", "gangway_int8_total", words)


def scaled(numbers: Expr, factors: Expr, lanes: int) -> Expr:
    """The products of float32 numbers, rounded before anything is added to them."""
    return tirx.call_extern(f"float32x{lanes}", "gangway_int8_scaled", numbers, factors)


def floats_of(numbers: Buffer, at: Expr, lanes: int) -> Expr:
    """Numbers of 8 or 16 bits in memory, as float32."""
    return tirx.Cast(f"float32x{lanes}", tirx.Cast(f"int32x{lanes}", numbers[lanes_at(at, lanes)]))


def bytes_of(numbers: Expr, zero: Expr, lanes: int) -> Expr:
    """The nearest integers, of ties the even one, of float32 numbers below 2^31, plus the zero point, as bytes."""
    return tirx.call_extern(f"uint8x{lanes}", "gangway_int8_bytes", numbers, zero)


def looked_up(numbers: Expr, parts: list[Expr]) -> Expr:
    """The bytes of a table of 256, in four parts of 64, that 64 numbers point at."""
    return tirx.call_extern("uint8x64", "gangway_int8_look_up", numbers, *parts)


def store_packed(y: Buffer, place: Expr, numbers: list[Expr], zeros: Expr, lanes: int) -> None:
    """Write the nearest integers of vectors of numbers, plus the zero point, as bytes. `zeros`: see `twice`.

    Behind the last vector, up to 64 bytes from `place` on become numbers of it.
    """
    count = _PACKED_VECTORS[lanes]
    for first in range(0, len(numbers), count):
        part = numbers[first : first + count]
        part += [part[-1]] * (count - len(part))
        packed = tirx.call_extern(f"uint8x{count * lanes}", "gangway_int8_pack", *part, zeros)
        store(y, place + first * lanes, packed, count * lanes)


def twice(zero: Expr, lanes: int) -> Expr:
    """A vector of words with an integer of 16 bits in each half."""
    return splat(zero * tirx.const(0x00010001, "int32"), lanes)
