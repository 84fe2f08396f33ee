"""Tiles of AMX: wrappers in LLVM's language. Kinds of numbers differ in the instruction that multiplies.

A tile has 16 rows of 16 words of 32 bits. A product adds sums[pixel][output] += inputs[pixel][word] x
weights[word][output]. Tiles have numbers that are part of an instruction: 0 to 3 are sums, 4 and 5 inputs, 6 and 7
weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as ir

from gangway.compiler.kernels.templates.builder import Buffer, Expr, bind, scratch

WORDS = 16  # of a row, and of a vector
TILE_ROWS = 16
TILE_ELEMENTS = TILE_ROWS * WORDS

# Of where a cache line begins; kernels need it without tiles, too.
LINES = """
define linkonce_odr i32 @gangway_skipped(ptr %memory) #9 {
  %a = ptrtoint ptr %memory to i64
  %n = sub i64 0, %a
  %m = and i64 %n, 63
  %s = lshr i64 %m, 2
  %r = trunc i64 %s to i32
  ret i32 %r
}
attributes #9 = { alwaysinline nounwind memory(none) }
"""

# What `ldtilecfg` reads, in words: palette 1; 64 bytes in a row of each of eight tiles; 16 rows of each.
_CONFIGURATION = [1, 0, 0, 0, *[0x00400040] * 4, 0, 0, 0, 0, *[0x10101010] * 2, 0, 0]
_SETTING = """
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8 immarg)
declare void @llvm.x86.tileloadd64(i8 immarg, ptr, i64)
declare void @llvm.x86.tilestored64(i8 immarg, ptr, i64)
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


def line_scratch(elements: int, dtype: str) -> tuple[Buffer, Expr]:
    """Scratch memory of numbers of 32 bits, and which element begins a cache line: rows of tiles should be lines."""
    buffer = scratch(elements + WORDS, dtype)
    return buffer, bind(tirx.call_extern("int32", "gangway_skipped", ir.address_of(buffer[0])))


def begin_tiles(memory: Buffer) -> None:
    """Set up all tiles as 16 rows of 16 words; `memory` has 64 bytes for the instruction to read."""
    _call("begin", ir.address_of(memory[0]))


def end_tiles() -> None:
    """Release the tiles: then neither a switch of tasks nor other code has to care for them."""
    _call("end")


def zero_tiles(rows: int, columns: int) -> None:
    """Set sums to zero."""
    _call(f"zero_{rows}x{columns}")


def start_tiles(rows: int, numbers: Buffer, places: Sequence[Expr]) -> None:
    """Set every row of sums to the 16 numbers at the place of its column of tiles."""
    _call(f"start_{rows}x{len(places)}", *[ir.address_of(numbers[place]) for place in places])


def load_tiles(sums: Buffer, places: list[list[Expr]]) -> None:
    """Read each tile of sums from its place."""
    _call(f"load_{len(places)}x{len(places[0])}", *_addresses(sums, places))


def store_tiles(sums: Buffer, places: list[list[Expr]]) -> None:
    """Write each tile of sums to its place."""
    _call(f"store_{len(places)}x{len(places[0])}", *_addresses(sums, places))


@dataclass(frozen=True)
class TileProduct:
    """The instruction that multiplies tiles of one kind of numbers. `kind` is part of names of functions."""

    kind: str
    instruction: str

    @property
    def functions(self) -> str:
        """LLVM's text of all that is called here."""
        shapes = list(product((1, 2), (1, 2)))
        parts = [_tile_functions(*shape) + self._add_function(*shape) for shape in shapes]
        return f"{_SETTING}declare void @llvm.x86.{self.instruction}(i8 immarg, i8 immarg, i8 immarg)\n{''.join(parts)}"

    def add(
        self,
        inputs: Buffer,
        input_places: list[Expr],
        input_step: int,
        weights: Buffer,
        weight_places: list[Expr],
        step: int,
    ) -> None:
        """Add products of tiles that begin at these words, whose rows are `input_step` and `step` words apart."""
        places = [ir.address_of(inputs[place]) for place in input_places]
        places += [ir.address_of(weights[place]) for place in weight_places]
        steps = [tirx.const(4 * words, "int32") for words in (input_step, step)]
        _call(f"{self.kind}_add_{len(input_places)}x{len(weight_places)}", *places, *steps)

    def _add_function(self, rows: int, columns: int) -> str:
        places = ", ".join([*(f"ptr %a{i}" for i in range(rows)), *(f"ptr %b{j}" for j in range(columns))])
        lines = [_load(4 + i, f"%a{i}", "%as") for i in range(rows)]
        lines += [_load(6 + j, f"%b{j}", "%bs") for j in range(columns)]
        for i, j in product(range(rows), range(columns)):
            lines.append(f"call void @llvm.x86.{self.instruction}(i8 {2 * i + j}, i8 {4 + i}, i8 {6 + j})")
        steps = ["%as = sext i32 %a_bytes to i64", "%bs = sext i32 %b_bytes to i64"]
        name = f"{self.kind}_add_{rows}x{columns}"
        return _function(name, f"{places}, i32 %a_bytes, i32 %b_bytes", [*steps, *lines])


def _tile_functions(rows: int, columns: int) -> str:
    """Functions for `rows` x `columns` tiles of sums: set to zero or to numbers, load, store."""
    sums, name = list(product(range(rows), range(columns))), f"{rows}x{columns}"
    starts = ", ".join(f"ptr %s{j}" for j in range(columns))
    places = ", ".join(f"ptr %y{2 * i + j}" for i, j in sums)
    zeroed = [f"call void @llvm.x86.tilezero(i8 {2 * i + j})" for i, j in sums]
    started = [_load(2 * i + j, f"%s{j}", "0") for i, j in sums]
    loaded = [_load(2 * i + j, f"%y{2 * i + j}", "64") for i, j in sums]
    stored = [f"call void @llvm.x86.tilestored64(i8 {2 * i + j}, ptr %y{2 * i + j}, i64 64)" for i, j in sums]
    return (
        _function(f"zero_{name}", "", zeroed)
        + _function(f"start_{name}", starts, started)
        + _function(f"load_{name}", places, loaded)
        + _function(f"store_{name}", places, stored)
    )


def _load(tile: int, place: str, step_bytes: str) -> str:
    return f"call void @llvm.x86.tileloadd64(i8 {tile}, ptr {place}, i64 {step_bytes})"


def _function(name: str, parameters: str, lines: Sequence[str]) -> str:
    body = "".join(f"  {line}\n" for line in lines)
    return f"define linkonce_odr i32 @gangway_tiles_{name}({parameters}) #1 {{\n{body}  ret i32 0\n}}\n"


def _call(name: str, *arguments: Any) -> None:
    ir.evaluate(tirx.call_extern("int32", f"gangway_tiles_{name}", *arguments))


def _addresses(sums: Buffer, places: list[list[Expr]]) -> list[Expr]:
    return [ir.address_of(sums[place]) for row in places for place in row]
