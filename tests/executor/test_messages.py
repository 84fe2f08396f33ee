"""Messages and slots have the same layout in Python and in C."""

import struct

import pytest

from gangway.executor import _native, messages, slots
from gangway.executor.messages import (
    Cancel,
    Exit,
    Left,
    LeftReason,
    Load,
    Loaded,
    Ready,
    Run,
    Submit,
    Unload,
    Unloaded,
    unpack,
)

KEY = "0123456789abcdef" * 4
ALL = [
    Submit(7, 0xFFFFFFFF),
    Cancel(7, 8),
    Run(1, 2, 3),
    Load(4, KEY),
    Load(4, KEY, at_once=True),
    Unload(5),
    Exit(),
    Left(1, 2, 3, LeftReason.TIMEOUT, 1 << 63, 5),
    Loaded(3, True),
    Loaded(3, False, "no such folder"),
    Unloaded(6),
    Ready(4321),
]


@pytest.mark.parametrize("message", ALL, ids=str)
def test_round_trip(message):
    raw = message.pack()
    assert len(raw) == messages.MESSAGE_BYTES == _native.LAYOUT["message"]
    assert unpack(raw) == message


def test_long_error_is_cut():
    assert unpack(Loaded(1, False, "x" * 100).pack()).error == "x" * 48


@pytest.mark.parametrize("raw", [bytes(64), struct.pack("<I60x", 11), struct.pack("<IIII48s", 7, 0, 0, 0, b"\xff" * 4)])
def test_unknown_kind_or_reason_is_an_error(raw):
    with pytest.raises(ValueError):
        unpack(raw)


def test_wrong_key_is_an_error():
    with pytest.raises(ValueError, match="64 hex digits"):
        Load(1, "abcd").pack()


def word(raw, field, size_bytes=4):
    offset = _native.LAYOUT[f"message.{field}"]
    return int.from_bytes(raw[offset : offset + size_bytes], "little")


def test_message_fields_lie_where_c_has_them():
    left = Left(11, 12, 13, LeftReason.ABORTED, 14, 15).pack()
    assert [word(left, f"gang.{name}") for name in ("lease", "rank", "generation", "reason")] == [11, 12, 13, 3]
    assert [word(left, f"gang.{name}", 8) for name in ("joined_ns", "left_ns")] == [14, 15]
    assert word(left, "kind") == messages.MessageKind.LEFT
    submit = Submit(21, 22).pack()
    assert [word(submit, f"request.{name}") for name in ("slot", "generation")] == [21, 22]
    loaded = Loaded(31, True, "text").pack()
    assert [word(loaded, f"model.{name}") for name in ("model_id", "ok", "text")] == [31, 1, 0x74786574]
    assert word(Ready(41).pack(), "ready.pid") == 41


def test_slot_fields_lie_where_c_has_them():
    names = ["model_id", "rows", "priority", "ranks", "arrival_ns", "deadline_ns", "compute_start_ns", "compute_end_ns"]
    names += ["input_frame_bytes", "output_frame_bytes", "limit_ns", "join_key"]
    names += ["blocks", "conflicts", "preemptions", "versions", "rejects_late", "max_queue", "by_bell"]
    names += ["parts", "batch_rows", "leads"]
    sizes = [4] * 4 + [8] * 8 + [4] * 10
    offsets = [slots._FIELDS_OFFSET + sum(sizes[:index]) for index in range(len(sizes))]
    assert [_native.LAYOUT[f"slot.{name}"] for name in names] == offsets
    assert _native.LAYOUT["slot"] == slots.SLOT_BYTES
    assert _native.LAYOUT["slot.blocks"] == slots._COUNTS_OFFSET
    assert _native.LAYOUT["slot.cancel"] == slots._CANCEL_OFFSET
    assert _native.LAYOUT["slot.attempts"] == slots._ATTEMPTS_OFFSET
    assert _native.LAYOUT["slot.input_offset"] == slots._INPUTS_OFFSET
    assert _native.LAYOUT["slot.output_offset"] == slots._OUTPUTS_OFFSET
    assert _native.LAYOUT["slot.bell"] == slots._BELL_OFFSET
    assert _native.LAYOUT["slot.failure"] == slots._FAILURE_OFFSET
    assert _native.LAYOUT["slot.reason"] == slots._REASON_OFFSET


def test_status_fields_lie_where_c_has_them():
    names = ["pid", "busy", "lease", "runs", "busy_ns"]
    assert [_native.LAYOUT[f"worker_status.{name}"] for name in names] == [0, 4, 8, 16, 24]
