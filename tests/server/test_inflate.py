"""Compressed messages: the right ones come back, the others are refused before they are large."""

import gzip
import tracemalloc
import zlib

import grpc
import pytest
from gangway.server.errors import RequestError
from gangway.server.inflate import inflated
from hypothesis import given
from hypothesis import strategies as st

LIMIT = 1 << 20
MESSAGE = b"\x0a\x06simple" * 1000


@pytest.mark.parametrize("level", [1, 6, 9])
def test_gzip_and_deflate(level: int) -> None:
    assert inflated(gzip.compress(MESSAGE, level), LIMIT) == MESSAGE
    assert inflated(zlib.compress(MESSAGE, level), LIMIT) == MESSAGE


def test_the_limit_is_of_the_inflated_message() -> None:
    assert len(inflated(zlib.compress(bytes(LIMIT)), LIMIT)) == LIMIT
    for compress in (zlib.compress, gzip.compress):
        with pytest.raises(RequestError, match="larger than max") as refused:
            inflated(compress(bytes(LIMIT + 1)), LIMIT)
        assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_bomb_is_not_unpacked() -> None:
    bomb = zlib.compress(bytes(64 * LIMIT))
    tracemalloc.start()
    with pytest.raises(RequestError):
        inflated(bomb, LIMIT)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4 * LIMIT


@pytest.mark.parametrize(
    "damaged",
    [
        gzip.compress(MESSAGE)[:-1],
        gzip.compress(MESSAGE) + b"more",
        gzip.compress(MESSAGE)[:10] + b"\xff" * 20,
        zlib.compress(MESSAGE)[:5],
        b"\x1f\x8b\x08",
    ],
)
def test_damaged_ones_are_refused(damaged: bytes) -> None:
    with pytest.raises(RequestError, match="damaged") as refused:
        inflated(damaged, LIMIT)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("message", [b"", b"\x1f", b"\x78", b"\x1f\x8b\x09", b"\x78\x02abc", MESSAGE])
def test_what_is_not_compressed_stays(message: bytes) -> None:
    assert inflated(message, LIMIT) is message


@given(st.binary(max_size=100))
def test_any_bytes(message: bytes) -> None:
    try:
        inflated(message, LIMIT)
    except RequestError as error:
        assert error.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
