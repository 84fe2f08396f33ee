"""Frames that HTTP/2 forbids, or has no meaning for, each answered as RFC 9113 has it.

The cases are those of the RFC, as h2spec's generic ones are. Each ends a stream or a connection, and nothing else. What
comes late for a stream that is gone, and priorities, which the RFC has given up, may be ignored, too.
"""

from collections.abc import Iterator

import pytest

from testing.live_server import LiveServer
from tests.helpers.http2_frames import (
    ACK,
    END_HEADERS,
    END_STREAM,
    PADDED,
    PREFACE,
    PRIORITISED,
    SERVICE,
    FrameClient,
    Kind,
    call,
    frame,
    headers,
    literal,
    request_block,
    reset,
    settings,
    table_size,
    window,
)

LAST = 99  # the stream of the call that follows each case
PROTOCOL, FLOW, CLOSED, SIZE, REFUSED, CANCEL, COMPRESSION = 1, 3, 5, 6, 7, 8, 9
PRIORITY_OF_ITSELF = (1).to_bytes(4) + b"\x10"
OPEN = headers(1)
WHOLE = call(1)
HUFFMAN_NAME = literal("x-own", "")[:-1]  # of a header whose value follows, in Huffman's code
UNKNOWN_TYPE, UNKNOWN_SETTING = 0xEE, 0xEE


def ends(*codes: int) -> set[str]:
    """The connection ends with one of these codes, or at once."""
    return {"closed", *(f"goaway {code}" for code in codes)}


def hurts(*codes: int) -> set[str]:
    """The stream ends with one of these codes, or the connection does."""
    return {*ends(*codes), *(f"reset {code}" for code in codes)}


