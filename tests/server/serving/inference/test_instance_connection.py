"""Messages with an instance of a Python model; the test is the instance."""

import json
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gangway.python_backend.messages import PREFIX, Connection, Message
from gangway.server.serving.inference.instance_connection import (
    MOST_IDLE,
    READ_BYTES,
    InstanceConnection,
    InstanceConnections,
)
from gangway.server.serving.loop import ServingLoop

TIMEOUT_S = 20
MOST_BYTES = 32 << 20


class Instance:
    """A listening socket, and connections to it."""

    def __init__(self, serving: ServingLoop, folder: Path) -> None:
        self.serving = serving
        self.address = str(folder / "instance")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(self.address)
        self.listener.settimeout(TIMEOUT_S)
        self.received: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.lost: queue.SimpleQueue[Exception] = queue.SimpleQueue()

    def connect(self, *then: Any) -> None:
        """Have the loop connect, and call methods: (name, arguments)."""

        def work() -> None:
            made = InstanceConnection(self.serving, self.address, MOST_BYTES, self.received.put, self.lost.put)
            for name, *arguments in then:
                getattr(made, name)(*arguments)

        self.serving.call(work)

    def accept(self) -> tuple[Connection, socket.socket]:
        accepted, _ = self.listener.accept()
        accepted.settimeout(TIMEOUT_S)
        return Connection(accepted), accepted


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[Instance]:
    serving = ServingLoop()
    serving.start()
    made = Instance(serving, tmp_path)
    yield made
    serving.stop()
    made.listener.close()


def test_messages_of_all_sizes_go_both_ways(instance: Instance) -> None:
    instance.listener.listen()
    parts = [b"", b"some", bytes(range(256)) * 40_000]  # more than a socket takes at once
    instance.connect(("send", {"attach": 7}), ("send", {"result": 8}, parts))
    theirs, accepted = instance.accept()
    assert theirs.receive().header == {"attach": 7}
    message = theirs.receive()
    assert (message.header, bytes(message.payload)) == ({"result": 8}, b"".join(parts))
    theirs.send({"hello": 1}, descriptor=accepted.fileno())
    theirs.send({"final": True}, [parts[2]])
    assert instance.received.get(timeout=TIMEOUT_S).header == {"hello": 1}
    message = instance.received.get(timeout=TIMEOUT_S)
    assert (message.header, bytes(message.payload)) == ({"final": True}, parts[2])
    theirs.close()
    assert isinstance(instance.lost.get(timeout=TIMEOUT_S), EOFError)


@pytest.mark.parametrize("end", ["close", "finish"])
def test_what_was_said_before_the_end_arrives(instance: Instance, end: str) -> None:
    instance.listener.listen()
    instance.connect(("send", {"attach": 7}), (end,), (end,))
    theirs, _ = instance.accept()
    assert theirs.receive().header == {"attach": 7}
    with pytest.raises(EOFError):
        theirs.receive()
    theirs.close()
    assert instance.lost.empty()


