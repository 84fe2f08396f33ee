"""The requests to a model that make one request of a client: they run side by side, and end with its call."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from gangway.server.errors import RequestError
from gangway.server.serving.call import Begin, Call
from gangway.server.serving.pending import Pending
from gangway.server.tracing.record import HTTP

Request = tuple[bytes, list[memoryview]]  # header and tensors
MOST_AT_ONCE = 16  # of one client's request: slots are everybody's


class PartCall(Call):
    """The call of one batch; it has the clock and the headers of the client's call."""

    front_end = HTTP

    def __init__(self, outer: Call, answered: "Callable[[PartCall, bytes | RequestError], None]") -> None:
        self._outer, self._answered = outer, answered
        self.access = None if outer.access is None else outer.access.part()

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline; None without one."""
        return self._outer.time_remaining()

    def invocation_metadata(self) -> "Sequence[tuple[str, str | bytes]]":
        """Return the headers of the client's call."""
        return tuple(self._outer.invocation_metadata())

    def spelled_metadata(self) -> "Sequence[tuple[str, str | bytes]]":
        """Return the same as the client has written them."""
        return tuple(self._outer.spelled_metadata())

    def answer(self, result: bytes | RequestError) -> None:
        """Take the response, or why there is none."""
        if self._outer.access is not None and self.access is not None:
            self._outer.access.join(self.access)
        self._answered(self, result)
        self.end()


class Parts:
    """Executes requests, MOST_AT_ONCE at a time. For the loop's thread."""

    def __init__(self, begin: Begin, outer: Call, arrival_ns: int) -> None:
        self._begin, self._outer, self._arrival_ns = begin, outer, arrival_ns
        self._calls: set[PartCall] = set()
        self._done: Pending[None] = Pending()
        self._responses: list[bytes] = []
        self._is_going_on = False
        self._left: Iterator[tuple[int, Request]] = iter(())

    async def responses(self, requests: Sequence[Request]) -> list[bytes]:
        """Return the response of each. Raises the first RequestError; then the others are cancelled."""
        self._responses = [b""] * len(requests)
        self._left = enumerate(requests)
        try:
            self._go_on()
            await self._done
        finally:
            self._left = iter(())
            for call in list(self._calls):
                call.end()
        return self._responses

    def _go_on(self) -> None:
        """Begin as many as may run; an answer may come at once."""
        if self._is_going_on:
            return
        self._is_going_on = True
        while len(self._calls) < MOST_AT_ONCE and (found := next(self._left, None)) is not None:
            place, (header, raws) = found
            call = PartCall(self._outer, partial(self._answered, place))
            self._calls.add(call)
            self._begin(header, b"", raws, call, self._arrival_ns)
        self._is_going_on = False
        if not self._calls:
            self._done.settle(None)

    def _answered(self, place: int, call: PartCall, result: bytes | RequestError) -> None:
        self._calls.discard(call)
        if isinstance(result, RequestError):
            self._left = iter(())
            self._done.settle(None, result.without_traceback())
            return
        self._responses[place] = result
        self._go_on()
