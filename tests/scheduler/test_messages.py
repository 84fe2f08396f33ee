"""Slow control over a real socket pair."""

import typing

import pytest
from msgspec import structs

from gangway.base.peer import peer_sockets
from gangway.scheduler.messages import (
    BeginServing,
    ControlMessage,
    LoadModel,
    WorkerDied,
    control_peer,
    decode,
    encode,
)

LOAD = LoadModel(3, 'a "name"\n', "ab" * 32, layers=7, max_ranks=2, arena_bytes=1 << 40, max_rows=8)


def test_every_message_survives_the_journey() -> None:
    samples: dict[object, object] = {int: 7, str: "text", float: 1.5, bool: True, float | None: 2.5}
    samples |= {tuple[int, ...]: (1, 2), tuple[float, ...]: (0.5, 3.0)}
    samples |= {tuple[tuple[str, int, int], ...]: (("r", 1, 2),)}
    for kind in typing.get_args(ControlMessage):
        types = typing.get_type_hints(kind)
        message = kind(**{field.name: samples[types[field.name]] for field in structs.fields(kind)})
        assert decode(encode(message)) == message


@pytest.mark.parametrize(
    "packet",
    [b"", b"{}", b"[1]", b'{"type":"Nothing"}', b'{"type":"WorkerDied","core":1}', b'{"type":"Begin","x":1}', b"\xff"],
)
def test_anything_else_is_refused(packet: bytes) -> None:
    with pytest.raises(ValueError, match="not a control message"):
        decode(packet)


def test_packets_keep_their_borders_and_never_block() -> None:
    left, right = (control_peer(end) for end in peer_sockets())
    assert left.receive() is None
    for message in (LOAD, WorkerDied(1, 99), BeginServing()):
        right.send(message)
    assert [left.receive() for _ in range(4)] == [LOAD, WorkerDied(1, 99), BeginServing(), None]
    with pytest.raises(BlockingIOError):
        for _ in range(100_000):
            right.send(LOAD)
    while left.receive() is not None:
        pass
    right.close()
    with pytest.raises(EOFError):
        left.receive()
    with pytest.raises(BrokenPipeError):
        left.send(BeginServing())
    left.close()
