"""Instructions for 8-bit numbers: wrappers in LLVM's language.

A *word* is 32 bits, four numbers: of input channels 4i to 4i + 3. `vpdpbusd` multiplies words of unsigned numbers by
words of signed ones and adds the products to an int32. AMX does so with tiles of 16 rows of 16 words. Neither rounds.
"""

from itertools import product

from tvm import tirx
from tvm.script.ir_builder import tirx as ir

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.templates.builder import Buffer, Expr, bind, scratch, splat

WORDS = 16  # of a vector, and of a tile's row
WORD_CHANNELS = 4
TILE_ROWS = 16
TILE_ELEMENTS = TILE_ROWS * WORDS
READ_BEHIND_BYTES = 64 * 64  # of what a tile's last rows read, whatever the stride is


def _twice(word: int) -> str:
    """Two elements of a constant of LLVM."""
    return f"i32 {word}, i32 {word}"


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
define linkonce_odr i32 @gangway_int8_skipped(ptr %memory) #0 {
  %a = ptrtoint ptr %memory to i64
  %n = sub i64 0, %a
  %m = and i64 %n, 63
  %s = lshr i64 %m, 2
  %r = trunc i64 %s to i32
  ret i32 %r
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

_TILES = (
    """
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tileloadd64(i8 immarg, ptr, i64)
declare void @llvm.x86.tilestored64(i8 immarg, ptr, i64)
declare void @llvm.x86.tdpbusd(i8 immarg, i8 immarg, i8 immarg)
define linkonce_odr i32 @gangway_int8_tiles_begin(ptr %memory) #1 {
  store <16 x i32> <i32 1, ZEROS, i32 0, BYTES, BYTES, ZEROS, ZEROS, ROWS, ZEROS>, ptr %memory, align 4
  call void @llvm.x86.ldtilecfg(ptr %memory)
  ret i32 0
}
define linkonce_odr i32 @gangway_int8_tiles_end() #1 {
  call void @llvm.x86.tilerelease()
  ret i32 0
}
attributes #1 = { alwaysinline nounwind }
""".replace("ZEROS", "i32 0, i32 0")
    .replace("BYTES", _twice(0x00400040))
    .replace("ROWS", _twice(0x10101010))
)


def _tile_functions(rows: int, columns: int) -> str:
    """Functions for `rows` x `columns` tiles of sums: set to numbers, add products, store."""
    name, sums = f"{rows}x{columns}", list(product(range(rows), range(columns)))
    begun = "".join(f"  call void @llvm.x86.tileloadd64(i8 {2 * i + j}, ptr %s{j}, i64 0)\n" for i, j in sums)
    starts = ", ".join(f"ptr %s{j}" for j in range(columns))
    inputs = "".join(f"  call void @llvm.x86.tileloadd64(i8 {4 + i}, ptr %a{i}, i64 %as)\n" for i in range(rows))
    weights = "".join(f"  call void @llvm.x86.tileloadd64(i8 {6 + j}, ptr %b{j}, i64 %bs)\n" for j in range(columns))
    products = "".join(f"  call void @llvm.x86.tdpbusd(i8 {2 * i + j}, i8 {4 + i}, i8 {6 + j})\n" for i, j in sums)
    stored = "".join(
        f"  call void @llvm.x86.tilestored64(i8 {2 * i + j}, ptr %y{2 * i + j}, i64 64)\n" for i, j in sums
    )
    places = ", ".join([*(f"ptr %a{i}" for i in range(rows)), *(f"ptr %b{j}" for j in range(columns))])
    results = ", ".join(f"ptr %y{2 * i + j}" for i, j in sums)
    return f"""
define linkonce_odr i32 @gangway_int8_tiles_start_{name}({starts}) #1 {{
{begun}  ret i32 0
}}
define linkonce_odr i32 @gangway_int8_tiles_add_{name}({places}, i32 %a_bytes, i32 %b_bytes) #1 {{
  %as = sext i32 %a_bytes to i64
  %bs = sext i32 %b_bytes to i64
{inputs}{weights}{products}  ret i32 0
}}
define linkonce_odr i32 @gangway_int8_tiles_store_{name}({results}) #1 {{
{stored}  ret i32 0
}}
"""


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
    vectors = _VECTORS + (_PERMUTATION if has_permutation(target) else "")
    if not has_tiles(target):
        return vectors
    return vectors + _TILES + "".join(_tile_functions(*shape) for shape in product((1, 2), (1, 2)))


def add_products(total: Expr, a: Expr, b: Expr) -> Expr:
    """The vector of sums, and all four products of each of the unsigned words `a` and the signed words `b`."""
    return tirx.call_extern("int32x16", "gangway_int8_add_products", total, a, b)


def bytes_of(numbers: Expr, zero: Expr) -> Expr:
    """The nearest integers, of ties the even one, of 16 float32 numbers below 2^31, plus the zero point, as bytes."""
    return tirx.call_extern("uint8x16", "gangway_int8_bytes", numbers, zero)


def looked_up(numbers: Expr, parts: list[Expr]) -> Expr:
    """The bytes of a table of 256, in four parts of 64, that 64 numbers point at."""
    return tirx.call_extern("uint8x64", "gangway_int8_look_up", numbers, *parts)


def sums_scratch(tiles: int) -> tuple[Buffer, Expr]:
    """Scratch memory for so many tiles of sums, and which element begins a cache line: rows of tiles are lines."""
    buffer = scratch(tiles * TILE_ELEMENTS + WORDS, "int32")
    return buffer, bind(tirx.call_extern("int32", "gangway_int8_skipped", ir.address_of(buffer[0])))


def packed(numbers: list[Expr], zeros: Expr) -> Expr:
    """The nearest integers of four vectors of 16 numbers, plus the zero point, as 64 bytes. `zeros`: see `twice`."""
    return tirx.call_extern("uint8x64", "gangway_int8_pack", *numbers, zeros)


def twice(zero: Expr) -> Expr:
    """A vector of words with an integer of 16 bits in each half."""
    return splat(zero * tirx.const(0x00010001, "int32"), WORDS)


def _call(name: str, *arguments: Expr) -> None:
    ir.evaluate(tirx.call_extern("int32", f"gangway_int8_tiles_{name}", *arguments))


def begin_tiles(memory: Buffer) -> None:
    """Set up all tiles as 16 rows of 16 words; `memory` has 64 bytes for the instruction to read."""
    _call("begin", ir.address_of(memory[0]))


def end_tiles() -> None:
    """Release the tiles."""
    _call("end")


def start_tiles(rows: int, numbers: Buffer, places: list[Expr]) -> None:
    """Set every row of sums to the 16 numbers at the place of its column of tiles."""
    _call(f"start_{rows}x{len(places)}", *[ir.address_of(numbers[place]) for place in places])


def add_tiles(
    inputs: Buffer, input_places: list[Expr], input_step: int, weights: Buffer, weight_places: list[Expr], step: int
) -> None:
    """Add products of tiles that begin at these words, whose rows are `input_step` and `step` words apart."""
    places = [ir.address_of(inputs[place]) for place in input_places]
    places += [ir.address_of(weights[place]) for place in weight_places]
    steps = [tirx.const(4 * words, "int32") for words in (input_step, step)]
    _call(f"add_{len(input_places)}x{len(weight_places)}", *places, *steps)


def store_tiles(sums: Buffer, places: list[list[Expr]]) -> None:
    """Write each tile of sums to its place."""
    _call(f"store_{len(places)}x{len(places[0])}", *[ir.address_of(sums[place]) for row in places for place in row])
