"""What is known of a traced request, as it goes from a front end to the exporter."""

from typing import TypeAlias

import msgspec

GRPC = "GRPC"
HTTP = "HTTP"


Instants: TypeAlias = list[tuple[str, int]]  # Triton's names of them, and when they were


class TensorRecord(msgspec.Struct, frozen=True, array_like=True):
    """A tensor of a traced request: `activity` is Triton's name for the side it was on, `data` its bytes."""

    activity: str
    name: str
    datatype: str
    shape: tuple[int, ...]
    data: bytes


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """One step of an ensemble. Instants as in TraceRecord."""

    model: str
    version: int
    begin_ns: int  # its last input was there
    submitted_ns: int
    start_ns: int
    computed_ns: int
    end_ns: int

    def of_model(self) -> Instants:
        """Return Triton's instants of the step at its model."""
        done = [("INFER_RESPONSE_COMPLETE", self.end_ns), ("REQUEST_END", self.end_ns)]
        return [("REQUEST_START", self.begin_ns), ("QUEUE_START", self.submitted_ns), *done]

    def of_compute(self) -> Instants:
        """Return Triton's instants of the computation."""
        return _of_compute(self.start_ns, self.computed_ns, self.end_ns)


class TraceRecord(msgspec.Struct, frozen=True, array_like=True):
    """One request. Instants are CLOCK_MONOTONIC in nanoseconds, 0 where the request did not get so far.

    `front_end`: GRPC or HTTP. `parent` and `tracestate`: the headers of W3C's trace context that came with it.
    `status`: the code's name, OK if it was answered. `versions` is a mask. `timestamps`: whether these are wanted.
    `steps`: of an ensemble. `precision`: of a model whose precision the scheduler chooses; empty of others.
    """

    model: str
    version: int
    request_id: str
    front_end: str
    parent: str
    tracestate: str
    arrival_ns: int
    submitted_ns: int
    start_ns: int  # of the first task
    computed_ns: int  # end of the last task
    end_ns: int  # the answer is there
    status: str
    message: str
    rows: int
    batch_rows: int  # of the batch that it was executed in; 0: its own
    target_us: float  # 0: best effort
    ranks: int
    attempts: int
    blocks: int
    conflicts: int
    preemptions: int
    versions: int
    log_frequency: int
    timestamps: bool
    tensors: tuple[TensorRecord, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    seen_ns: int = 0  # the scheduler has read it
    started_ns: int = 0  # the scheduler has chosen its cores
    finished_ns: int = 0  # the front end has heard that it is computed
    precision: str = ""

    def encode(self) -> bytes:
        """Return the record as JSON."""
        return msgspec.json.encode(self)

    def of_root(self) -> Instants:
        """Return Triton's instants of the whole request.

        Libraries read and send: what is known is when the bytes were there, and when they were handed
        over.
        """
        read = "GRPC_WAITREAD" if self.front_end == GRPC else "HTTP_RECV"
        starts = [(f"{read}_START", self.arrival_ns), (f"{read}_END", self.arrival_ns)]
        sends = [(f"{self.front_end}_SEND_START", self.end_ns), (f"{self.front_end}_SEND_END", self.end_ns)]
        return starts + sends

    def of_model(self) -> Instants:
        """Return Triton's instants of the request at its model."""
        instants = [("REQUEST_START", self.arrival_ns)]
        if self.submitted_ns:
            instants += [("QUEUE_START", self.submitted_ns), *self._of_schedule()]
            instants += [("INFER_RESPONSE_COMPLETE", self.end_ns)]
        return [*instants, ("REQUEST_END", self.end_ns)]

    def _of_schedule(self) -> Instants:
        """Triton has no such instants; its tools pass over them."""
        instants = (
            ("SCHEDULE_START", self.seen_ns),
            ("SCHEDULE_END", self.started_ns),
            ("RESPONSE_START", self.finished_ns),
        )
        return [(name, ns) for name, ns in instants if ns]

    def of_compute(self) -> Instants:
        """Return Triton's instants of the computation, which an ensemble does not have: its steps do."""
        return _of_compute(self.start_ns, self.computed_ns, self.end_ns) if self.start_ns and not self.steps else []


def _of_compute(start_ns: int, computed_ns: int, end_ns: int) -> Instants:
    """Inputs are in their place before it starts."""
    return [
        ("COMPUTE_START", start_ns),
        ("COMPUTE_INPUT_END", start_ns),
        ("COMPUTE_OUTPUT_START", computed_ns),
        ("COMPUTE_END", end_ns),
    ]


def decode(packet: bytes) -> list[TraceRecord]:
    """Return the records of a packet. Raises ValueError."""
    try:
        return msgspec.json.decode(packet, type=list[TraceRecord])
    except msgspec.DecodeError as error:
        raise ValueError(f"not a packet of traces: {packet[:200]!r} ({error})") from error
