"""gRPC's messages as bytes: put together of any pieces, inflated within bounds, and what headers say."""

import gzip
import random
import time
import zlib
from collections.abc import Iterator

import pytest

from gangway.protos import StatusCode
from gangway.server.errors import RequestError
from gangway.server.options.endpoints import Compression
from gangway.server.serving.grpc.messages import (
    WHOLE_BYTES,
    CallHead,
    Headers,
    MessageReader,
    compressed,
    encoding_for,
    framed,
    inflate,
    is_whole,
    status_headers,
)

LIMIT = 4 * WHOLE_BYTES
HEADERS = (
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a/b"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc+proto"),
)


def taken(reader: MessageReader) -> Iterator[tuple[bool, bytes]]:
    while reader.has_head():
        reader.collect()
        found = reader.take()
        if found is None:
            return
        yield found


@pytest.mark.parametrize("seed", range(5))
def test_messages_of_any_pieces(seed: int) -> None:
    random_of = random.Random(seed)
    sizes = [0, 1, 5, 16384, 70_000, WHOLE_BYTES - 1, WHOLE_BYTES, WHOLE_BYTES + 7]
    random_of.shuffle(sizes)
    messages = [random_of.randbytes(size) for size in sizes]
    flags = [random_of.random() < 0.5 for _ in sizes]
    stream = b"".join(b"".join(framed(each, is_compressed=flag)) for each, flag in zip(messages, flags, strict=True))
    reader, found = MessageReader(LIMIT), []
    while stream:
        size = random_of.choice((1, 3, 5, 16384, 100_000))
        reader.feed(stream[:size])
        stream = stream[size:]
        found += list(taken(reader))
    assert [bytes(message) for _, message in found] == messages
    assert [flag for flag, _ in found] == flags
    assert reader.due_bytes == -1


def test_many_small_messages_in_one_piece_take_no_longer_each() -> None:
    """Those of a stream that reads nothing for a while."""
    count, reader = 200_000, MessageReader(LIMIT)
    reader.feed(b"".join(framed(b"x" * 16)) * count)
    begin_s = time.process_time()
    assert sum(1 for _ in taken(reader)) == count
    assert time.process_time() - begin_s < 5, "each is cut out of what is left, without a copy of the rest"


def test_a_length_that_is_announced_takes_no_memory() -> None:
    reader = MessageReader(1 << 30)
    reader.feed(b"\0" + (1 << 30).to_bytes(4) + b"x" * 100)
    assert (reader.has_head(), reader.needs_bytes) == (True, 1 << 30)
    begin_s = time.process_time()
    for _ in range(100):
        other = MessageReader(1 << 30)
        other.feed(b"\0" + (1 << 30).to_bytes(4) + b"x" * 100)
        assert other.has_head()
        other.collect()
        assert other.take() is None
    assert time.process_time() - begin_s < 0.5


def test_a_length_beyond_the_limit_is_refused_by_the_prefix() -> None:
    reader = MessageReader(100)
    reader.feed(b"\0\0\0\0")
    assert not reader.has_head()
    reader.feed(b"\x65")
    with pytest.raises(RequestError, match=r"SERVER: Received message larger than max \(101 vs. 100\)"):
        reader.has_head()


@pytest.mark.parametrize(
    ("data", "whole"),
    [(b"", False), (b"\0\0\0\0", False), (b"\0\0\0\0\0", True), (b"\0\0\0\0\2hi", True), (b"\0\0\0\0\2h", False),
     (b"\0\0\0\0\1hi", False), (b"\1\0\0\0\2hi", False), (b"\0\0\0\0\4four", False)],
)  # fmt: skip
def test_one_message_in_one_piece(data: bytes, whole: bool) -> None:
    assert is_whole(data, 3) == whole


