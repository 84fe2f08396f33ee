"""A SOCK_SEQPACKET socket that carries typed messages and never blocks."""

import socket
from collections.abc import Callable
from typing import Generic, TypeVar

MAX_PACKET_BYTES = 128 * 1024

Message = TypeVar("Message")


class PacketSocket(Generic[Message]):
    """One end of a pair: a full or an empty socket is an answer, not a wait.

    `encode` and `decode` turn a message into one packet and back.
    """

    def __init__(
        self, end: socket.socket, encode: Callable[[Message], bytes], decode: Callable[[bytes], Message]
    ) -> None:
        self._socket = end
        self._encode = encode
        self._decode = decode
        end.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor, for poll()."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send. Raises BlockingIOError when the peer has not read for long, another OSError when it is gone."""
        self._socket.send(self._encode(message), socket.MSG_NOSIGNAL)

    def receive(self) -> Message | None:
        """Return the next message, None when there is none.

        Raises EOFError when the peer is gone, ValueError for a packet that is no message.
        """
        try:
            packet = self._socket.recv(MAX_PACKET_BYTES)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            packet = b""
        if not packet:
            raise EOFError("the other end of the socket is closed")
        return self._decode(packet)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected ends."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
