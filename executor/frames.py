"""Frames: all inputs, or all outputs, of a request to a model that onnxruntime executes, in one block of memory.

Such a model may take and give strings, and tensors whose shapes only the request knows. So the block describes its own
contents, in words of 64 bits, little endian:

    size of the frame, count of tensors, then for each tensor: rank, dimensions, bytes of its contents

and then the contents, in the same order, each beginning at a multiple of 64 bytes. An answer that has no room in its
block leaves only the first word, which says how much would have been needed. Contents are row-major numbers; those of
BYTES are as in Triton's protocol: for each element a length of 4 bytes, little endian, and so many bytes.
An optional input that is left out is a scalar without contents.
"""

import math
import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from gangway.artifact.format import align_up, trial_texts
from gangway.python_backend.elements import join_elements

WORD_BYTES: Final = 8
MAX_RANK: Final = 64


class FramePart(NamedTuple):
    """One tensor's place in a frame: shape, where its contents begin, how many bytes they are."""

    shape: tuple[int, ...]
    offset: int
    size_bytes: int


class Frame(NamedTuple):
    """Where everything lies, and how many bytes that is."""

    parts: tuple[FramePart, ...]
    size_bytes: int


def plan_frame(tensors: Sequence[tuple[Sequence[int], int]]) -> Frame:
    """Return the frame for tensors of these (shape, bytes of contents)."""
    end = WORD_BYTES * (2 + sum(2 + len(shape) for shape, _ in tensors))
    parts = []
    for shape, size_bytes in tensors:
        offset = align_up(end)
        parts.append(FramePart(tuple(shape), offset, size_bytes))
        end = offset + size_bytes
    return Frame(tuple(parts), align_up(end))


def write_header(view: memoryview, frame: Frame) -> bool:
    """Write everything but the contents; False, and only the frame's size written, if it has no room in the block."""
    return _write(view, frame, header_of(frame))


def _write(view: memoryview, frame: Frame, header: bytes) -> bool:
    fits = frame.size_bytes <= len(view)
    header = header if fits else header[:WORD_BYTES]
    view[: len(header)] = header
    return fits


def header_of(frame: Frame) -> bytes:
    """Return everything but the contents."""
    words = [frame.size_bytes, len(frame.parts)]
    for part in frame.parts:
        words += (len(part.shape), *part.shape, part.size_bytes)
    return struct.pack(f"<{len(words)}Q", *words)


class FrameReader:
    """Reads frames like `read_frame`, at once those whose header is that of the frame before. For any threads."""

    def __init__(self) -> None:
        self._known = b"", Frame((), 1 << 64)  # which no block holds; replaced as a whole

    def read(self, view: memoryview) -> Frame:
        """Return what a block holds. Raises ValueError as `read_frame` does."""
        header, frame = self._known
        if bytes(view[: len(header)]) != header or frame.size_bytes > len(view):
            frame = read_frame(view)
            self._known = header_of(frame), frame
        return frame


class FrameWriter:
    """Plans frames and writes their headers, at once those of the shapes and sizes of the frame before."""

    def __init__(self) -> None:
        self._tensors: list[tuple[tuple[int, ...], int]] = []
        self._frame, self._header = Frame((), 0), b""

    def write(self, view: memoryview, tensors: list[tuple[tuple[int, ...], int]]) -> Frame | None:
        """Return the frame for tensors of these (shape, bytes of contents), its header written; None: it has no room.

        Then only its size is written.
        """
        if tensors != self._tensors or not self._header:
            self._frame, self._tensors = plan_frame(tensors), tensors
            self._header = header_of(self._frame)
        return self._frame if _write(view, self._frame, self._header) else None


def needed_bytes(view: memoryview) -> int:
    """Return the size of the frame that was to be written into this block."""
    return int(struct.unpack_from("<Q", view)[0])


def read_frame(view: memoryview) -> Frame:
    """Return what a block holds. Nothing in it is trusted: raises ValueError if it leads outside of the block."""
    try:
        size_bytes, count = struct.unpack_from("<2Q", view)
        at, tensors = 2 * WORD_BYTES, []
        for _ in range(min(count, len(view))):
            (rank,) = struct.unpack_from("<Q", view, at)
            if rank > MAX_RANK:
                raise ValueError(f"a tensor with {rank} dimensions")
            *shape, part_bytes = struct.unpack_from(f"<{rank + 1}Q", view, at + WORD_BYTES)
            at += (2 + rank) * WORD_BYTES
            tensors.append((shape, part_bytes))
    except struct.error as error:
        raise ValueError(f"a frame that is cut off: {error}") from None
    frame = plan_frame(tensors)
    if frame.size_bytes != size_bytes or size_bytes > len(view):
        raise ValueError(f"a frame of {frame.size_bytes} bytes that says {size_bytes}, in a block of {len(view)}")
    return frame


def is_absent(part: FramePart) -> bool:
    """Whether the place of an optional input is empty: not even a scalar has no bytes."""
    return part.shape == () and not part.size_bytes


def join_strings(texts: Sequence[str | bytes]) -> bytes:
    """Return BYTES contents of these elements."""
    return join_elements([text if isinstance(text, bytes) else text.encode() for text in texts])


def example_bytes(datatype: str, shape: Sequence[int], item_bytes: int, texts: Sequence[Sequence[str]] = ()) -> bytes:
    """Return contents to try a model with: zeros; where strings are wanted, `trial_texts` of the columns `texts`."""
    count = math.prod(shape)
    if datatype != "BYTES":
        return bytes(count * item_bytes)
    return join_strings(trial_texts(texts, count))
