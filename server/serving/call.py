"""What inference knows of a remote call, whatever brought it: gRPC, HTTP, a stream, or a request of a Python model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import TypeAlias

from gangway.python_backend.cancellations import Flag
from gangway.server.errors import RequestError
from gangway.server.requests.contents import Raws
from gangway.server.serving.access_log import Access
from gangway.server.tracing.record import GRPC


class Call(ABC):
    """One call, which is answered once. All of it happens on the loop's thread.

    `front_end`: as traces name what it has come by. `takes_many`: it takes any number of responses. `model`: which one
    executes it, "" until it begins. `flag`: tells Python models when it is over, if any compute for it. `access`: what
    becomes its line of the access log, if it gets one.
    """

    front_end: str = GRPC
    takes_many: bool = False
    model: str = ""
    flag: Flag | None = None
    access: Access | None = None
    _callbacks: tuple[Callable[[], None], ...] | None = ()  # None: it is over

    @abstractmethod
    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline; None or a huge number without one."""

    @abstractmethod
    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """Return the headers that the client has sent, names in lower case."""

    def spelled_metadata(self) -> Iterable[tuple[str, str | bytes]]:
        """Return the same with names as the client has written them, where those are not always in lower case."""
        return self.invocation_metadata()

    @abstractmethod
    def answer(self, result: bytes | RequestError) -> None:
        """Send the serialised response, or why there is none; once. Empty bytes: all responses have been sent."""

    def respond(self, response: bytes | RequestError) -> None:
        """Send a response that is not the last one, or why there is none in its place, of a call that takes many."""
        raise NotImplementedError

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Have `callback` called when the call is over: answered, or given up by the client; False if it is."""
        if self._callbacks is None:
            return False
        self._callbacks += (callback,)
        return True

    def end(self) -> None:
        """Say that the call is over. Saying it again does nothing."""
        callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            callback()


Begin: TypeAlias = Callable[[bytes, bytes, Raws, Call, int], None]
"""`Inference.begin`: execute a request by its header, id, contents, call and arrival; it ends with `call.answer`."""