def packed(header: dict[str, Any], payload: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return PREFIX.pack(len(text), len(payload)) + text + payload


def test_messages_that_are_cut_anywhere_are_put_together(instance: Instance) -> None:
    instance.listener.listen()
    instance.connect()
    theirs, accepted = instance.accept()
    sizes = [0, 1, 4, 700, 0, 5000, 3, READ_BYTES, 60_000, 2]
    sent = [({"final": False, "outputs": [["y", "INT8", [size], size]]}, bytes([size % 251]) * size) for size in sizes]
    stream = b"".join(packed(*each) for each in sent)
    for step in (1, 7, 1000, len(stream)):
        for at in range(0, len(stream), step) if step > 1 else range(300):
            accepted.sendall(stream[at : at + step])
        if step == 1:
            accepted.sendall(stream[300:])
        for header, payload in sent:
            message = instance.received.get(timeout=TIMEOUT_S)
            assert (message.header, bytes(message.payload)) == (header, payload)
    theirs.close()


def test_short_messages_that_have_come_together_are_dealt_with_together(instance: Instance) -> None:
    instance.listener.listen()
    turns: list[int] = []
    numbers: queue.SimpleQueue[int] = queue.SimpleQueue()

    def received(message: Message) -> None:
        if not turns or turns[-1] == 0:
            turns.append(0)
            instance.serving.turn.at_end(lambda: turns.append(0))
        turns[-1] += 1
        numbers.put(message.header["final"])

    made: list[InstanceConnection] = []
    begun = threading.Event()

    def begin() -> None:
        made.append(InstanceConnection(instance.serving, instance.address, MOST_BYTES, received, instance.lost.put))
        begun.set()

    instance.serving.call(begin)
    theirs, accepted = instance.accept()
    assert begun.wait(TIMEOUT_S)
    count = 200
    accepted.sendall(b"".join(packed({"final": number}, bytes(40)) for number in range(count)))
    assert [numbers.get(timeout=TIMEOUT_S) for _ in range(count)] == list(range(count))
    together = [each for each in turns if each]
    assert sum(together) == count
    assert 5 <= len(together) <= count // 10, "tens of messages in a turn, and others have theirs in between"
    theirs.close()


def test_no_instance_is_a_loss(instance: Instance) -> None:
    instance.listener.close()
    instance.connect(("send", {"attach": 7}))
    assert isinstance(instance.lost.get(timeout=TIMEOUT_S), ConnectionRefusedError)


def test_a_payload_that_is_too_large_is_not_read(instance: Instance) -> None:
    instance.listener.listen()
    instance.connect()
    theirs, accepted = instance.accept()
    accepted.sendall((2).to_bytes(8, "little") + (MOST_BYTES + 1).to_bytes(8, "little"))
    assert f"a payload of {MOST_BYTES + 1} bytes" in str(instance.lost.get(timeout=TIMEOUT_S))
    theirs.close()


class Kept(Instance):
    """The same, with connections that are kept for the next user."""

    def __init__(self, serving: ServingLoop, folder: Path) -> None:
        super().__init__(serving, folder)
        self.listener.listen()
        self._connections = InstanceConnections(serving)

    def take(self) -> InstanceConnection:
        """Have the loop take a connection."""

        async def work() -> InstanceConnection:
            return self._connections.take(self.address, MOST_BYTES, self.received.put, self.lost.put)

        return self.serving.run(work(), TIMEOUT_S)

    def send(self, connection: InstanceConnection, number: int) -> None:
        """Have it send a message."""
        self.serving.call(connection.send, {"attach": number})

    def give(self, connection: InstanceConnection) -> None:
        """Have the loop give one back."""

        async def work() -> None:
            self._connections.give(self.address, connection)

        self.serving.run(work(), TIMEOUT_S)


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    serving = ServingLoop()
    serving.start()
    made = Kept(serving, tmp_path)
    yield made
    serving.stop()
    made.listener.close()


def test_a_connection_is_used_again(kept: Kept) -> None:
    first = kept.take()
    kept.send(first, 1)
    theirs, _ = kept.accept()
    assert theirs.receive().header == {"attach": 1}
    kept.give(first)
    second = kept.take()
    kept.send(second, 2)
    assert theirs.receive().header == {"attach": 2}
    theirs.send({"final": True})
    assert kept.received.get(timeout=TIMEOUT_S).header == {"final": True}
    theirs.close()
    assert isinstance(kept.lost.get(timeout=TIMEOUT_S), EOFError)


def test_so_many_connections_are_kept(kept: Kept) -> None:
    taken = [kept.take() for _ in range(MOST_IDLE + 1)]
    theirs = [kept.accept()[0] for _ in taken]
    for connection in taken:
        kept.give(connection)
    with pytest.raises(EOFError):
        theirs[-1].receive()
    for each in theirs:
        each.close()


@pytest.mark.parametrize("says_something", [False, True])
def test_a_connection_that_ends_while_it_is_kept(kept: Kept, says_something: bool) -> None:
    first = kept.take()
    theirs, _ = kept.accept()
    kept.give(first)
    if says_something:
        theirs.send({"final": True})
        with pytest.raises(EOFError):
            theirs.receive()
    theirs.close()
    later = kept.take()
    while later is first:  # the loop may not have seen the end
        assert isinstance(kept.lost.get(timeout=TIMEOUT_S), EOFError)
        later = kept.take()
    kept.send(later, 3)
    theirs, _ = kept.accept()
    assert theirs.receive().header == {"attach": 3}
    theirs.close()
    assert kept.received.empty()
    assert isinstance(kept.lost.get(timeout=TIMEOUT_S), EOFError)
