"""The HTTP server: uvicorn's connections on the serving loop, and threads that answer."""

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import replace
from typing import Any, Final, TypeAlias

import uvicorn
from uvicorn.server import ServerState

from gangway.executor.memory_budget import MemoryFullError, memory_budget
from gangway.server.access import CATEGORY_OF_METHOD, Ports, Restrictions, port_of, socket_address
from gangway.server.descriptors import max_connections
from gangway.server.front_end.protocol import AnyMethod
from gangway.server.front_end.watch import Watch
from gangway.server.http.connection import (
    FOR_HEALTH,
    IDLE_SECONDS,
    MEMORY_FULL,
    TRANSPORT,
    BoundedConnection,
)
from gangway.server.http.replies import HttpCall, HttpError, Reply, error_text
from gangway.server.http.routes import (
    HEALTH,
    WATCHING,
    Incoming,
    Infer,
    Route,
    Service,
    method_of,
    route_of,
    verbs_of,
)
from gangway.server.http.watching import Watchers, page
from gangway.server.models.served import Models
from gangway.server.options.endpoints import HttpOptions
from gangway.server.serving.limits import ConnectionLimit
from gangway.server.serving.loop import ServingLoop
from gangway.server.threads import CountingPool, NoThreadError

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

WATCH_AFTER_SECONDS: Final = 0.01  # whether the client is still there; most answers are quicker, and watching costs
MAX_HELD_BYTES: Final = 2 << 30  # bodies of all requests together
JOIN_BYTES: Final = 64 * 1024  # smaller bodies are sent in one piece
STREAM: Final = Reply(200)  # states follow as server-sent events
FAILED: Final = Reply(500, (error_text("internal error, see the server's log"),))


class ClientGoneError(Exception):
    """The client has closed the connection before its request was complete."""


