"""Frames of the load generator's own making, read by the library that makes the others."""

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from hyperframe.frame import DataFrame, Frame

from gangway.clients.raw_channel import CLEANUP_INTERVAL, client_connection, data_frames, request_headers


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


def test_a_connection_forgets_streams_that_have_ended_and_keeps_those_that_are_open() -> None:
    client, server = client_connection(), H2Connection(H2Configuration(client_side=False))
    server.initiate_connection()
    headers = request_headers("localhost:1", "/service/Method", 1.0)
    still_open = 1
    for number in range(still_open, 10 * CLEANUP_INTERVAL, 2):
        client.send_headers(number, headers, end_stream=True)
        server.receive_data(client.data_to_send())
        if number != still_open:
            server.send_headers(number, [(":status", "200"), ("grpc-status", "0")], end_stream=True)
        client.receive_data(server.data_to_send())
        assert len(client.streams) <= CLEANUP_INTERVAL + 1
    assert still_open in client.streams
