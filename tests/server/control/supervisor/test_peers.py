"""Peers that the event loop drives: in order, bounded, never waiting."""

import asyncio

import pytest

from gangway.base.peer import Peer, peer_sockets
from gangway.server.control.supervisor import processes as peers
from gangway.server.control.supervisor.processes import AsyncPeer

NUMBERS = 2000  # more than a socket holds, in packets of this size
PACKET_BYTES = 4096


def encode(number: int) -> bytes:
    return str(number).encode().ljust(PACKET_BYTES)


def decode(packet: bytes) -> int:
    return int(packet)


class Ends:
    """One end that the event loop drives, and one in the test's hands."""

    def __init__(self) -> None:
        ours, theirs = peer_sockets()
        self.heard: list[int] = []
        self.overflows = 0
        self.ours = AsyncPeer(Peer(ours, encode, decode), self._hear, on_overflow=self._overflow)
        self.theirs = Peer(theirs, encode, decode)
        self.end = theirs

    def _hear(self, number: int, descriptor: int) -> None:
        assert descriptor == -1
        self.heard.append(number)

    def _overflow(self) -> None:
        self.overflows += 1


def test_messages_wait_for_room_and_keep_their_order() -> None:
    async def scenario() -> None:
        ends = Ends()
        for number in range(NUMBERS):
            ends.ours.send(number)
        read: list[int] = []
        while len(read) < NUMBERS:
            while (number := ends.theirs.receive()) is not None:
                read.append(number)
            await asyncio.sleep(0)
        assert read == list(range(NUMBERS))
        ends.ours.close()
        with pytest.raises(EOFError):
            ends.theirs.receive()
        ends.theirs.close()

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_a_peer_that_does_not_read_is_given_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MAX_UNSENT", 100)

    async def scenario() -> None:
        ends = Ends()
        for number in range(NUMBERS):
            ends.ours.send(number)
        assert ends.overflows == 1
        ends.ours.close()
        ends.theirs.close()

    asyncio.run(scenario())


def test_what_was_said_before_the_end_is_heard_and_what_is_no_message_is_skipped() -> None:
    async def scenario() -> None:
        ends = Ends()
        strings = Peer(ends.end, str.encode, bytes.decode)
        for text in ("1", "no number", *map(str, range(2, 200))):
            strings.send(text)
        strings.close()
        ends.ours.finish()
        assert ends.heard == list(range(1, 200))
        ends.ours.send(1)
        ends.ours.finish()

    asyncio.run(scenario())
