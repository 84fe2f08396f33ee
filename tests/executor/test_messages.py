"""Messages to bytes and back. That the bytes are where C has them: test_layout.py."""

import struct

import pytest

from gangway.executor.messages import (
    MESSAGE_BYTES,
    Cancel,
    Exit,
    LeaseLeft,
    LeftReason,
    LoadArtifact,
    Loaded,
    RunLease,
    Submit,
    Unload,
    Unloaded,
    WorkerReady,
    unpack,
)

KEY = "0123456789abcdef" * 4
ALL = [
    Submit(7, 0xFFFFFFFF),
    Cancel(7, 8),
    RunLease(1, 2, 3),
    LoadArtifact(4, KEY),
    LoadArtifact(4, KEY, at_once=True),
    Unload(5),
    Exit(),
    LeaseLeft(1, 2, 3, LeftReason.TIMEOUT, 1 << 63, 5),
    Loaded(3, True),
    Loaded(3, False, "no such folder"),
    Unloaded(6),
    WorkerReady(4321),
]


@pytest.mark.parametrize("message", ALL, ids=str)
def test_round_trip(message):
    raw = message.pack()
    assert len(raw) == MESSAGE_BYTES
    assert unpack(raw) == message


def test_long_error_is_cut():
    assert unpack(Loaded(1, False, "x" * 100).pack()).error == "x" * 48


@pytest.mark.parametrize("raw", [bytes(64), struct.pack("<I60x", 11), struct.pack("<IIIII44x", 7, 0, 0, 0, 0xFFFFFFFF)])
def test_unknown_kind_or_reason_is_an_error(raw):
    with pytest.raises(ValueError):
        unpack(raw)


def test_wrong_key_is_an_error():
    with pytest.raises(ValueError, match="64 hex digits"):
        LoadArtifact(1, "abcd").pack()
