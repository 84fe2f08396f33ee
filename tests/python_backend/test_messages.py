"""Messages between an instance and its callers."""

import os
import socket

import pytest

from gangway.python_backend.messages import Connection, Message


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
