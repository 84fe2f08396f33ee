"""TLS of a listener: certificates that are read again when they change, and connections before their handshake."""

import asyncio
import errno
import logging
import socket
import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from gangway.server.access import TlsError, TlsFiles, check_files, stamp

_log = logging.getLogger(__name__)

HANDSHAKE_SECONDS: Final = 20.0
ACCEPTED_AT_ONCE: Final = 16  # before others on the loop have their turn, and connections sent away are closed
NO_DESCRIPTOR_PAUSE_SECONDS: Final = 0.1


class Certificates:
    """The files of a server that speaks TLS, read again when they have changed, for connections made from then on.

    Files that cannot be used (half written, say) leave everything as it was. `protocols`: those that clients may choose
    from (ALPN). For one thread.
    """

    def __init__(self, files: TlsFiles, protocols: Sequence[str]) -> None:
        """Read the files. Raises TlsError or OSError."""
        self._files = files
        self._protocols = protocols
        check_files(files)
        self._tried = stamp(files)  # do not complain at every connection about the same files
        self._context = self._read()

    def context(self) -> ssl.SSLContext:
        """Return what a new connection is to use."""
        try:
            now = stamp(self._files)
            if now == self._tried:
                return self._context
            self._tried = now
            check_files(self._files)
            context = self._read()
            if stamp(self._files) != now:
                self._tried = ()
                return self._context  # written just now; the next connection looks again
        except (TlsError, OSError) as error:
            _log.error("new TLS certificates cannot be used, so TLS goes on with the old ones: %s", error)
            return self._context
        self._context = context
        _log.info("TLS uses the certificates in %s from now on", self._files.certificate)
        return context

    def _read(self) -> ssl.SSLContext:
        files = self._files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(list(self._protocols))
        context.load_cert_chain(files.certificate, files.key)
        if files.root is not None:
            context.load_verify_locations(files.root)
        if files.mutual:
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class ArrivingConnection(asyncio.BaseProtocol, ABC):
    """A protocol whose connection counts from its beginning on, and not only after its handshake."""

    __slots__ = ()

    @abstractmethod
    def arrive(self, own: socket.socket) -> bool:
        """A client has connected; return whether there is room for it."""

    @abstractmethod
    def depart(self) -> None:
        """The handshake has failed."""


class TlsListener:
    """Accepts connections at a listening socket, which belongs to it. For the event loop's thread.

    `connect` makes what becomes the protocol of a connection.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        listening: socket.socket,
        certificates: Certificates,
        connect: Callable[[], ArrivingConnection],
    ) -> None:
        self._loop = loop
        self._listening = listening
        self._certificates = certificates
        self._connect = connect
        self._handshakes: set[asyncio.Task[None]] = set()
        loop.add_reader(listening, self._accept)

    def close(self) -> None:
        """Accept nothing more."""
        self._loop.remove_reader(self._listening)
        self._listening.close()
        for handshake in self._handshakes:
            handshake.cancel()

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                own, _ = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._loop.remove_reader(self._listening)
                    self._loop.call_later(NO_DESCRIPTOR_PAUSE_SECONDS, self._go_on)
                    return
                continue  # the client has gone
            own.setblocking(False)
            connection = self._connect()
            if connection.arrive(own):
                handshake = self._loop.create_task(self._shake_hands(own, connection))
                self._handshakes.add(handshake)
                handshake.add_done_callback(self._handshakes.discard)
            else:
                own.close()

    def _go_on(self) -> None:
        if self._listening.fileno() >= 0:
            self._loop.add_reader(self._listening, self._accept)

    async def _shake_hands(self, own: socket.socket, connection: ArrivingConnection) -> None:
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection, own, ssl=self._certificates.context(), ssl_handshake_timeout=HANDSHAKE_SECONDS
            )
        except OSError as error:  # ssl.SSLError is one
            _log.debug("a TLS handshake failed: %s", error)
            connection.depart()
            with suppress(OSError):
                own.close()
