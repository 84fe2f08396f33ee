"""HTTP/2 frames: however the network cuts the stream, the same frames come out."""

import struct

import pytest
from gangway.clients.http2_frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PADDED,
    PING,
    PRIORITY,
    SETTINGS,
    Frame,
    FrameReader,
    ProtocolError,
    frame,
    header_block,
    header_fragment,
    read_headers,
    read_settings,
    settings_frame,
)
from hpack import Encoder
from hypothesis import given
from hypothesis import strategies as st

STREAM = (
    settings_frame({1: 0, 4: 1 << 20})
    + frame(HEADERS, END_HEADERS, 1, b"block")
    + frame(DATA, 0, 1, bytes(1000))
    + frame(DATA, 0, 3)
    + frame(PING, 0, 0, b"12345678")
    + frame(DATA, END_STREAM, 5, b"x")
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=12).map(sorted))
def test_frames_do_not_depend_on_how_the_stream_is_cut(cuts):
    reader, got = FrameReader(), []
    for begin, end in zip([0, *cuts], [*cuts, len(STREAM)], strict=True):
        got += reader.feed(memoryview(STREAM)[begin:end])
    assert [(f.kind, f.stream, f.length) for f in got] == [
        (SETTINGS, 0, 12), (HEADERS, 1, 5), (DATA, 1, 1000), (DATA, 3, 0), (PING, 0, 8), (DATA, 5, 1),
    ]  # fmt: skip
    assert (got[1].payload, got[4].payload, got[5].flags) == (b"block", b"12345678", END_STREAM)
    assert read_settings(got[0].payload) == {1: 0, 4: 1 << 20}


def test_headers_are_read_with_and_without_huffman_code():
    headers = [("grpc-status", "14"), ("grpc-message", "x" * 300)]
    assert read_headers(header_block(headers)) == dict(headers)
    for huffman in (False, True):
        assert read_headers(Encoder().encode(headers, huffman=huffman)) == dict(headers)


@pytest.mark.parametrize("block", [b"\xff\xff\xff\xff\xff\xff", b"\xbe", b"\x00\x05ab", b"\x00\x02\xff\xff\x01a"])
def test_broken_header_blocks_are_protocol_errors(block):
    with pytest.raises(ProtocolError):
        read_headers(block)


def test_padding_and_priority_are_cut_off():
    payload = bytes((3,)) + struct.pack(">IB", 0, 16) + b"block" + bytes(3)
    assert header_fragment(Frame(HEADERS, PADDED | PRIORITY, 1, len(payload), payload)) == b"block"
    assert header_fragment(Frame(CONTINUATION, END_HEADERS, 1, 5, b"block")) == b"block"


def test_what_is_not_http2_is_refused():
    with pytest.raises(ProtocolError, match="a frame of kind"):
        list(FrameReader().feed(b"HTTP/1.1 400 Bad Request\r\n"))
    with pytest.raises(ProtocolError):
        read_settings(b"12345")
