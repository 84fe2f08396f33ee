"""A request over HTTP as everything behind its connection sees it, and what a port serves (`Site`)."""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from gangway.server.errors import RequestError
from gangway.server.serving.call import Call
from gangway.server.serving.http.replies import Reply
from gangway.server.serving.limits import ConnectionLimit, Phase
from gangway.server.serving.pending import Pending
from gangway.server.tracing.record import HTTP

MOST_TOGETHER: Final = 64  # responses are sent at once
SCRATCH_BYTES: Final = 64 * 1024  # are read at once; the parser copies what there is of a body among them


class HttpCall(Call):
    """A request over HTTP, from its head to its answer. For the loop's thread, but for `answer`.

    Names of `headers` are in lower case; `spelled` has by these how they were written. `route` belongs to the site.
    `arrival_ns`: of the whole body, CLOCK_MONOTONIC.
    """

    front_end = HTTP

    def __init__(self, connection: "Answering") -> None:
        self.connection = connection
        self.method = ""
        self.path = b""
        self.headers: dict[bytes, bytes] = {}
        self.spelled: dict[bytes, bytes] = {}
        self.length = self.received_bytes = self.arrival_ns = 0
        self.is_modern = True  # HTTP/1.1
        self.keeps_alive = True
        self.is_complete = self.is_answered = self.is_streaming = False
        self.refusal: Reply | None = None  # for when its turn has come
        self.route: Any = None
        self._pieces: list[bytes | memoryview] = []
        self._answered: Pending[bytes] | None = None
        self._responses: CallResponses | None = None  # of a call that takes many

    # -- what inference asks of a call

    def time_remaining(self) -> None:
        """HTTP states no deadline; the parameter `timeout` does."""

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the headers; names are in lower case."""
        return tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in self.headers.items())

    def spelled_metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the headers; names are as the client has written them."""
        found = ((self.spelled[name], value) for name, value in self.headers.items())
        return tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in found)

    def expect_answer(self) -> Pending[bytes]:
        """Return what `answer` will settle."""
        answered: Pending[bytes] = Pending()
        self._answered = answered
        return answered

    def expect_responses(self) -> "CallResponses":
        """Return where `respond` and `answer` put responses, any number of them."""
        self.takes_many = True
        self._responses = CallResponses()
        return self._responses

    def respond(self, response: bytes | RequestError) -> None:
        """Say that inference has given a response that is not the last one. From any thread."""
        assert self._responses is not None, "expected"
        self.connection.tell(self._responses.put, response, False)

    def answer(self, result: bytes | RequestError) -> None:
        """Say what inference has answered last, as was expected. From any thread."""
        if self._responses is not None:
            self.connection.tell(self._responses.put, result, True)
            return
        assert self._answered is not None, "expected"
        if isinstance(result, RequestError):
            self.connection.tell(self._answered.settle, None, result)
        else:
            self.connection.tell(self._answered.settle, result)

    # -- what the site does with it

    @property
    def body(self) -> bytes | memoryview:
        """The whole body, in one buffer."""
        if len(self._pieces) != 1:
            self._pieces = [b"".join(self._pieces)]
        return self._pieces[0]

    @body.setter
    def body(self, body: bytes | memoryview) -> None:
        self._pieces = [body]

    def finish(self, reply: Reply) -> None:
        """Answer it, which ends it."""
        self.connection.finish(self, reply)

    def begin_stream(self, content_type: bytes, status: int = 200, closes: bool = True) -> asyncio.Transport:
        """Begin an answer of pieces; return where they go. `closes`: the connection ends with it."""
        return self.connection.begin_stream(self, content_type, status, closes)

    def send(self, *pieces: bytes) -> None:
        """Send pieces; an empty one is the end of the answer."""
        self.connection.send(self, pieces)

    # -- what the connection does with it

    def add(self, piece: bytes | memoryview) -> None:
        """Some of its body has come."""
        self._pieces.append(piece)

    def drop(self) -> None:
        """Its body is of no use any more."""
        self._pieces.clear()


class Responded(NamedTuple):
    """What inference has said: a response, or why there is none. `is_last`: nothing follows; then it may be empty."""

    response: bytes | RequestError
    is_last: bool

    @property
    def is_empty(self) -> bool:
        """Whether it only says that nothing follows."""
        return not self.response


class CallResponses:
    """The responses of one call, in their order, until they are taken. For the loop's thread."""

    def __init__(self) -> None:
        self._found: deque[Responded] = deque()
        self._waiting: Pending[None] | None = None

    def put(self, response: bytes | RequestError, is_last: bool) -> None:
        """Add one. Who waits goes on soon, with all that have come together."""
        self._found.append(Responded(response, is_last))
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            asyncio.get_running_loop().call_soon(waiting.settle, None)

    async def next(self) -> Responded:
        """Return the next one."""
        if not self._found:
            self._waiting = Pending()
            await self._waiting
        return self._found.popleft()

    async def some(self) -> list[Responded]:
        """Return those that are there, at least one and at most MOST_TOGETHER."""
        first = await self.next()
        return [first, *(self._found.popleft() for _ in range(min(len(self._found), MOST_TOGETHER - 1)))]


class Answering(ABC):
    """What a call needs of its connection."""

    __slots__ = ()
    phase: Phase
    since_s: float
    transport: asyncio.Transport

    @abstractmethod
    def give_way(self) -> None:
        """Close in favour of another connection."""

    @abstractmethod
    def tell(self, function: Callable[..., object], *arguments: Any) -> None:
        """Call it, on the event loop. From any thread."""

    @abstractmethod
    def finish(self, call: HttpCall, reply: Reply) -> None:
        """Answer the call, which ends it."""

    @abstractmethod
    def begin_stream(self, call: HttpCall, content_type: bytes, status: int, closes: bool) -> asyncio.Transport:
        """Begin an answer of pieces. `closes`: the connection ends with it."""

    @abstractmethod
    def send(self, call: HttpCall, pieces: Sequence[bytes]) -> None:
        """Send pieces; an empty one ends the call."""


class Site(ABC):
    """What is served at a port, and how much its connections may take."""

    unknown_method = HTTPStatus.BAD_REQUEST  # how such a request is answered

    def __init__(self, limit: ConnectionLimit) -> None:
        self.limit = limit
        self.thread = 0  # of the event loop, as threading.get_ident has it
        # What takes the connection of a client of HTTP/2 over, of which these bytes have been read.
        self.refuse_grpc: Callable[[asyncio.Transport, bytes], None] = lambda transport, _: transport.abort()
        self.transports: set[asyncio.Transport] = set()  # of all connections
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))  # what any connection has sent, until it is understood

    @abstractmethod
    def open(self, call: HttpCall) -> Reply | None:
        """Look at the head of a request whose turn has come; return why its body is not wanted, else None."""

    @abstractmethod
    def begin(self, call: HttpCall) -> None:
        """The request is complete: answer it, at once or later."""

    @abstractmethod
    def refusal(self, status: int, message: str) -> Reply:
        """Return the answer to what is no proper request."""

    @abstractmethod
    def take(self, call: HttpCall, size_bytes: int) -> Reply | None:
        """Some of a request's body has come; return why no more of it is wanted, else None."""

    @abstractmethod
    def release(self, call: HttpCall) -> None:
        """A request is over, and its body is not held any more."""

    @property
    @abstractmethod
    def elsewhere(self) -> str:
        """What a client of gRPC is told, whose port this is not."""
