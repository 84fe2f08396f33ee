"""Elements of BYTES as Triton's protocol has them: one after the other, each behind its length, 4 bytes, little endian.

They are any bytes, unless somebody asks for text.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NoReturn, Union

LENGTH = struct.Struct("<I")
_LONG_BYTES = 4096  # elements of this size are copied one by one, shorter ones are cut out of a copy of all

Content = Union[bytes, bytearray, memoryview]  # noqa: UP007 - Python 3.9


def check_elements(content: Content, count: int) -> None:
    """Raise ValueError unless these are `count` elements and no more."""
    at, length_at = 0, LENGTH.unpack_from
    try:
        for _ in range(count):
            at += LENGTH.size + length_at(content, at)[0]
    except struct.error:  # the content has ended before
        _refuse(content, count)
    if at != len(content):
        _refuse(content, count)


def split_elements(content: Content, count: int) -> list[bytes]:
    """Return the elements. Raises ValueError unless there are `count` and no more."""
    check_elements(content, count)
    whole = bytes(content) if len(content) < _LONG_BYTES * count else content
    elements, at, length_at = [], 0, LENGTH.unpack_from
    for _ in range(count):
        begin = at + LENGTH.size
        at = begin + length_at(whole, at)[0]
        elements.append(bytes(whole[begin:at]))
    return elements


def split_texts(content: Content, count: int) -> list[str]:
    """Return the elements as text. Raises ValueError as `split_elements` does, and for one that is not UTF-8."""
    texts = []
    for index, element in enumerate(split_elements(content, count)):
        try:
            texts.append(element.decode())
        except UnicodeDecodeError as error:
            raise ValueError(f"element {index} is not UTF-8: {error.reason}") from None
    return texts


def count_elements(content: Content) -> int:
    """Return how many elements begin there."""
    count = at = 0
    while at + LENGTH.size <= len(content):
        at += LENGTH.size + LENGTH.unpack_from(content, at)[0]
        count += 1
    return count


def join_elements(elements: Sequence[bytes]) -> bytes:
    """Return the contents of these elements."""
    pieces: list[bytes] = []
    for element in elements:
        pieces += (LENGTH.pack(len(element)), element)
    return b"".join(pieces)


def _refuse(content: Content, count: int) -> NoReturn:
    """Raise ValueError, which says what is wrong."""
    at, end = 0, len(content)
    for index in range(count):
        if end - at < LENGTH.size:
            raise ValueError(f"the contents end before element {index} of {count}")
        begin = at + LENGTH.size
        at = begin + LENGTH.unpack_from(content, at)[0]
        if at > end:
            raise ValueError(f"element {index} has {at - begin} bytes, but only {end - begin} follow")
    raise ValueError(f"{end - at} bytes follow after element {count - 1}")
