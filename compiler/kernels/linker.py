"""Object files of LLVM to one shared library, without the system's linker, which slim images lack.

The objects are x86-64 ELF and position-independent, so few kinds of relocation occur; another one is a LinkError. Calls
between kernels are bound here, calls of the C library when the library is loaded. Debugging sections are left out.

Formats: System V ABI (ELF-64 object files, dynamic linking) and its AMD64 supplement (table 4.9, relocations).
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gangway.artifact.format import align_up

_EHDR: Final = struct.Struct("<16sHHIQQQIHHHHHH")
_PHDR: Final = struct.Struct("<IIQQQQQQ")
_SHDR: Final = struct.Struct("<IIQQQQIIQQ")
_SYM: Final = struct.Struct("<IBBHQQ")
_RELA: Final = struct.Struct("<QQq")
_DYN: Final = struct.Struct("<qQ")
_INT32: Final = struct.Struct("<i")
_SLOT: Final = struct.Struct("<Q")

_IDENT: Final = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")  # 64 bits, little endian
_ET_REL, _ET_DYN, _EM_X86_64 = 1, 3, 62
_PROGBITS, _SYMTAB, _STRTAB, _RELA_TYPE, _HASH, _DYNAMIC, _NOBITS, _DYNSYM = 1, 2, 3, 4, 5, 6, 8, 11
_WRITE, _ALLOC, _EXECUTE, _THREAD_LOCAL = 1, 2, 4, 0x400
_PT_LOAD, _PT_DYNAMIC, _PT_GNU_STACK = 1, 2, 0x6474E551
_LOCAL, _GLOBAL, _WEAK = 0, 1, 2
_ABSOLUTE, _RESERVED = 0xFFF1, 0xFF00  # numbers of sections
_R_NONE, _R_64, _R_PC32, _R_PLT32, _R_GLOB_DAT, _R_RELATIVE = 0, 1, 2, 4, 6, 8
_R_GOT = frozenset((9, 41, 42))  # GOTPCREL, GOTPCRELX, REX_GOTPCRELX
_DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_RELA, _DT_RELASZ, _DT_RELAENT, _DT_STRSZ, _DT_SYMENT = 4, 5, 6, 7, 8, 9, 10, 11
_DT_NEEDED, _DT_SONAME, _DT_RUNPATH = 1, 14, 29

_PAGE_BYTES: Final = 0x1000
_STUB: Final = b"\xff\x25"  # jmp *offset(%rip)
_STUB_BYTES: Final = 8


class LinkError(RuntimeError):
    """Object files cannot be linked; the message has the file and the reason."""


@dataclass(eq=False)  # each is itself: several have the same name and content
class _Section:
    name: str
    flags: int
    alignment: int
    content: bytes | int  # an int: so many zeros
    address: int = 0

    @property
    def size(self) -> int:
        return self.content if isinstance(self.content, int) else len(self.content)


@dataclass(frozen=True)
class _Symbol:
    name: str
    binding: int
    kind: int
    section: _Section | None  # None: defined elsewhere
    value: int
    size: int


@dataclass(frozen=True)
class _Relocation:
    section: _Section
    offset: int
    kind: int
    symbol: _Symbol
    addend: int


@dataclass
class _Object:
    path: Path
    sections: list[_Section] = field(default_factory=list)
    symbols: list[_Symbol] = field(default_factory=list)
    relocations: list[_Relocation] = field(default_factory=list)


def link(objects: Sequence[Path], library: Path, name: str = "", needed: Sequence[str] = ()) -> None:
    """Link object files into a shared library of a name, which needs others, by their names, in its folder.

    Raises LinkError, and OSError if the library cannot be written.
    """
    library.write_bytes(_Link([_read(path) for path in objects], name, needed).image())


def undefined(path: Path) -> set[str]:
    """Return the symbols that an object file wants from outside. Raises LinkError."""
    return {symbol.name for symbol in _read(path).symbols if symbol.section is None and symbol.binding != _LOCAL}


def _read(path: Path) -> _Object:
    try:
        return _parse(path, path.read_bytes())
    except OSError as error:
        raise LinkError(f"{path}: {error.strerror}") from error
    except (struct.error, IndexError, ValueError) as error:
        raise LinkError(f"{path}: it is no whole object file ({error})") from error


def _parse(path: Path, data: bytes) -> _Object:
    ident, kind, machine, *_ = header = _EHDR.unpack_from(data)
    if ident[:7] != _IDENT[:7] or (kind, machine) != (_ET_REL, _EM_X86_64):
        raise LinkError(f"{path}: it is no object file for x86-64")
    section_offset, count, names_index = header[6], header[12], header[13]
    headers = [_SHDR.unpack_from(data, section_offset + index * _SHDR.size) for index in range(count)]

    def content(index: int) -> bytes:
        offset, size = headers[index][4:6]
        if offset + size > len(data):
            raise ValueError(f"section {index} ends behind the file")
        return data[offset : offset + size]

    made = _Object(path)
    names, sections = content(names_index), {}
    for index, (name, section_kind, flags, _, _, size, _, _, alignment, _) in enumerate(headers):
        # Notes and tables for unwinding are of other types or names: kernels throw nothing.
        if flags & _ALLOC and section_kind in (_PROGBITS, _NOBITS) and _text(names, name) != ".eh_frame":
            if flags & _THREAD_LOCAL:
                raise LinkError(f"{path}: {_text(names, name)} is for each thread, which is not linked")
            body = size if section_kind == _NOBITS else content(index)
            sections[index] = _Section(_text(names, name), flags, max(alignment, 1), body)
    made.sections = list(sections.values())
    table = next((index for index, entry in enumerate(headers) if entry[1] == _SYMTAB), None)
    if table is None:
        return made
    strings = content(headers[table][6])
    for name, info, _, place, value, size in _SYM.iter_unpack(content(table)):
        if place >= _RESERVED and place != _ABSOLUTE:
            raise LinkError(f"{path}: {_text(strings, name)} is a common symbol, which is not linked")
        made.symbols.append(_Symbol(_text(strings, name), info >> 4, info & 15, sections.get(place), value, size))
    for index, (_, section_kind, _, _, _, _, _, target, _, _) in enumerate(headers):
        if section_kind == _RELA_TYPE and target in sections:
            for offset, info, addend in _RELA.iter_unpack(content(index)):
                symbol = made.symbols[info >> 32]
                made.relocations.append(_Relocation(sections[target], offset, info & 0xFFFFFFFF, symbol, addend))
    return made


def _text(strings: bytes, offset: int) -> str:
    return strings[offset : strings.index(0, offset)].decode()


class _Link:
    """Three segments: tables and constants; code, then a stub for each function from outside; what is written."""

    def __init__(self, objects: Sequence[_Object], name: str, needed: Sequence[str]) -> None:
        self._objects = objects
        self._named = [*((_DT_NEEDED, each) for each in needed), *([(_DT_SONAME, name)] if name else [])]
        if needed:
            self._named.append((_DT_RUNPATH, "$ORIGIN"))
        self._defined: dict[str, _Symbol] = {}
        for made in objects:
            for symbol in made.symbols:
                if symbol.binding != _LOCAL and symbol.section is not None:
                    self._define(made.path, symbol)
        relocations = [relocation for made in objects for relocation in made.relocations]
        wanted = {r.symbol.name for r in relocations if self._place(r.symbol) is None and r.kind != _R_NONE}
        self._outside = sorted(wanted)
        self._stubs = {name: number for number, name in enumerate(self._outside)}
        inside = {self._place(r.symbol): None for r in relocations if r.kind in _R_GOT}
        self._slots: list[str | tuple[_Section, int]] = [*self._outside, *(place for place in inside if place)]
        self._stub_address = self._slot_address = 0

    def _define(self, path: Path, symbol: _Symbol) -> None:
        known = self._defined.get(symbol.name)
        if known is None or (known.binding, symbol.binding) == (_WEAK, _GLOBAL):
            self._defined[symbol.name] = symbol
        elif (known.binding, symbol.binding) == (_GLOBAL, _GLOBAL):
            raise LinkError(f"{path}: {symbol.name} is defined a second time")

    def _place(self, symbol: _Symbol) -> tuple[_Section, int] | None:
        """Section and offset of a symbol; None if it is defined outside."""
        if symbol.binding != _LOCAL:
            symbol = self._defined.get(symbol.name, symbol)
        return None if symbol.section is None else (symbol.section, symbol.value)

    def image(self) -> bytes:
        """Return the bytes of the library."""
        everything = [section for made in self._objects for section in made.sections]
        constants = [section for section in everything if not section.flags & (_WRITE | _EXECUTE)]
        code = [section for section in everything if section.flags & _EXECUTE]
        written = [section for section in everything if section.flags & _WRITE and not section.flags & _EXECUTE]

        exported = list(self._defined)
        strings, name_offsets = _string_table([*self._outside, *exported, *(text for _, text in self._named)])
        symbol_count = 1 + len(self._outside) + len(exported)
        relative = sum(relocation.kind == _R_64 for made in self._objects for relocation in made.relocations)
        rela_count = len(self._slots) + relative

        tables = [
            _Section(".hash", _ALLOC, 8, 4 * (2 + symbol_count + symbol_count)),
            _Section(".dynsym", _ALLOC, 8, _SYM.size * symbol_count),
            _Section(".dynstr", _ALLOC, 1, strings),
            _Section(".rela.dyn", _ALLOC, 8, _RELA.size * rela_count),
        ]
        stubs = _Section(".plt", _ALLOC | _EXECUTE, 16, _STUB_BYTES * len(self._outside))
        dynamic = _Section(".dynamic", _ALLOC | _WRITE, 8, _DYN.size * (9 + len(self._named)))
        slots = _Section(".got", _ALLOC | _WRITE, 8, _SLOT.size * len(self._slots))
        groups = [[*tables, *constants], [*code, stubs], [dynamic, slots, *written]]

        at = _EHDR.size + 5 * _PHDR.size
        bounds = []
        for group in groups:
            begin = at
            for section in group:
                section.address = at = align_up(at, section.alignment)
                at += section.size
            bounds.append((begin, at))
            at = align_up(at, _PAGE_BYTES)
        self._stub_address, self._slot_address = stubs.address, slots.address

        image = bytearray(bounds[-1][1])  # addresses are offsets in the file
        for section in everything:
            if isinstance(section.content, bytes):
                image[section.address : section.address + section.size] = section.content
        moved = list(self._relocate(image))
        symbols = [_SYM.pack(0, 0, 0, 0, 0, 0)]
        symbols += [_SYM.pack(name_offsets[name], _GLOBAL << 4, 0, 0, 0, 0) for name in self._outside]
        kept = [*tables, *constants, *code, stubs, dynamic, slots, *written]
        numbers = {section: number for number, section in enumerate(kept, 1)}
        for name in exported:
            symbol = self._defined[name]
            assert symbol.section is not None
            info, address = symbol.binding << 4 | symbol.kind, symbol.section.address + symbol.value
            symbols.append(_SYM.pack(name_offsets[name], info, 0, numbers[symbol.section], address, symbol.size))

        hashes, dynsym, dynstr, rela = tables
        entries = [
            *((tag, name_offsets[text]) for tag, text in self._named),
            (_DT_HASH, hashes.address),
            (_DT_STRTAB, dynstr.address),
            (_DT_SYMTAB, dynsym.address),
            (_DT_STRSZ, dynstr.size),
            (_DT_SYMENT, _SYM.size),
            (_DT_RELA, rela.address),
            (_DT_RELASZ, rela.size),
            (_DT_RELAENT, _RELA.size),
            (0, 0),
        ]
        parts = [
            (hashes, _hash_table([*self._outside, *exported])),
            (dynsym, b"".join(symbols)),
            (dynstr, strings),
            (rela, b"".join([*self._slot_relocations(image), *moved])),
            (stubs, self._stub_code()),
            (dynamic, b"".join(_DYN.pack(*entry) for entry in entries)),
        ]
        for section, body in parts:
            assert len(body) == section.size, section.name
            image[section.address : section.address + section.size] = body

        segments = [(_PT_LOAD, flags, *bound, _PAGE_BYTES) for flags, bound in zip((4, 5, 6), bounds, strict=True)]
        segments[0] = (_PT_LOAD, 4, 0, bounds[0][1], _PAGE_BYTES)
        segments.append((_PT_DYNAMIC, 6, dynamic.address, dynamic.address + dynamic.size, 8))
        segments.append((_PT_GNU_STACK, 6, 0, 0, 16))  # the stack is not executed
        for number, (kind, flags, begin, end, alignment) in enumerate(segments):
            size = end - begin
            at = _EHDR.size + number * _PHDR.size
            _PHDR.pack_into(image, at, kind, flags, begin, begin, begin, size, size, alignment)

        types = {".hash": (_HASH, 2, 4), ".dynsym": (_DYNSYM, 3, _SYM.size), ".dynstr": (_STRTAB, 0, 0)}
        types |= {".rela.dyn": (_RELA_TYPE, 2, _RELA.size), ".dynamic": (_DYNAMIC, 3, _DYN.size)}
        return _with_sections(image, kept, types)

    def _relocate(self, image: bytearray) -> Iterator[bytes]:
        """Write all relocations of the objects; yield those that are left to the loader."""
        slot_numbers = {slot: number for number, slot in enumerate(self._slots)}
        for made in self._objects:
            for relocation in made.relocations:
                at = relocation.section.address + relocation.offset
                place = self._place(relocation.symbol)
                target = None if place is None else place[0].address + place[1]
                kind = relocation.kind
                if kind in _R_GOT:
                    slot = slot_numbers[relocation.symbol.name if place is None else place]
                    value = self._slot_address + slot * _SLOT.size
                elif kind == _R_PLT32 or (kind == _R_PC32 and target is not None):
                    stub = self._stubs.get(relocation.symbol.name, 0)
                    value = self._stub_address + stub * _STUB_BYTES if target is None else target
                elif kind == _R_64 and target is not None and relocation.section.flags & _WRITE:
                    yield _RELA.pack(at, _R_RELATIVE, target + relocation.addend)
                    continue
                elif kind == _R_NONE:
                    continue
                else:
                    name = relocation.symbol.name or relocation.section.name
                    raise LinkError(f"{made.path}: relocation of type {kind} against {name} is not linked")
                try:
                    _INT32.pack_into(image, at, value + relocation.addend - at)
                except struct.error:
                    raise LinkError(f"{made.path}: the library has more than 2 GiB") from None

    def _slot_relocations(self, image: bytearray) -> Iterator[bytes]:
        for number, slot in enumerate(self._slots):
            at = self._slot_address + number * _SLOT.size
            if isinstance(slot, str):
                yield _RELA.pack(at, (1 + self._stubs[slot]) << 32 | _R_GLOB_DAT, 0)
            else:
                _SLOT.pack_into(image, at, slot[0].address + slot[1])
                yield _RELA.pack(at, _R_RELATIVE, slot[0].address + slot[1])

    def _stub_code(self) -> bytes:
        code = b""
        for number in range(len(self._outside)):
            behind = self._stub_address + number * _STUB_BYTES + len(_STUB) + _INT32.size
            code += _STUB + _INT32.pack(self._slot_address + number * _SLOT.size - behind)
            code = code.ljust((number + 1) * _STUB_BYTES, b"\xcc")
        return code


def _string_table(names: Iterable[str]) -> tuple[bytes, dict[str, int]]:
    table, offsets = bytearray(1), {}
    for name in names:
        offsets[name] = len(table)
        table += name.encode() + b"\0"
    return bytes(table), offsets


def _hash_table(names: Sequence[str]) -> bytes:
    """The table by which a loader finds symbols (System V ABI, figure 5-13); symbol 0 has no name."""
    count = len(names) + 1
    buckets, chains = [0] * count, [0] * count
    for number, name in enumerate(names, 1):
        value = 0
        for character in name.encode():
            value = (value << 4) + character
            high = value & 0xF0000000
            value = (value ^ high >> 24) & ~high
        chains[number], buckets[value % count] = buckets[value % count], number
    return struct.pack(f"<{2 + 2 * count}I", count, count, *buckets, *chains)


def _with_sections(image: bytearray, sections: Sequence[_Section], types: dict[str, tuple[int, int, int]]) -> bytes:
    """Complete the image with a table of sections, which loaders do not need but debuggers and profilers."""
    names, offsets = _string_table(dict.fromkeys([*(section.name for section in sections), ".shstrtab"]))
    headers = [_SHDR.pack(0, 0, 0, 0, 0, 0, 0, 0, 0, 0)]
    for section in sections:
        kind, other, entry = types.get(section.name, (_PROGBITS, 0, 0))
        info = 1 if kind == _DYNSYM else 0  # index of the first symbol that is not local
        headers.append(
            _SHDR.pack(offsets[section.name], kind, section.flags & 7, section.address, section.address, section.size,
                other, info, section.alignment, entry)
        )  # fmt: skip
    names_at = len(image)
    headers.append(_SHDR.pack(offsets[".shstrtab"], _STRTAB, 0, 0, names_at, len(names), 0, 0, 1, 0))
    image += names
    image += bytes(-len(image) % 8)
    _EHDR.pack_into(
        image, 0, _IDENT, _ET_DYN, _EM_X86_64, 1, 0, _EHDR.size, len(image), 0, _EHDR.size, _PHDR.size, 5,
        _SHDR.size, len(headers), len(headers) - 1,
    )  # fmt: skip
    return bytes(image + b"".join(headers))