FINE = {"goes on"}
WRONG: dict[str, tuple[bytes, set[str]]] = {
    # 4.1 and 5.5: what is unknown is left alone
    "an unknown type": (frame(UNKNOWN_TYPE, 0xFF, 0, b"any"), FINE),
    "an unknown type on a stream": (OPEN + frame(UNKNOWN_TYPE, 0xFF, 1, b"any"), FINE),
    "unknown flags of a ping": (frame(Kind.PING, 0x16, 0, b"12345678"), FINE),
    "the reserved bit of a ping": (frame(Kind.PING, 0, 1 << 31, b"12345678"), FINE),
    "an unknown setting": (settings([(UNKNOWN_SETTING, 7)]), FINE),
    "an unknown type within headers": (headers(1, flags=0) + frame(UNKNOWN_TYPE, 0, 1), ends(PROTOCOL)),
    # 4.2: sizes
    "data larger than may be": (OPEN + frame(Kind.DATA, 0, 1, bytes(1 << 14), 0xFFFFFF), hurts(SIZE)),
    "data as large as may be": (OPEN + frame(Kind.DATA, 0, 1, bytes(5) + bytes((1 << 14) - 5)), FINE),
    "headers larger than may be": (frame(Kind.HEADERS, END_HEADERS, 1, bytes(1 << 14), 0xFFFFFF), ends(SIZE)),
    "settings of seven bytes": (frame(Kind.SETTINGS, 0, 0, bytes(7)), ends(SIZE)),
    "an acknowledgement with settings": (settings([(1, 4096)], ACK), ends(SIZE)),
    "a ping of six bytes": (frame(Kind.PING, 0, 0, bytes(6)), ends(SIZE)),
    "a reset of three bytes": (OPEN + frame(Kind.RST_STREAM, 0, 1, bytes(3)), ends(SIZE)),
    "a window of three bytes": (frame(Kind.WINDOW_UPDATE, 0, 0, bytes(3)), ends(SIZE)),
    "a priority of four bytes": (frame(Kind.PRIORITY, 0, 1, bytes(4)), hurts(SIZE)),
    # 4.3: compressed headers
    "a header that is no HPACK": (frame(Kind.HEADERS, END_HEADERS, 1, b"\xff" * 6), ends(COMPRESSION)),
    "an index that there is not": (headers(1, more=b"\xfe"), ends(COMPRESSION)),
    "the index 0": (headers(1, more=b"\x80"), ends(COMPRESSION)),
    "a table larger than may be": (
        frame(Kind.HEADERS, END_HEADERS, 1, table_size(1 << 20) + request_block("ServerLive")),
        ends(COMPRESSION),
    ),
    "a size of the table behind a header": (headers(1, more=table_size(0)), ends(COMPRESSION)),
    "a header that is cut off": (headers(1, more=literal("x-own", "value")[:-2]), ends(COMPRESSION)),
    "Huffman's code with too long an end": (
        headers(1, more=HUFFMAN_NAME + b"\x86\x1c\x64\x5f\xff\xff\xff"),
        ends(COMPRESSION),
    ),
    "Huffman's code that ends in zeros": (headers(1, more=HUFFMAN_NAME + b"\x83\x1c\x64\x50"), ends(COMPRESSION)),
    "Huffman's code with an end inside": (
        headers(1, more=HUFFMAN_NAME + b"\x85\x1c\xff\xff\xff\xff"),
        ends(COMPRESSION),
    ),
    # 5.1: states of streams
    "data on an idle stream": (frame(Kind.DATA, 0, 1, b"x"), ends(PROTOCOL, CLOSED)),
    "a reset of an idle stream": (reset(1), ends(PROTOCOL)),
    "a window of an idle stream": (window(1, 100), ends(PROTOCOL)),
    "a continuation of nothing": (frame(Kind.CONTINUATION, END_HEADERS, 1), ends(PROTOCOL)),
    "data behind the end": (WHOLE + frame(Kind.DATA, 0, 1, b"x"), hurts(CLOSED)),
    "headers behind the end": (WHOLE + headers(1), hurts(CLOSED, PROTOCOL)),
    "a continuation behind the end": (WHOLE + frame(Kind.CONTINUATION, END_HEADERS, 1), ends(PROTOCOL, CLOSED)),
    "data behind a reset": (OPEN + reset(1) + frame(Kind.DATA, 0, 1, b"x"), FINE | hurts(CLOSED)),
    "headers behind a reset": (OPEN + reset(1) + headers(1), FINE | hurts(CLOSED, PROTOCOL)),
    "a continuation behind a reset": (
        OPEN + reset(1) + frame(Kind.CONTINUATION, END_HEADERS, 1),
        ends(PROTOCOL, CLOSED),
    ),
    "a window behind the end": (WHOLE + window(1, 100), FINE),
    "a reset behind the end": (WHOLE + reset(1), FINE),
    "an even stream": (headers(2), ends(PROTOCOL)),
    "a stream below the last one": (call(5) + headers(3), FINE | ends(PROTOCOL, CLOSED)),
    # 5.3: priorities, which nobody heeds
    "a priority": (OPEN + frame(Kind.PRIORITY, 0, 1, bytes(5)), FINE),
    "a priority of an idle stream": (frame(Kind.PRIORITY, 0, 7, bytes(5)), FINE),
    "headers with a priority": (
        frame(Kind.HEADERS, END_HEADERS | PRIORITISED, 1, bytes(5) + request_block("ServerLive")),
        FINE,
    ),
    "a stream that depends on itself": (OPEN + frame(Kind.PRIORITY, 0, 1, PRIORITY_OF_ITSELF), FINE | hurts(PROTOCOL)),
    "headers that depend on themselves": (
        frame(Kind.HEADERS, END_HEADERS | PRIORITISED, 1, PRIORITY_OF_ITSELF + request_block("ServerLive")),
        hurts(PROTOCOL),
    ),
    "a priority of no stream": (frame(Kind.PRIORITY, 0, 0, bytes(5)), FINE | ends(PROTOCOL)),
    # 6.1 and 6.2: data and headers
    "data on stream 0": (frame(Kind.DATA, 0, 0, b"x"), ends(PROTOCOL)),
    "more padding than data": (OPEN + frame(Kind.DATA, PADDED, 1, b"\x09abc"), ends(PROTOCOL)),
    "padded data": (OPEN + frame(Kind.DATA, PADDED | END_STREAM, 1, b"\x03" + bytes(5) + b"pad"), FINE),
    "data without bytes": (OPEN + frame(Kind.DATA, 0, 1) * 20, FINE),
    "headers on stream 0": (headers(0), ends(PROTOCOL)),
    "more padding than headers": (frame(Kind.HEADERS, END_HEADERS | PADDED, 1, b"\xff" + bytes(9)), ends(PROTOCOL)),
    "headers within headers": (headers(1, flags=0) + headers(3), ends(PROTOCOL)),
    "data within headers": (headers(1, flags=0) + frame(Kind.DATA, 0, 1, b"x"), ends(PROTOCOL)),
    "headers continued elsewhere": (headers(1, flags=0) + frame(Kind.CONTINUATION, END_HEADERS, 3), ends(PROTOCOL)),
    "headers that are continued": (headers(1, flags=0) + frame(Kind.CONTINUATION, END_HEADERS, 1), FINE),
    "a priority within headers": (headers(1, flags=0) + frame(Kind.PRIORITY, 0, 1, bytes(5)), ends(PROTOCOL)),
    "continuations that are continued": (
        headers(1, flags=0) + frame(Kind.CONTINUATION, 0, 1) * 2 + frame(Kind.CONTINUATION, END_HEADERS, 1),
        FINE,
    ),
    "a continuation behind the last one": (
        headers(1, flags=0) + frame(Kind.CONTINUATION, END_HEADERS, 1) * 2,
        ends(PROTOCOL),
    ),
    "a continuation of stream 0": (headers(1, flags=0) + frame(Kind.CONTINUATION, END_HEADERS, 0), ends(PROTOCOL)),
    "a continuation behind data": (
        OPEN + frame(Kind.DATA, 0, 1, b"x") + frame(Kind.CONTINUATION, END_HEADERS, 1),
        ends(PROTOCOL),
    ),
    # 6.4 to 6.10
    "a reset of stream 0": (reset(0), ends(PROTOCOL)),
    "settings on a stream": (frame(Kind.SETTINGS, 0, 1, b""), ends(PROTOCOL)),
    "a push that is neither": (settings([(2, 2)]), ends(PROTOCOL)),
    "a window beyond 2^31": (settings([(4, 1 << 31)]), ends(FLOW)),
    "frames smaller than may be": (settings([(5, 100)]), ends(PROTOCOL)),
    "frames larger than may be": (settings([(5, 1 << 24)]), ends(PROTOCOL)),
    "an acknowledgement nobody waits for": (settings(flags=ACK) * 3, FINE | ends(PROTOCOL)),
    "a promise of a client": (
        OPEN + frame(Kind.PUSH_PROMISE, END_HEADERS, 1, (2).to_bytes(4) + request_block("ServerLive")),
        ends(PROTOCOL),
    ),
    "a ping on a stream": (frame(Kind.PING, 0, 1, bytes(8)), ends(PROTOCOL)),
    "an answer to no ping": (frame(Kind.PING, ACK, 0, bytes(8)), FINE),
    "a goodbye on a stream": (frame(Kind.GOAWAY, 0, 1, bytes(8)), ends(PROTOCOL)),
    "a window of 0": (window(0, 0), ends(PROTOCOL)),
    "a window of 0 of a stream": (OPEN + window(1, 0), hurts(PROTOCOL)),
    "windows beyond 2^31": (window(0, (1 << 31) - 1) * 2, ends(FLOW)),
    "windows of a stream beyond 2^31": (OPEN + window(1, (1 << 31) - 1) * 2, hurts(FLOW)),
    "a first window beyond 2^31 of a stream": (
        OPEN + window(1, (1 << 31) - 65536) + settings([(4, 100_000)]),
        hurts(FLOW),
    ),
    "a setting twice": (settings([(4, 100), (4, 1 << 20)]), FINE),
    # 7: codes
    "a goodbye for an unknown reason": (frame(Kind.GOAWAY, 0, 0, bytes(4) + b"\0\0\0\xff"), FINE | {"closed"}),
    "a reset for an unknown reason": (OPEN + reset(1, 0xFF), FINE),
    # 8.1: requests
    "headers that follow without the end": (OPEN + headers(1), hurts(PROTOCOL)),
    "an upper-case name": (headers(1, more=literal("X-Own", "value")), hurts(PROTOCOL)),
    "an unknown pseudo header": (headers(1, more=literal(":own", "value")), hurts(PROTOCOL)),
    "an answer's pseudo header": (headers(1, more=literal(":status", "200")), hurts(PROTOCOL)),
    "a pseudo header behind others": (headers(1, more=literal(":path", "/")), hurts(PROTOCOL)),
    "a header of the connection": (headers(1, more=literal("connection", "close")), hurts(PROTOCOL)),
    "a path twice": (
        frame(Kind.HEADERS, END_HEADERS, 1, literal(":path", f"{SERVICE}ServerLive") + request_block("ServerLive")),
        hurts(PROTOCOL),
    ),
    "a method twice": (
        frame(Kind.HEADERS, END_HEADERS, 1, literal(":method", "POST") + request_block("ServerLive")),
        hurts(PROTOCOL),
    ),
    "a scheme twice": (
        frame(Kind.HEADERS, END_HEADERS, 1, literal(":scheme", "http") + request_block("ServerLive")),
        hurts(PROTOCOL),
    ),
    "a path in trailers": (
        OPEN + frame(Kind.HEADERS, END_HEADERS | END_STREAM, 1, literal(":path", "/")),
        hurts(PROTOCOL),
    ),
    "trailers of a client": (
        OPEN
        + frame(Kind.DATA, 0, 1, bytes(5))
        + frame(Kind.HEADERS, END_HEADERS | END_STREAM, 1, literal("x-own", "value")),
        FINE,
    ),
    "another te": (headers(1, more=literal("te", "gzip")), hurts(PROTOCOL)),
    "no headers": (frame(Kind.HEADERS, END_HEADERS, 1), hurts(PROTOCOL)),
    "a length of several frames that is not so": (
        headers(1, more=literal("content-length", "9"))
        + frame(Kind.DATA, 0, 1, bytes(5))
        + frame(Kind.DATA, END_STREAM, 1, b"x"),
        hurts(PROTOCOL),
    ),
    "a length that is not so": (
        headers(1, more=literal("content-length", "1")) + frame(Kind.DATA, END_STREAM, 1, bytes(5)),
        hurts(PROTOCOL),
    ),
}