@pytest.mark.parametrize(("encoding", "compress"), [(b"gzip", gzip.compress), (b"deflate", zlib.compress)])
def test_inflating(encoding: bytes, compress: object) -> None:
    assert callable(compress)
    assert inflate(compress(b"text" * 100), encoding, 400) == b"text" * 100
    damaged = {
        "zlib error": b"nothing of it",
        "data error": compress(b"text" * 100)[:-3],
        "not all input consumed": compress(b"text") + b"more",
    }
    for reason, message in damaged.items():
        with pytest.raises(RequestError, match=f"Decompression failed due to {reason}") as refused:
            inflate(message, encoding, 400)
        assert refused.value.code is StatusCode.INTERNAL
    with pytest.raises(RequestError, match="Decompressed message larger than max") as refused:
        inflate(compress(bytes(401)), encoding, 400)
    assert refused.value.code is StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("encoding", [b"gzip", b"deflate"])
def test_compressing(encoding: bytes) -> None:
    stream = b"".join(compressed(b"text" * 100, encoding))
    assert (stream[0], inflate(stream[5:], encoding, 400)) == (1, b"text" * 100)
    assert b"".join(compressed(b"x", encoding)) == b"\0\0\0\0\1x", "it would be longer"


def test_which_encoding_answers_have() -> None:
    both = (b"identity", b"deflate", b"gzip")
    levels = (Compression.NONE, Compression.LOW, Compression.MEDIUM, Compression.HIGH)
    assert [encoding_for(level, both) for level in levels] == [b"identity", b"gzip", b"deflate", b"deflate"]
    assert [encoding_for(level, (b"gzip",)) for level in levels] == [b"identity", b"gzip", b"gzip", b"gzip"]
    assert {encoding_for(level, ()) for level in levels} == {b"identity"}


def head(*more: tuple[bytes, bytes], without: bytes = b"") -> CallHead:
    headers: Headers = (*(each for each in HEADERS if each[0] != without), *more)
    return CallHead.of(headers)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(b"2H", 7200.0), (b"1M", 60.0), (b"3S", 3.0), (b"20m", 0.02), (b"5u", 5e-6), (b"7n", 7e-9), (b"0S", 0.0)],
)
def test_timeouts(text: bytes, seconds: float) -> None:
    assert head((b"grpc-timeout", text)).timeout_s == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ((b"grpc-timeout", b"soon"), "Error parsing 'grpc-timeout' metadata"),
        ((b"grpc-timeout", b"-1S"), "Error parsing 'grpc-timeout' metadata"),
        ((b"grpc-encoding", b"snappy"), "Error parsing 'grpc-encoding' metadata"),
        ((b"key-bin", b"a!"), "Error parsing 'key-bin' metadata: illegal base64 encoding"),
    ],
)
def test_headers_that_cannot_be_read(header: tuple[bytes, bytes], reason: str) -> None:
    refusal = head(header).refusal
    assert refusal is not None
    assert (refusal.code, refusal.message) == (StatusCode.INTERNAL, reason)


def test_metadata() -> None:
    found = head((b"baggage", b"a=b"), (b"key-bin", b"AAE"), (b"grpc-accept-encoding", b"gzip, identity"))
    assert (found.path, found.accepted, found.refusal) == ("/a/b", (b"gzip", b"identity"), None)
    assert found.metadata == (("baggage", "a=b"), ("key-bin", b"\0\1"))
    assert not (found.is_http or found.resets)
    assert head(without=b"te").resets
    assert head((b"content-type", b"text/html"), without=b"content-type").is_http


def test_too_much_metadata() -> None:
    assert head((b"x", b"a" * 16_000)).refusal is None
    refusal = head(*[(b"x", b"a" * 3000)] * 6).refusal
    assert refusal is not None
    assert refusal.code is StatusCode.RESOURCE_EXHAUSTED


def test_messages_of_a_status_are_escaped() -> None:
    assert status_headers(StatusCode.NOT_FOUND, "a é 50%\n~") == [
        (b"grpc-status", b"5"),
        (b"grpc-message", b"a %C3%A9 50%25%0A~"),
    ]
