"""Messages between an instance and its callers."""

import os
import socket

import pytest

from gangway.python_backend.messages import READ_BYTES, Connection, Message


def test_nothing_that_has_come_is_not_waited_for() -> None:
    """Who waits here holds up all that the instance does."""
    one, other = map(Connection, socket.socketpair(socket.AF_UNIX))
    came: list[tuple[Message, Connection]] = []

    def take(message: Message, sender: Connection) -> None:
        came.append((message, sender))

    other.take_now(take)
    assert not came
    one.send({"run": 1}, [b"abc"], descriptor=0)
    other.take_now(take)
    ((message, sender),) = came
    assert sender is other
    assert (message.header, bytes(message.payload)) == ({"run": 1}, b"abc")
    assert os.path.sameopenfile(message.descriptor, 0)
    os.close(message.descriptor)
    other.take_now(take)
    assert len(came) == 1
    one.close()
    with pytest.raises(EOFError):
        other.take_now(take)
    other.close()


def test_messages_that_come_together() -> None:
    """They are read at once; each has its own payload and descriptor, whatever its length."""
    one, other = map(Connection, socket.socketpair(socket.AF_UNIX))
    lengths = [0, 3, 2 * READ_BYTES, 1, READ_BYTES - 1, 0]
    for number, length in enumerate(lengths):
        one.send({"run": number % 2}, [bytes([number]) * length], descriptor=0 if number in (1, 2, 5) else -1)
    came: list[Message] = [other.receive()]
    assert other.has_read, "of the next one"
    while len(came) < len(lengths):
        other.take_now(lambda message, sender: came.append(message))
    assert not other.has_read
    for number, (length, message) in enumerate(zip(lengths, came, strict=True)):
        assert message.header == {"run": number % 2}
        assert bytes(message.payload) == bytes([number]) * length
        assert (message.descriptor >= 0) == (number in (1, 2, 5))
        if message.descriptor >= 0:
            os.close(message.descriptor)
    one.send(b'{"run": 1}')
    assert other.receive().header is came[1].header, "equal headers are read once"
    one.close()
    other.close()


@pytest.mark.parametrize("text", [b"", b"[]", b"{", b"\xff{}"])
def test_what_is_no_header(text: bytes) -> None:
    one, other = map(Connection, socket.socketpair(socket.AF_UNIX))
    one.send(text)
    with pytest.raises(ValueError, match=r"header|Expecting|decode"):
        other.receive()
    one.close()
    other.close()