@pytest.fixture
def client(gangway_server: LiveServer) -> Iterator[FrameClient]:
    pids = gangway_server.pids()
    with FrameClient(gangway_server.url) as connection:
        yield connection
    with FrameClient(gangway_server.url) as other:
        other.send(call(1))
        assert other.is_answered(1)
    assert gangway_server.pids() == pids


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_frame(client: FrameClient, name: str) -> None:
    sent, reactions = WRONG[name]
    client.send(sent)
    assert client.reaction(LAST) in reactions


@pytest.mark.parametrize(
    "hello",
    [
        PREFACE[:10],
        b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n" + settings(),
        PREFACE + call(1),
        b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(600),
        b"\0" * 100,
    ],
    ids=["half", "wrong", "without settings", "HTTP/1.1", "TLS", "zeros"],
)
def test_a_wrong_hello(gangway_server: LiveServer, client: FrameClient, hello: bytes) -> None:
    with FrameClient(gangway_server.url, hello) as other:
        reaction = "waits" if len(hello) < len(PREFACE) else other.reaction(LAST, 3)
    assert reaction in {"closed", "goaway 1", "waits"}
    client.send(call(1))
    assert client.is_answered(1)


def test_a_client_that_says_goodbye_gets_its_answers(client: FrameClient) -> None:
    client.send(headers(1) + frame(Kind.GOAWAY, 0, 0, bytes(8)) + frame(Kind.DATA, END_STREAM, 1, bytes(5)))
    assert client.is_answered(1)


def test_settings_and_pings_are_acknowledged(client: FrameClient) -> None:
    client.send(frame(Kind.PING, 0, 0, b"12345678"))
    answer = client.wait(lambda each: each.kind == Kind.PING)
    assert answer is not None and (answer.flags, answer.payload) == (ACK, b"12345678")
    assert any(each.kind == Kind.SETTINGS and each.flags == ACK for each in client.frames)
