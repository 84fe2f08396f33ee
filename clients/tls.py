"""TLS of clients: files, flags, and a socket. The flags have the names of those of Triton's client examples."""

import argparse
import socket
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from gangway.clients.errors import InputError, reason

HTTP2 = "h2"  # in the negotiation of TLS
GIVE_SSL = "speaks TLS: give --ssl"


@dataclass(frozen=True)
class Tls:
    """Trusted authorities, and the client's own certificate: PEM files. No `root_certificates`: those of the system."""

    root_certificates: Path | None = None
    private_key: Path | None = None
    certificate_chain: Path | None = None

    @classmethod
    def of(cls, options: argparse.Namespace) -> Self | None:
        """Return what the flags say, None without --ssl. Raises InputError for flags or files that are wrong."""
        files = (options.root_certificates, options.private_key, options.certificate_chain)
        if not options.ssl:
            if any(files):
                raise InputError("certificates and keys are for TLS: give --ssl, too")
            return None
        if (options.private_key is None) != (options.certificate_chain is None):
            raise InputError("a client's certificate has two files: --private-key and --certificate-chain")
        tls = cls(*files)
        tls.context()  # which names an unusable file, as gRPC does not
        return tls

    def context(self) -> ssl.SSLContext:
        """Return the context for a socket that speaks HTTP/2. Raises InputError."""
        try:
            context = ssl.create_default_context(cafile=self.root_certificates)
        except (ssl.SSLError, OSError) as error:
            raise InputError(f"--root-certificates {self.root_certificates}: {reason(error)}") from error
        if self.private_key and self.certificate_chain:
            try:
                context.load_cert_chain(self.certificate_chain, self.private_key, password=_no_password)
            except (ssl.SSLError, OSError) as error:
                files = f"--certificate-chain {self.certificate_chain} and --private-key {self.private_key}"
                raise InputError(f"{files}: {reason(error)}") from error
        context.set_alpn_protocols([HTTP2])
        return context


def speaks_tls(host: str, port: int, timeout_s: float) -> bool:
    """Return whether a server shakes hands by TLS, whoever it is."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent to it
    try:
        with socket.create_connection((host, port), timeout_s) as plain, context.wrap_socket(plain):
            return True
    except (OSError, ValueError):
        return False


class TlsSocket:
    """A connected socket over TLS, with the few methods of a non-blocking socket that `RawChannel` needs."""

    def __init__(self, plain: socket.socket, tls: Tls, host: str) -> None:
        """Shake hands, within the socket's time-out; it does not block afterwards. Raises OSError, InputError."""
        self._secured = tls.context().wrap_socket(plain, server_hostname=host)
        self._secured.setblocking(False)

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._secured.fileno()

    def sendmsg(self, buffers: Sequence[memoryview]) -> int:
        """Send some of the first buffer; return how much. Raises BlockingIOError while there is no room."""
        try:
            return self._secured.send(buffers[0])
        except (ssl.SSLWantWriteError, ssl.SSLWantReadError):
            raise BlockingIOError from None

    def recv_into(self, buffer: memoryview) -> int:
        """Take what has arrived, 0 at the end of the connection. Raises BlockingIOError if nothing has.

        All of it: what TLS has read from the socket already, `select` does not see.
        """
        count = 0
        try:
            while count < len(buffer) and (taken := self._secured.recv_into(buffer[count:])):
                count += taken
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            if not count:
                raise BlockingIOError from None
        except ssl.SSLEOFError:
            return count
        return count

    def close(self) -> None:
        """Close the connection."""
        self._secured.close()


def add_tls_options(parser: argparse.ArgumentParser) -> None:
    """Declare the flags that `Tls.of` reads."""
    group = parser.add_argument_group("TLS")
    group.add_argument("--ssl", action="store_true", help="speak TLS")
    group.add_argument(
        "--root-certificates", type=Path, metavar="FILE", help="PEM: authorities to trust (default: the system's)"
    )
    group.add_argument("--private-key", type=Path, metavar="FILE", help="PEM: the client's key, for mutual TLS")
    group.add_argument("--certificate-chain", type=Path, metavar="FILE", help="PEM: the client's certificate")


def _no_password() -> str:
    raise InputError("the key is encrypted, and there is nobody to ask for the password")
