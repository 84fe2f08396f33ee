"""One request of a sequence while it waits for its turn, and what becomes of one that waits for too long."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

import grpc

from gangway.server.errors import RequestError
from gangway.server.plan import Plan
from gangway.server.sequence.batcher import Sequence

MAX_WAIT_NS: Final = 600 * 10**9  # every wait ends
DEADLINE_SLACK_S: Final = 0.02  # the client's clock started earlier than ours
NEVER_NS: Final = 1 << 62


class EndingCall(Protocol):
    """What is asked of a remote call; `inference.Call` says more."""

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline; None or a huge number without one."""

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Have `callback` called when the call ends; False if it has ended."""


@dataclass(eq=False)
class Ticket:
    """`begun`: it may be executed. `refusal`: it never will be. `gone`: nobody waits for the answer any more."""

    sequence: "Sequence[Ticket]" = field(init=False)
    begun: bool = False
    refusal: RequestError | None = None
    gone: bool = False
    woken: threading.Event = field(default_factory=threading.Event)

    def begin(self) -> None:
        """Let it be executed."""
        self.begun = True
        self.woken.set()

    def refuse(self, refusal: RequestError) -> None:
        """Never let it be executed."""
        self.refusal = refusal
        self.woken.set()

    def give_up(self) -> None:
        """Say that its call has ended. From any thread, at any time."""
        self.gone = True
        self.woken.set()


@dataclass(frozen=True)
class Patience:
    """How long a request waits: for a slot, for its turn, at all. Instants are CLOCK_MONOTONIC."""

    model: str
    slot_ns: int
    late_ns: int
    end_ns: int

    @classmethod
    def of(cls, plan: Plan, arrival_ns: int) -> "Patience":
        """Return what a request's parameters and its model's queue policy say."""
        timeout_us = plan.sequence.timeout_us if plan.sequence else 0
        late_us = plan.terms.target_us if plan.refuses_late else 0
        return cls(
            plan.model.name,
            arrival_ns + timeout_us * 1000 if timeout_us else NEVER_NS,
            arrival_ns + int(late_us * 1000) if late_us else NEVER_NS,
            arrival_ns + MAX_WAIT_NS,
        )

    def ends_ns(self, in_backlog: bool) -> int:
        """Return until when it waits."""
        return min(self.late_ns, self.end_ns, self.slot_ns if in_backlog else NEVER_NS)

    def refusal(self, now_ns: int, in_backlog: bool) -> RequestError | None:
        """Return what the client is told now; None: to wait on."""
        if in_backlog and now_ns >= self.slot_ns:
            message = f"timeout of the corresponding sequence has been expired for model '{self.model}'"
        elif now_ns >= self.late_ns:
            message = f"Request timeout expired for model '{self.model}'"
        elif now_ns >= self.end_ns:
            message = f"the request for model '{self.model}' could not be executed now; it may be sent again"
        else:
            return None
        return RequestError(grpc.StatusCode.UNAVAILABLE, message)

    def given_up(self, call: EndingCall) -> RequestError:
        """Return how a request ends whose call has ended before it began."""
        remaining_s = call.time_remaining()
        if remaining_s is not None and remaining_s <= DEADLINE_SLACK_S:
            message = f"the call's deadline passed before model '{self.model}' had answered"
            return RequestError(grpc.StatusCode.DEADLINE_EXCEEDED, message)
        return RequestError(grpc.StatusCode.CANCELLED, f"the request for model '{self.model}' was cancelled")

    def ended_with_it(self) -> RequestError:
        """Return what those are told that wait behind a request that was given up."""
        message = f"the sequence of the request for model '{self.model}' has ended: an earlier request was cancelled"
        return RequestError(grpc.StatusCode.CANCELLED, message)
