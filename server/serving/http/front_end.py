"""The ports of HTTP and of the metrics: sockets, and what is served there, on the front end's event loop."""

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Final

from gangway.server.access import port_of, socket_address, why_not_bound
from gangway.server.descriptors import max_connections
from gangway.server.options.endpoints import MetricsOptions
from gangway.server.serving.http.call import Site
from gangway.server.serving.http.http1 import HttpConnection
from gangway.server.serving.http.metrics_site import MetricsSite
from gangway.server.serving.http.site import HttpService, HttpSite
from gangway.server.serving.http.watching import Watchers
from gangway.server.serving.limits import ConnectionLimit
from gangway.server.serving.loop import ServingLoop
from gangway.server.serving.metrics import Exposition
from gangway.server.serving.pending import Offload
from gangway.server.serving.tls import Certificates, TlsListener
from gangway.server.serving.watch import Watch
from gangway.server.serving.wrong_port import Refusal

BACKLOG: Final = 1024
MAX_CONNECTIONS: Final = 4096  # fewer where few files may be open
MAX_WORK: Final = 256  # that waits for the loop's threads
UNREAD_MILLISECONDS: Final = 30_000  # without reading its answer, after which a client counts as gone
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3))


class HttpFrontEnd:
    """Serves two addresses, and adds its own one to the service's ports.

    `is_short`: see ConnectionLimit. `serving` runs. Raises TlsError or OSError if certificates cannot be used.
    """

    def __init__(
        self,
        service: HttpService,
        serving: ServingLoop,
        watch: Watch | None = None,
        is_short: Callable[[], bool] = lambda: False,
    ) -> None:
        options = service.options
        self._ports = service.ports
        self._reuse_port = options.reuse_port
        self._certificates = Certificates(options.tls, ("http/1.1",)) if options.tls else None
        self._serving = serving
        limit = ConnectionLimit(min(MAX_CONNECTIONS, max_connections()), is_short)
        work = Offload(serving.aside, serving.call, MAX_WORK, "too many large requests at once")
        watchers = None if watch is None else Watchers(watch, serving)
        self._site = HttpSite(service, work, limit, watchers)
        self._sites: list[Site] = [self._site]
        self._listeners: list[asyncio.Server | TlsListener] = []
        self._refusals: list[Refusal] = []

    def listen(self, target: str) -> str:
        """Serve HTTP at "host:port", and return it with the port it has; do nothing for "".

        Raises OSError, whose text is for the user.
        """
        if not target:
            return ""
        try:
            listening, address = _bound(target, self._reuse_port)
        except OSError as error:
            raise OSError(f"cannot listen on {target} for HTTP: {why_not_bound(error)}") from None
        self._ports.http = address
        self._serving.run(self._serve(listening, self._site, self._certificates))
        return address

    def listen_for_metrics(self, options: MetricsOptions, exposition: Exposition) -> str:
        """Serve the metrics; return where, "" if they are off. Raises OSError, whose text is for the user."""
        target = options.target
        if not target:
            return ""
        try:
            listening, address = _bound(target, options.reuse_port)
        except OSError as error:
            raise OSError(f"cannot serve metrics on {target}: {why_not_bound(error)}") from error
        self._ports.metrics = address
        site = MetricsSite(exposition, self._serving.loop, self._ports)
        self._sites.append(site)
        self._serving.run(self._serve(listening, site, None))
        return address

    def end_largest(self) -> bool:
        """End the stream of events that holds most, because memory is full; False if none holds much."""
        return self._site.streams.end_largest()

    @property
    def idle(self) -> bool:
        """Whether the kernel has every byte of every answer; also if it was never started."""
        transports = (transport for site in self._sites for transport in site.transports)
        return all(transport.get_write_buffer_size() == 0 for transport in transports)

    def stop(self) -> None:
        """Close every connection. Calling it again does nothing."""
        if self._listeners:
            self._serving.run(self._close())
            self._listeners.clear()

    async def _serve(self, listening: socket.socket, site: Site, certificates: Certificates | None) -> None:
        loop = self._serving.loop
        site.thread = threading.get_ident()
        refusal = Refusal(lambda: site.elsewhere, site.limit, loop)
        site.refuse_grpc = refusal.take
        self._refusals.append(refusal)
        if certificates is None:
            server = await loop.create_server(lambda: HttpConnection(site, loop), sock=listening, backlog=BACKLOG)
            self._listeners.append(server)
        else:
            self._listeners.append(TlsListener(loop, listening, certificates, lambda: HttpConnection(site, loop)))

    async def _close(self) -> None:
        for listener in self._listeners:
            listener.close()
        for site in self._sites:
            for transport in list(site.transports):
                transport.abort()
        for refusal in self._refusals:
            refusal.close()


def _bound(target: str, reuse_port: bool) -> tuple[socket.socket, str]:
    """Return a socket that listens at "host:port", and that with the port it has. Raises OSError."""
    host, port, family = socket_address(target)
    both = family == socket.AF_INET6 and host == "::" and socket.has_dualstack_ipv6()
    listening = socket.create_server(
        (host, port), family=family, backlog=BACKLOG, reuse_port=reuse_port, dualstack_ipv6=both
    )
    # Accepted connections inherit these.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MILLISECONDS)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        listening.setsockopt(socket.IPPROTO_TCP, option, value)
    listening.setblocking(False)
    return listening, port_of(target, int(listening.getsockname()[1]))
