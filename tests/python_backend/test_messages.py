"""Messages between an instance and its callers."""

import os
import socket

import pytest

from gangway.python_backend.messages import Connection


def test_nothing_that_has_come_is_not_waited_for() -> None:
    """Who waits here holds up all that the instance does."""
    one, other = map(Connection, socket.socketpair(socket.AF_UNIX))
    assert other.receive_now() is None
    one.send({"run": 1}, [b"abc"], descriptor=0)
    message = other.receive_now()
    assert message is not None
    assert (message.header, bytes(message.payload)) == ({"run": 1}, b"abc")
    assert os.path.sameopenfile(message.descriptor, 0)
    os.close(message.descriptor)
    assert other.receive_now() is None
    one.close()
    with pytest.raises(EOFError):
        other.receive_now()
    other.close()
