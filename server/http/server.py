"""The HTTP server: uvicorn's connections in an event loop of its own thread, and threads that answer."""

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

import uvicorn
import uvloop
from uvicorn.server import ServerState

from gangway.server.counting_pool import CountingPool
from gangway.server.http.app import App
from gangway.server.http.connection import IDLE_SECONDS, BoundedConnection
from gangway.server.http.connection_limit import ConnectionLimit
from gangway.server.http.service import Service
from gangway.server.inference import Inference
from gangway.server.listen_address import port_of, socket_address
from gangway.server.methods import AnyMethod
from gangway.server.models import Models
from gangway.server.options.http import HttpOptions
from gangway.server.process import max_connections

BACKLOG: Final = 1024
MAX_CONNECTIONS: Final = 4096  # fewer where few files may be open
SPARE_THREADS: Final = 16  # refuse what is too much while every slot's thread waits
READY_THREADS: Final = 8  # are started before the first request
IDLE_TIMEOUT_SECONDS: Final = 5.0
UNREAD_MILLISECONDS: Final = 30_000  # a client that does not read its answer for so long is gone
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3))


class HttpFrontEnd:
    """Serves one address. `max_in_flight` requests wait in a thread each; the data plane refuses further ones."""

    def __init__(
        self,
        inference: Inference,
        methods: Mapping[str, AnyMethod],
        models: Callable[[], Models],
        max_in_flight: int,
        options: HttpOptions,
    ) -> None:
        threads = CountingPool(max_in_flight + SPARE_THREADS, "http", READY_THREADS)
        self._threads = threads
        service = Service(inference, methods, models, options.max_body_bytes)
        self._app = App(service, threads, options.max_body_bytes, options.restrictions)
        self._reuse_port = options.reuse_port
        self._state = ServerState()
        self._socket: socket.socket | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stopping: asyncio.Event | None = None
        self._started = threading.Event()

    def listen(self, target: str) -> str:
        """Serve HTTP at "host:port", and return it with the port it has; do nothing for "".

        Raises OSError, whose text is for the user.
        """
        if not target:
            return ""
        try:
            port = self._bind(target)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else error
            raise OSError(f"cannot listen on {target} for HTTP: {reason}") from None
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()
        self._started.wait()
        return port_of(target, port)

    def _bind(self, target: str) -> int:
        host, port, family = socket_address(target)
        both = family == socket.AF_INET6 and host == "::" and socket.has_dualstack_ipv6()
        listener = socket.create_server(
            (host, port), family=family, backlog=BACKLOG, reuse_port=self._reuse_port, dualstack_ipv6=both
        )
        # Accepted connections inherit these.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MILLISECONDS)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            listener.setsockopt(socket.IPPROTO_TCP, option, value)
        listener.setblocking(False)
        self._socket = listener
        return int(listener.getsockname()[1])

    @property
    def idle(self) -> bool:
        """Whether the kernel has every byte of every answer; also if it was never started."""
        if self._loop is None or not self._loop.is_running():
            return True
        try:
            return asyncio.run_coroutine_threadsafe(self._sent(), self._loop).result(IDLE_TIMEOUT_SECONDS)
        except TimeoutError:
            return False

    def stop(self) -> None:
        """Close every connection. Calling it again does nothing."""
        if self._loop is not None and self._stopping is not None and self._thread is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()
        self._threads.shutdown()

    async def _sent(self) -> bool:
        return all(connection.transport.get_write_buffer_size() == 0 for connection in self._state.connections)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        assert self._socket is not None, "bound"
        loop = self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        config = uvicorn.Config(
            self._app,
            http=BoundedConnection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="error",  # what clients do wrong is answered, not logged
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=IDLE_SECONDS,
        )
        config.load()
        limit = ConnectionLimit(min(MAX_CONNECTIONS, max_connections()))

        def connection() -> BoundedConnection:
            return BoundedConnection(limit, config=config, server_state=self._state, app_state={}, _loop=loop)

        server = await loop.create_server(connection, sock=self._socket, backlog=BACKLOG)
        self._started.set()
        await self._stopping.wait()
        server.close()
        for open_connection in list(self._state.connections):
            open_connection.transport.abort()
