"""One end of a control socket between two processes: typed messages, in order, some with a file descriptor.

The socket is AF_UNIX, SOCK_SEQPACKET: one message is one packet, and the kernel bounds what the other end has not read.
"""

import array
import os
import socket
from collections.abc import Callable
from typing import Final, Generic, TypeVar

MAX_MESSAGE_BYTES: Final = 128 * 1024  # below the default size of a socket's buffer
_INT_BYTES: Final = array.array("i").itemsize
_ROOM_FOR_ONE: Final = socket.CMSG_LEN(_INT_BYTES)  # the kernel closes descriptors that have no room

Message = TypeVar("Message")


class Peer(Generic[Message]):
    """The process at the other end. Safe for one thread that sends and one that receives.

    `encode` and `decode` turn a message into one packet of at most `max_bytes` and back; `decode` raises ValueError.
    `carries_descriptor` tells which messages must come with a descriptor; all others must not.
    """

    def __init__(
        self,
        end: socket.socket,
        encode: Callable[[Message], bytes],
        decode: Callable[[bytes], Message],
        max_bytes: int = MAX_MESSAGE_BYTES,
        carries_descriptor: Callable[[Message], bool] = lambda message: False,
    ) -> None:
        self._socket = end
        self._encode = encode
        self._decode = decode
        self._max_bytes = max_bytes
        self._carries_descriptor = carries_descriptor

    def fileno(self) -> int:
        """Return the socket's descriptor, for poll()."""
        return self._socket.fileno()

    def send(self, message: Message, descriptor: int = -1, wait: bool = False) -> None:
        """Send, with a copy of the descriptor unless it is -1. `wait`: until there is room.

        Raises BlockingIOError when the socket is full, another OSError when the other end is closed.
        """
        packet, flags = self._encode(message), socket.MSG_NOSIGNAL | (0 if wait else socket.MSG_DONTWAIT)
        if descriptor < 0:
            self._socket.send(packet, flags)
            return
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))
        self._socket.sendmsg([packet], [rights], flags)

    def try_send(self, message: Message) -> bool:
        """Send without waiting; False when the socket is full or its other end is closed."""
        try:
            self.send(message)
        except OSError:
            return False
        return True

    def receive(self) -> Message | None:
        """Return the next message of a peer that sends no descriptors, None when there is none.

        Raises EOFError when the other end is closed, ValueError for a packet that is no message.
        """
        received = self.receive_with_descriptor()
        return None if received is None else received[0]

    def receive_with_descriptor(self) -> tuple[Message, int] | None:
        """Return the same with the descriptor that came along, which the caller closes; -1 where there is none."""
        try:
            return self._receive(socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None

    def wait(self) -> tuple[Message, int]:
        """Return the next message and its descriptor as soon as there is one. Raises EOFError, ValueError."""
        return self._receive(0)

    def _receive(self, flags: int) -> tuple[Message, int]:
        flags |= socket.MSG_CMSG_CLOEXEC
        try:
            packet, ancillary, _, _ = self._socket.recvmsg(self._max_bytes, _ROOM_FOR_ONE, flags)
        except ConnectionResetError:
            packet, ancillary = b"", []
        descriptor = _descriptor_in(ancillary)
        try:
            if not packet:
                raise EOFError("the other end of the socket is closed")
            message = self._decode(packet)
            if self._carries_descriptor(message) != (descriptor >= 0):
                raise ValueError(f"{message} with the descriptor {descriptor}")
        except BaseException:
            close_descriptor(descriptor)
            raise
        return message, descriptor

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def peer_sockets() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a new control socket."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def close_descriptor(descriptor: int) -> None:
    """Close a descriptor that came with a message, if one did."""
    if descriptor >= 0:
        os.close(descriptor)


def _descriptor_in(ancillary: list[tuple[int, int, bytes]]) -> int:
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) and len(content) >= _INT_BYTES:
            return int(array.array("i", content[:_INT_BYTES])[0])
    return -1
