"""Frames of the load generator's own making, read by the library that makes the others."""

import pytest
from gangway.clients.grpc_http2 import data_frames
from hyperframe.frame import DataFrame, Frame


@pytest.mark.parametrize("size_bytes", [0, 1, 16384, 16385, 70_000, (1 << 24) - 1])
@pytest.mark.parametrize("largest_bytes", [16384, (1 << 24) - 1])
def test_data_frames(size_bytes: int, largest_bytes: int) -> None:
    body = (bytes(range(251)) * (size_bytes // 251 + 1))[:size_bytes]
    wire = memoryview(b"".join(data_frames(7, memoryview(body), largest_bytes)))
    found = b""
    while wire:
        frame, length = Frame.parse_frame_header(wire[:9])
        frame.parse_body(wire[9 : 9 + length])
        assert isinstance(frame, DataFrame)
        assert (frame.stream_id, set(frame.flags)) == (7, set()) and 0 < length <= largest_bytes
        found += frame.data
        wire = wire[9 + length :]
    assert found == body
