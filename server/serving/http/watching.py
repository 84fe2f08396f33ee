"""Those who watch the server over HTTP: the page, its stream of states, and one state.

The loop looks at the cores while anybody watches. A thread aside makes each state, once for all watchers. A watcher
that does not read is dropped, so that what waits for it does not grow.
"""

import asyncio
import logging
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Final

from gangway.server.serving.http.call import HttpCall
from gangway.server.serving.http.json_text import dump
from gangway.server.serving.http.replies import EVENTS, JSON, HttpError, Reply
from gangway.server.serving.loop import ServingLoop
from gangway.server.serving.pending import Offload, Pending, drive, pause
from gangway.server.serving.watch import Watch

_log = logging.getLogger(__name__)

PERIOD_S: Final = 1.0  # between two states, if they are made quickly
MOST_SHARE: Final = 0.01  # of a thread's time that making states may take: with very many models they are rarer
LONGEST_PERIOD_S: Final = 10.0
MAX_WATCHERS: Final = 16
MAX_BEHIND: Final = 5  # states in a row that a watcher does not take
SEND_BUFFER_BYTES: Final = 16 * 1024  # of the kernel, for each watcher; it doubles that
HTML: Final = b"text/html; charset=utf-8"
_FILE: Final = re.compile(rb"^/\* ([a-z]+\.(?:css|js)) \*/\n", re.MULTILINE)


@lru_cache(maxsize=2)
def page(name: str) -> Reply:
    """Return a page, which asks for everything else itself; lines such as "/* page.css */" are files beside it."""
    html = Path(__file__).with_name(name).read_bytes()
    whole = _FILE.sub(lambda line: Path(__file__).with_name(line[1].decode()).read_bytes(), html)
    return Reply(200, (whole,), HTML)


class Watchers:
    """All watchers of a front end. For the event loop's thread."""

    def __init__(self, watch: Watch, serving: ServingLoop) -> None:
        self._watch = watch
        self._loop = serving.loop
        self._aside = Offload(serving.aside, serving.call)
        self._count = 0
        self._waiting: set[Pending[bytes | None]] = set()  # for the next state
        self._is_sampling = False

    async def state(self) -> Reply:
        """Return the next state. Raises HttpError if there are too many watchers, or no state."""
        with self._watching():
            content = await self._next()
        if content is None:
            raise HttpError(500, "internal error, see the server's log")
        return Reply(200, (content,), JSON)

    async def stream(self, call: HttpCall) -> None:
        """Send states as server-sent events until the watcher has gone. Raises HttpError before the first byte."""
        with self._watching():
            transport = call.begin_stream(EVENTS)
            _limit_buffer(transport)
            next_state: Pending[bytes | None] = Pending()
            is_there = call.add_callback(lambda: next_state.settle(None))
            behind = 0
            while is_there and not call.is_answered:
                next_state = self._next()
                if (content := await next_state) is None:  # it has left, or a state cannot be had
                    break
                if not transport.get_write_buffer_size():
                    behind = 0
                    call.send(b"data: %b\n\n" % content)
                elif (behind := behind + 1) == MAX_BEHIND:
                    transport.abort()
            self._waiting.discard(next_state)
        call.send(b"")

    @contextmanager
    def _watching(self) -> Iterator[None]:
        if self._count == MAX_WATCHERS:
            raise HttpError(503, f"{MAX_WATCHERS} clients watch already, which is the limit")
        self._count += 1
        if not self._is_sampling:
            self._is_sampling = True
            drive(self._sample())
        try:
            yield
        finally:
            self._count -= 1

    def _next(self) -> Pending[bytes | None]:
        waiter: Pending[bytes | None] = Pending()
        self._waiting.add(waiter)
        return waiter

    def _tell(self, content: bytes | None) -> None:
        """Hand a state to all who wait; None: there was an error."""
        waiting, self._waiting = self._waiting, set()
        for waiter in waiting:
            waiter.settle(content)

    async def _sample(self) -> None:
        """Look at the server as long as anybody watches."""
        while self._count:
            try:
                await self._tell_states()
            except Exception:
                _log.exception("watching the server failed; its watchers are told 500")
                self._tell(None)
                await pause(self._loop, PERIOD_S)
        self._is_sampling = False

    async def _tell_states(self) -> None:
        watch, loop = self._watch, self._loop
        await self._aside.run(watch.begin)
        next_s = loop.time() + PERIOD_S
        while self._count:
            await pause(loop, watch.sample_s)
            watch.sample()
            if loop.time() >= next_s:
                content, spent_s = await self._aside.run(_state_of, watch)
                self._tell(content)
                period_s = min(max(PERIOD_S, spent_s / MOST_SHARE), LONGEST_PERIOD_S)
                next_s = max(next_s + PERIOD_S, loop.time() + period_s - watch.sample_s)
        watch.end()


def _state_of(watch: Watch) -> tuple[bytes, float]:
    """Return a state, and the seconds of this thread that it has taken."""
    begin_s = time.thread_time()
    content = dump(watch.state())
    return content, time.thread_time() - begin_s


def _limit_buffer(transport: asyncio.Transport) -> None:
    """Have the kernel hold little that a watcher has not read."""
    with suppress(OSError), transport.get_extra_info("socket").dup() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
