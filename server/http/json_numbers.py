"""Large arrays of numbers in JSON: found without making an object of anything, counted, and read a slice at a time.

A parser holds Python's lock from the first byte to the last, and makes 30 bytes of objects of two bytes of text. So
what is large is looked over by numpy, which lets other threads run; the arrays are taken out, and read when the rest of
the request has been found right.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from gangway.server.large_contents import PAUSE_S

Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"
Read = Callable[[bytes], bytes]  # of a JSON array of numbers without arrays in it: the raw elements

LARGE_BYTES: Final = 64 * 1024  # smaller texts are parsed as they are: that takes a millisecond or two
MIN_ARRAY_BYTES: Final = 4096  # smaller arrays stay where they are
SLICE_BYTES: Final = 16 * 1024  # are read without a pause: some tenths of a millisecond
_LOOK_BYTES: Final = 64 * 1024  # are looked over without a pause
_BEFORE_BYTES: Final = 64  # from the quote behind a name to the bracket of its array, at most
_BEGIN: Final = re.compile(rb"\s*:\s*\[")
_QUOTE, _BACKSLASH, _COMMA, _OPEN, _CLOSE, _BRACE = b'"\\,[]{'
_SPACES: Final = bytes.maketrans(b"[]", b"  ")

# What a character is in an array of numbers, and which neighbours are wrong there, blanks left out.
_BLANK, _OPENS, _CLOSES, _SEPARATES, _OTHER = range(5)
_KINDS: Final = np.full(256, _OTHER, np.uint8)
_KINDS[list(b" \t\r\n")] = _BLANK
_KINDS[[_OPEN, _CLOSE, _COMMA]] = _OPENS, _CLOSES, _SEPARATES
_WRONG: Final = np.zeros((5, 5), bool)
for _pair in ("[]", "[,", ",]", ",,", "][", "]1", "1["):
    _WRONG[tuple(_KINDS[list(_pair.encode())])] = True

_turn = threading.Lock()  # one array is read at a time: no two could at once, and others get Python's lock sooner


class NumbersError(ValueError):
    """The text is no array of numbers, or its arrays are not nested evenly."""


@dataclass(frozen=True, eq=False)
class Numbers:
    """An array that has not been read: `text` between the brackets at `begin` and before `end`; its commas and one."""

    text: bytes
    begin: int
    end: int
    count: int

    @classmethod
    def at(cls, text: bytes, begin: int, end: int) -> "Numbers":
        """Return the array that is there, its elements counted."""
        looks = _parts(np.frombuffer(text, np.uint8), begin, end)
        return cls(text, begin, end, 1 + sum(int(np.count_nonzero(part == _COMMA)) for part in looks))

    def read(self, element_bytes: int, read: Read) -> bytearray:
        """Return the raw elements. Raises NumbersError, or what `read` raises."""
        raw, at = bytearray(self.count * element_bytes), 0
        nested = self.text.find(b"[", self.begin + 1, self.end) > 0
        check = _Nesting()
        for piece in _slices(self.text, self.begin + 1, self.end - 1):
            if nested:
                check.look(piece)
            with _turn:
                elements = read(b"[" + (piece.translate(_SPACES) if nested else piece) + b"]")
            if at + len(elements) > len(raw):
                raise NumbersError("there are more elements than commas")
            raw[at : at + len(elements)] = elements
            at += len(elements)
            time.sleep(PAUSE_S)
        if check.depth or at != len(raw):
            raise NumbersError("its brackets and commas do not match")
        return raw


@dataclass(frozen=True)
class Findings:
    """The large arrays of numbers of a text, where they are, and how many values there are outside of them."""

    arrays: tuple[tuple[int, int], ...]
    values: int


def find_numbers(text: bytes) -> Findings:
    """Look a JSON text over. What is no JSON may give anything, which a parser will find out."""
    everything = np.frombuffer(text, np.uint8)
    values, arrays, quote, inside = 0, [], -1, False
    for at, part, quotes, is_inside in _looks(everything):
        values += _count_values(part[~is_inside])
        places = np.flatnonzero(quotes) + at
        if len(places):
            gaps = np.diff(places, prepend=quote)
            for index in np.flatnonzero(gaps > MIN_ARRAY_BYTES).tolist():
                if not inside ^ bool(index & 1):  # the gap before an opening quote
                    arrays += _array_in(text, int(places[index] - gaps[index]) + 1, int(places[index]))
            quote, inside = int(places[-1]), bool(is_inside[-1])
    if not inside and len(text) - quote > MIN_ARRAY_BYTES:
        arrays += _array_in(text, quote + 1, len(text))
    for begin, end in arrays:
        values -= sum(map(_count_values, _parts(everything, begin, end)))
    return Findings(tuple(arrays), values)


def _parts(text: Bytes, begin: int, end: int) -> Iterator[Bytes]:
    for at in range(begin, end, _LOOK_BYTES):
        yield text[at : min(at + _LOOK_BYTES, end)]
        time.sleep(PAUSE_S)


def _looks(text: Bytes) -> Iterator[tuple[int, Bytes, Any, Any]]:
    """Yield parts of the text: where, the bytes, which are quotes around strings, which are in strings."""
    inside, backslashes = False, 0
    at = 0
    for part in _parts(text, 0, len(text)):
        quotes = part == _QUOTE
        if backslashes or (part == _BACKSLASH).any():
            escaped, backslashes = _escaped(part, backslashes)
            quotes &= ~escaped
        is_inside = np.logical_xor.accumulate(quotes)
        if inside:
            is_inside = ~is_inside
        inside = bool(is_inside[-1])
        yield at, part, quotes, is_inside
        at += len(part)


def _escaped(part: Bytes, backslashes: int) -> tuple[Any, int]:
    """Return which bytes have an odd number of backslashes before them, and how many the part ends with.

    `backslashes`: so many are before the part.
    """
    index = np.arange(len(part), dtype=np.int32)
    others = np.where(part == _BACKSLASH, np.int32(-1 - backslashes), index)
    run = index - np.maximum.accumulate(others)  # of backslashes, up to each byte
    escaped = np.empty(len(part), bool)
    escaped[0] = backslashes & 1
    escaped[1:] = run[:-1] & 1
    return escaped, int(run[-1])


def _count_values(part: Bytes) -> int:
    """Return how many values begin there, at most: commas and opening brackets."""
    return int(np.count_nonzero(part == _COMMA) + np.count_nonzero(part | 0x20 == _BRACE))


def _array_in(text: bytes, begin: int, end: int) -> list[tuple[int, int]]:
    """Return the array between two strings, the first of which is its name; nothing if it is small or there is none."""
    found = _BEGIN.match(text, begin, min(end, begin + _BEFORE_BYTES))
    if found is None:
        return []
    start = found.end() - 1
    brace = text.find(b"}", start, end)
    stop = text.rfind(b"]", start, end if brace < 0 else brace) + 1
    is_whole = text.count(b"[", start, stop) == text.count(b"]", start, stop)  # else a string is in it, too
    return [(start, stop)] if is_whole and stop - start > MIN_ARRAY_BYTES else []


def _slices(text: bytes, begin: int, end: int) -> Iterator[bytes]:
    """Yield the text in pieces, cut at commas, which are left out."""
    while end - begin > SLICE_BYTES:
        cut = text.rfind(b",", begin, begin + SLICE_BYTES)
        if cut < 0:  # one number, or blanks
            cut = text.find(b",", begin, end)
        if cut < 0:
            break
        yield text[begin:cut]
        begin = cut + 1
    yield text[begin:end]


class _Nesting:
    """Follows the brackets of an array from slice to slice; `depth` of those within it that are open."""

    def __init__(self) -> None:
        self.depth = 0
        self._elements: int | None = None  # depth of all elements

    def look(self, piece: bytes) -> None:
        """Look at the next slice. Raises NumbersError."""
        kinds = _KINDS[np.frombuffer(piece, np.uint8)]
        kinds = kinds[kinds != _BLANK]
        around = np.concatenate(([_SEPARATES], kinds, [_SEPARATES]))
        if not len(kinds) or _WRONG[around[:-1], around[1:]].any():
            raise NumbersError("its brackets and commas do not match")
        steps = (kinds == _OPENS).astype(np.int32) - (kinds == _CLOSES)
        depths = np.cumsum(steps, dtype=np.int32) + self.depth
        elements = depths[kinds == _OTHER]
        if self._elements is None and len(elements):
            self._elements = int(elements[0])
        if depths.min() < 0 or (elements != self._elements).any():
            raise NumbersError("arrays and elements are mixed")
        self.depth = int(depths[-1])
