"""A SOCK_SEQPACKET socket that carries messages about regions, some with the descriptor of a client's file."""

import array
import os
import socket

from gangway.executor.region_messages import (
    REGION_MESSAGE_BYTES,
    MapRegion,
    OfferRegion,
    RegionMessage,
    pack_region_message,
    unpack_region_message,
)

_INT_BYTES = array.array("i").itemsize


class RegionChannel:
    """One end. It waits or not, as the socket does."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def fileno(self) -> int:
        """Return the socket's descriptor, for poll()."""
        return self._socket.fileno()

    def send(self, message: RegionMessage, descriptor: int | None = None) -> None:
        """Send, with a copy of the descriptor. Raises BlockingIOError, or another OSError when the peer is gone."""
        ancillary = []
        if descriptor is not None:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        self._socket.sendmsg([pack_region_message(message)], ancillary, socket.MSG_NOSIGNAL)

    def receive(self) -> tuple[RegionMessage, int]:
        """Return the next message, and the descriptor that belongs to it, which is the caller's to close; else -1.

        Raises BlockingIOError, EOFError when the peer is gone, ValueError for what is no message.
        """
        room = socket.CMSG_LEN(_INT_BYTES)  # for one; the kernel closes what has no room
        try:
            data, ancillary, _, _ = self._socket.recvmsg(REGION_MESSAGE_BYTES + 1, room, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            data, ancillary = b"", []
        descriptor = _descriptor_in(ancillary)
        try:
            if not data:
                raise EOFError("the other end of the socket is closed")
            message = unpack_region_message(data)
            if isinstance(message, OfferRegion | MapRegion) != (descriptor >= 0):
                raise ValueError(f"{message} with the descriptor {descriptor}")
        except BaseException:
            if descriptor >= 0:
                os.close(descriptor)
            raise
        return message, descriptor

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def channel_pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected ends."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def _descriptor_in(ancillary: list[tuple[int, int, bytes]]) -> int:
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS) and len(content) >= _INT_BYTES:
            return int(array.array("i", content[:_INT_BYTES])[0])
    return -1