class App:
    """The ASGI application, in the server's event loop: reads a request, has a thread answer it, sends the reply.

    Nothing here blocks or computes. A thread waits for each inference, as in the gRPC server: the data plane's wait
    blocks, without the interpreter's lock. `watchers` None: the server cannot be watched.
    """

    def __init__(
        self,
        service: Service,
        threads: CountingPool,
        max_body_bytes: int,
        restrictions: Restrictions,
        watchers: Watchers | None = None,
    ) -> None:
        self._service = service
        self._threads = threads
        self._max_body_bytes = max_body_bytes
        self._restrictions = restrictions
        self._watchers = watchers
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request, as ASGI has it."""
        headers = dict(scope["headers"])
        call = HttpCall(headers)
        try:
            reply = await self._reply(scope, receive, call, headers)
            if reply is STREAM and self._watchers is not None:
                await self._watchers.stream(receive, send, scope["state"][TRANSPORT])
            else:
                await _send(reply, send)
        except HttpError as error:
            await _send(error.reply, send)
        except ClientGoneError:
            return
        finally:
            call.end()

    async def _reply(self, scope: Scope, receive: Receive, call: HttpCall, headers: Mapping[bytes, bytes]) -> Reply:
        body = _Body()
        try:
            route = _route(scope, self._watchers is not None)
            self._admit(route, scope["method"], headers)
            if scope["state"][FOR_HEALTH] and route.operation not in HEALTH:
                raise HttpError(503, "too many connections", closes=True)
            await self._read(body, scope, headers, receive)
            if self._watchers is not None and route.operation in WATCHING:
                return await self._watched(route, self._watchers)
            incoming = Incoming(scope["method"], route, headers, body.content(), call, time.monotonic_ns())
            return await self._answer(incoming, receive)
        except HttpError as error:
            return error.reply
        finally:
            self._held_bytes -= body.size_bytes

    def _admit(self, route: Route, verb: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise HttpError unless the client has sent what a restriction asks for; the message is Triton's."""
        if not self._restrictions.groups or route.operation == "page":  # which holds nothing of this server
            return
        restriction = self._restrictions.of(CATEGORY_OF_METHOD[method_of(route, verb)])
        if restriction is not None and not restriction.admits([headers.get(restriction.key.encode(), b"")]):
            raise HttpError(403, f"This API is restricted, expecting header '{restriction.key}'")

    async def _watched(self, route: Route, watchers: Watchers) -> Reply:
        match route.operation:
            case "page":
                return page()
            case "state":
                return await watchers.state()
        return STREAM

    async def _read(self, body: "_Body", scope: Scope, headers: Mapping[bytes, bytes], receive: Receive) -> None:
        """Read the body. Raises HttpError, ClientGoneError. The connection handles clients that stall.

        What is left of a body that is refused is dropped as it comes: many clients read no answer before they have sent
        all. One that asks first (Expect) may never send it, so the begin of its next request is unknown.
        """
        closes = b"expect" in headers
        length = int(headers.get(b"content-length", b"0"))
        if length > self._max_body_bytes:
            raise self._too_large(closes)
        try:
            memory_budget().take(length)  # what is received is counted again, by the connection
        except MemoryFullError as error:
            raise HttpError(503, str(error), closes=closes) from None
        more = True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                raise ClientGoneError
            if MEMORY_FULL in scope["state"]:
                raise HttpError(503, scope["state"][MEMORY_FULL], closes=closes)
            piece = message.get("body", b"")
            more = message.get("more_body", False)
            body.add(piece)
            self._held_bytes += len(piece)
            if body.size_bytes > self._max_body_bytes:
                raise self._too_large(closes)
            if self._held_bytes > MAX_HELD_BYTES:
                raise HttpError(503, "too many large requests at once", closes=closes)

    def _too_large(self, closes: bool) -> HttpError:
        return HttpError(413, f"the body has more than {self._max_body_bytes} bytes", closes=closes)

    async def _answer(self, incoming: Incoming, receive: Receive) -> Reply:
        """Have a thread answer, but health at once. A client that goes away meanwhile cancels its request."""
        if incoming.route.operation in HEALTH:
            return self._service.answer(replace(incoming, headers={}, body=b""))
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Reply] = loop.create_future()
        watch = _Watch(loop, receive, incoming.call)
        try:
            self._threads.submit(self._work, incoming, loop, done)
            return await done
        except NoThreadError as error:
            raise HttpError(503, str(error)) from None
        finally:
            watch.stop()

    def _work(self, incoming: Incoming, loop: asyncio.AbstractEventLoop, done: "asyncio.Future[Reply]") -> None:
        reply = FAILED  # after any error, since the event loop waits for it
        try:
            reply = self._service.answer(incoming)
        finally:
            loop.call_soon_threadsafe(_finish, done, reply)


class _Body:
    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self.size_bytes = 0

    def add(self, piece: bytes) -> None:
        self._pieces.append(piece)
        self.size_bytes += len(piece)

    def content(self) -> bytes:
        """Return the whole; the pieces are gone then."""
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


class _Watch:
    """Ends a call when its client goes away."""

    def __init__(self, loop: asyncio.AbstractEventLoop, receive: Receive, call: HttpCall) -> None:
        self._task: asyncio.Task[None] | None = None
        self._timer = loop.call_later(WATCH_AFTER_SECONDS, self._begin, loop, receive, call)

    def _begin(self, loop: asyncio.AbstractEventLoop, receive: Receive, call: HttpCall) -> None:
        self._task = loop.create_task(_watch(receive, call))

    def stop(self) -> None:
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()


async def _watch(receive: Receive, call: HttpCall) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    call.end()


def _finish(done: "asyncio.Future[Reply]", reply: Reply) -> None:
    if not done.cancelled():
        done.set_result(reply)


def _route(scope: Scope, is_watchable: bool) -> Route:
    """Return what the path means. Raises HttpError: 404, 405."""
    route = route_of(scope["raw_path"])
    if route is None or (route.operation in WATCHING and not is_watchable):
        raise HttpError(404, "Not Found")
    verbs = verbs_of(route)
    if scope["method"] not in verbs:
        allow = ", ".join(verbs)
        raise HttpError(405, f"Method Not Allowed, only {allow}", allow=allow)
    return route


