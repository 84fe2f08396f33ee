"""Requests whose tensors are written where they are used, while they come.

Once the head of a request is there, its plan says how long each tensor is and where it belongs. So all that is to come
is known but for the tensors' elements: each piece is copied once, into shared memory. What comes otherwise, or for
models that need the bytes elsewhere, is collected first.
"""

from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

from gangway.server.requests.codecs import AT_ONCE_BYTES
from gangway.server.requests.contents import RAW_INPUT_CONTENTS, RequestHead, length_prefix
from gangway.server.requests.data_plane import Submission
from gangway.server.requests.heap import ColdError
from gangway.server.requests.python_codec import PythonCodec
from gangway.server.requests.validation import RequestPlan
from gangway.server.serving.call import Call
from gangway.server.serving.slots import Slots

Execute: TypeAlias = Callable[["ArrivingRequest", Call], None]

MOST: Final = 1 / 8  # of the slots, and of the memory for tensors, is for requests that are still coming


class ArrivingRequest:
    """One request. It takes what comes by `write` until it `is_complete`, and ends by `run` or `drop`."""

    __slots__ = (
        "_at", "_begin", "_execute", "_index", "_parts", "_places", "_submission", "plan", "request_id", "size_bytes",
    )  # fmt: skip

    def __init__(
        self,
        places: "ArrivingMemory",
        execute: "Execute",
        plan: RequestPlan,
        request_id: bytes,
        submission: Submission,
        begin: bytes,
        parts: Sequence[bytes | memoryview],
    ) -> None:
        """`begin`: of the message. `parts`: what follows, bytes that are known and places of others; none is empty."""
        self._places = places
        self._execute = execute
        self.plan = plan
        self.request_id = request_id
        self._submission: Submission | None = submission
        self.size_bytes = sum(map(len, parts))
        self._begin = begin
        self._parts = parts
        self._index = self._at = 0  # what comes next belongs there

    @property
    def known_bytes(self) -> int:
        """How many bytes of the message's begin are known."""
        return len(self._begin)

    @property
    def is_complete(self) -> bool:
        """Whether all of it is there."""
        return self._index == len(self._parts)

    def write(self, data: bytes) -> int:
        """Take bytes as far as they belong to the request, and are as they must be; return how many."""
        view, taken = memoryview(data), 0
        while taken < len(view) and self._index < len(self._parts):
            part, at = self._parts[self._index], self._at
            end = min(at + len(view) - taken, len(part))
            piece = view[taken : taken + end - at]
            if isinstance(part, memoryview):
                part[at:end] = piece
            elif part[at:end] != piece:
                break
            taken += end - at
            self._at = end
            if end == len(part):
                self._index, self._at = self._index + 1, 0
        return taken

    def collected(self) -> bytes:
        """Return what has come of the message."""
        last = () if self.is_complete else (self._parts[self._index][: self._at],)
        return b"".join((self._begin, *self._parts[: self._index], *last))

    def run(self, call: Call) -> None:
        """Execute it."""
        self._execute(self, call)

    def leave(self) -> Submission | None:
        """Return the request's memory with its inputs in it, which is the caller's from now on; None if it has left."""
        submission, self._submission, self._parts = self._submission, None, ()
        if submission is not None:
            self._places.leave(self)
        return submission

    def drop(self) -> None:
        """It comes no more."""
        submission = self.leave()
        if submission is not None:
            submission.close()


class ArrivingMemory:
    """The memory of requests that are coming, which is bounded: a client may take its time. For the loop's thread."""

    def __init__(self, slots: Slots, execute: "Execute") -> None:
        self._slots = slots
        self._execute = execute
        self._count = self._bytes = 0

    def open(self, plan: RequestPlan, head: RequestHead, begin: bytes, size_bytes: int) -> ArrivingRequest | None:
        """Return what takes the rest of a message of `size_bytes` with this head; None: it is to be collected.

        `begin`: of the message, up to its first tensor. Raises RequestError if there is no slot or no memory.
        """
        codec, plane = plan.plain_codec, self._slots.plane
        if codec is None or isinstance(codec, PythonCodec) or codec.is_empty or plan.calls is not None or plan.regions:
            return None
        sizes = plan.input_sizes
        prefixes = [length_prefix(RAW_INPUT_CONTENTS, size) for size in sizes]
        rest_bytes = sum(sizes) + sum(map(len, prefixes))
        if len(begin) + rest_bytes != size_bytes or self._count >= MOST * plane.slots.slots:
            return None
        if self._bytes + rest_bytes > MOST * plane.heap.capacity_bytes:
            return None
        layout = codec.layout_of(sizes)
        try:
            submission = self._slots.open(layout, plan.shapes.rows, most_cold_bytes=AT_ONCE_BYTES)
        except ColdError:  # it is there for the next one
            return None
        parts: list[bytes | memoryview] = []
        for prefix, place in zip(prefixes, codec.begin(submission), strict=True):
            parts += (prefix, place) if len(place) else (prefix,)
        self._count += 1
        self._bytes += rest_bytes
        return ArrivingRequest(self, self._execute, plan, head.request_id, submission, begin, parts)

    def leave(self, arriving: ArrivingRequest) -> None:
        """A request comes no more."""
        self._count -= 1
        self._bytes -= arriving.size_bytes
