"""Frames that are read and written one after the other, mostly with one header."""

import pytest

from gangway.executor.frames import FrameReader, FrameWriter, needed_bytes, plan_frame, read_frame, write_header

SMALL = [((2, 3), 24), ((), 8)]
TENSORS = (SMALL, SMALL, [((3, 2), 24), ((), 8)], [((0,), 0)], SMALL)


def test_what_one_writes_the_other_reads() -> None:
    reader, writer = FrameReader(), FrameWriter()
    for tensors in TENSORS:
        view = memoryview(bytearray(512))
        assert writer.write(view, list(tensors)) == reader.read(view) == read_frame(view) == plan_frame(tensors)


def test_a_frame_without_room_leaves_its_size() -> None:
    writer, view = FrameWriter(), memoryview(bytearray(64))
    for _ in range(2):
        assert writer.write(view, [((100,), 400)]) is None
        assert needed_bytes(view) == plan_frame([((100,), 400)]).size_bytes
        assert not any(view[8:])


def test_a_known_header_in_a_smaller_block_is_refused() -> None:
    reader, view = FrameReader(), memoryview(bytearray(512))
    frame = plan_frame([((100,), 400)])
    assert write_header(view, frame)
    assert reader.read(view) == frame
    with pytest.raises(ValueError, match="in a block of 448"):
        reader.read(view[: frame.size_bytes - 64])
