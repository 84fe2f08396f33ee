"""TLS of the gRPC server. Its files are read again when they have changed, for connections made from then on."""

import logging
import threading
from collections.abc import Callable
from typing import cast

import grpc

from gangway.server.tls_files import TlsError, TlsFiles, check_files, stamp

_log = logging.getLogger(__name__)


class Certificates:
    """What the files hold. Files that cannot be used (half written, say) leave everything as it was."""

    def __init__(self, files: TlsFiles) -> None:
        """Read the files. Raises TlsError or OSError."""
        self._files = files
        self._lock = threading.Lock()
        check_files(files)
        self._stamp = stamp(files)
        self._tried = self._stamp  # do not complain at every connection about the same files
        self._configuration = self._read()

    def credentials(self) -> grpc.ServerCredentials:
        """Return what a port is opened with."""
        changed = cast("Callable[[], grpc.ServerCertificateConfiguration]", self.changed)  # None is allowed, too
        return grpc.dynamic_ssl_server_credentials(self._configuration, changed, self._files.mutual)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return what new connections shall use, None if that is what the last ones used. Called at each handshake."""
        with self._lock:
            try:
                now = stamp(self._files)
                if now in (self._stamp, self._tried):
                    return None
                self._tried = now
                check_files(self._files)
                configuration = self._read()
                if stamp(self._files) != now:
                    return None  # written just now; the next connection looks again
            except (TlsError, OSError) as error:
                _log.error("TLS goes on with the certificates it has: %s", error)
                return None
            self._stamp, self._configuration = now, configuration
            _log.info("TLS uses the certificates in %s from now on", self._files.certificate)
            return configuration

    def _read(self) -> grpc.ServerCertificateConfiguration:
        files = self._files
        pair = (files.key.read_bytes(), files.certificate.read_bytes())
        return grpc.ssl_server_certificate_configuration([pair], files.root.read_bytes() if files.root else None)