async def _send(reply: Reply, send: Send) -> None:
    headers = [(b"content-length", b"%d" % reply.size_bytes)]
    if reply.parts:
        headers.append((b"content-type", reply.content_type))
    if reply.json_bytes is not None:
        headers.append((b"inference-header-content-length", b"%d" % reply.json_bytes))
    if reply.encoding:
        headers.append((b"content-encoding", reply.encoding.encode()))
    if reply.allow:
        headers.append((b"allow", reply.allow.encode()))
    if reply.closes:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    parts = reply.parts if reply.size_bytes > JOIN_BYTES else (b"".join(reply.parts),)
    for part in parts[:-1]:
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": parts[-1]})


BACKLOG: Final = 1024
MAX_CONNECTIONS: Final = 4096  # fewer where few files may be open
SPARE_THREADS: Final = 16  # refuse what is too much while every slot's thread waits
READY_THREADS: Final = 8  # are started before the first request
IDLE_TIMEOUT_SECONDS: Final = 5.0
UNREAD_MILLISECONDS: Final = 30_000  # without reading its answer, after which a client counts as gone
_KEEPALIVE: Final = ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 20), (socket.TCP_KEEPCNT, 3))


class HttpFrontEnd:
    """Serves one address. `max_in_flight` requests wait in a thread each; the data plane refuses further ones.

    `ports`: where this front end listens, which it adds its own address to. `is_short`: see ConnectionLimit.
    """

    def __init__(
        self,
        infer: Infer,
        methods: Mapping[str, AnyMethod],
        models: Callable[[], Models],
        max_in_flight: int,
        options: HttpOptions,
        ports: Ports,
        serving: ServingLoop,
        watch: Watch | None = None,
        is_short: Callable[[], bool] = lambda: False,
    ) -> None:
        self._ports = ports
        self._is_short = is_short
        threads = CountingPool(max_in_flight + SPARE_THREADS, "http", READY_THREADS)
        self._threads = threads
        service = Service(infer, methods, models, options.max_body_bytes)
        watchers = None if watch is None else Watchers(watch)
        self._app = App(service, threads, options.max_body_bytes, options.restrictions, watchers)
        self._reuse_port = options.reuse_port
        self._state = ServerState()
        self._serving = serving
        self._server: asyncio.Server | None = None

    def listen(self, target: str) -> str:
        """Serve HTTP at "host:port", and return it with the port it has; do nothing for "".

        Raises OSError, whose text is for the user.
        """
        if not target:
            return ""
        try:
            listener = self._bind(target)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else error
            raise OSError(f"cannot listen on {target} for HTTP: {reason}") from None
        self._server = self._serving.run(self._serve(listener, self._config()))
        self._ports.http = port_of(target, int(listener.getsockname()[1]))
        return self._ports.http

    def _bind(self, target: str) -> socket.socket:
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
        return listener

    @property
    def idle(self) -> bool:
        """Whether the kernel has every byte of every answer; also if it was never started."""
        if self._server is None:
            return True
        try:
            return self._serving.run(self._sent(), IDLE_TIMEOUT_SECONDS)
        except TimeoutError:
            return False

    def stop(self) -> None:
        """Close every connection. Calling it again does nothing."""
        if self._server is not None:
            self._serving.run(self._close(self._server))
            self._server = None
        self._threads.shutdown()

    async def _sent(self) -> bool:
        return all(connection.transport.get_write_buffer_size() == 0 for connection in self._state.connections)

    async def _close(self, server: asyncio.Server) -> None:
        server.close()
        for connection in list(self._state.connections):
            connection.transport.abort()

    def _config(self) -> uvicorn.Config:
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
        return config

    async def _serve(self, listener: socket.socket, config: uvicorn.Config) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        limit = ConnectionLimit(min(MAX_CONNECTIONS, max_connections()), self._is_short)

        def connection() -> BoundedConnection:
            return BoundedConnection(
                limit, self._ports, config=config, server_state=self._state, app_state={}, _loop=loop
            )

        return await loop.create_server(connection, sock=listener, backlog=BACKLOG)
