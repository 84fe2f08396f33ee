"""What is known of a traced request, as it goes from a front end to the exporter."""

import base64
import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

GRPC = "GRPC"
HTTP = "HTTP"


class TensorRecord(NamedTuple):
    """A tensor of a traced request: `activity` is Triton's name for the side it was on, `data` its bytes in base64."""

    activity: str
    name: str
    datatype: str
    shape: list[int]
    data: str

    @classmethod
    def of(cls, activity: str, name: str, datatype: str, shape: Iterable[int], data: bytes) -> "TensorRecord":
        """Return the record of a tensor with these contents."""
        return cls(activity, name, datatype, list(shape), base64.b64encode(data).decode())


class StepRecord(NamedTuple):
    """One step of an ensemble. Instants as in TraceRecord."""

    model: str
    version: int
    begin_ns: int  # its last input was there
    submitted_ns: int
    start_ns: int
    computed_ns: int
    end_ns: int

    def of_model(self) -> list[tuple[str, int]]:
        """Return Triton's instants of the step at its model."""
        done = [("INFER_RESPONSE_COMPLETE", self.end_ns), ("REQUEST_END", self.end_ns)]
        return [("REQUEST_START", self.begin_ns), ("QUEUE_START", self.submitted_ns), *done]

    def of_compute(self) -> list[tuple[str, int]]:
        """Return Triton's instants of the computation."""
        return _of_compute(self.start_ns, self.computed_ns, self.end_ns)


class TraceRecord(NamedTuple):
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
    tensors: list[TensorRecord]
    steps: Sequence[StepRecord] = ()
    seen_ns: int = 0  # the scheduler has read it
    started_ns: int = 0  # the scheduler has chosen its cores
    finished_ns: int = 0  # the front end has heard that it is computed
    precision: str = ""

    def encode(self) -> str:
        """Return the record as JSON."""
        return json.dumps(self, separators=(",", ":"))

    def of_root(self) -> list[tuple[str, int]]:
        """Return Triton's instants of the whole request.

        Libraries read and send: what is known is when the bytes were there, and when they were handed
        over.
        """
        read = "GRPC_WAITREAD" if self.front_end == GRPC else "HTTP_RECV"
        starts = [(f"{read}_START", self.arrival_ns), (f"{read}_END", self.arrival_ns)]
        sends = [(f"{self.front_end}_SEND_START", self.end_ns), (f"{self.front_end}_SEND_END", self.end_ns)]
        return starts + sends

    def of_model(self) -> list[tuple[str, int]]:
        """Return Triton's instants of the request at its model."""
        instants = [("REQUEST_START", self.arrival_ns)]
        if self.submitted_ns:
            instants += [("QUEUE_START", self.submitted_ns), *self._of_schedule()]
            instants += [("INFER_RESPONSE_COMPLETE", self.end_ns)]
        return [*instants, ("REQUEST_END", self.end_ns)]

    def _of_schedule(self) -> list[tuple[str, int]]:
        """Triton has no such instants; its tools pass over them."""
        instants = (
            ("SCHEDULE_START", self.seen_ns),
            ("SCHEDULE_END", self.started_ns),
            ("RESPONSE_START", self.finished_ns),
        )
        return [(name, ns) for name, ns in instants if ns]

    def of_compute(self) -> list[tuple[str, int]]:
        """Return Triton's instants of the computation, which an ensemble does not have: its steps do."""
        return _of_compute(self.start_ns, self.computed_ns, self.end_ns) if self.start_ns and not self.steps else []


def _of_compute(start_ns: int, computed_ns: int, end_ns: int) -> list[tuple[str, int]]:
    """Inputs are in their place before it starts."""
    return [
        ("COMPUTE_START", start_ns),
        ("COMPUTE_INPUT_END", start_ns),
        ("COMPUTE_OUTPUT_START", computed_ns),
        ("COMPUTE_END", end_ns),
    ]


def decode(packet: bytes) -> list[TraceRecord]:
    """Return the records of a packet: a JSON list of what `encode` made. Raises ValueError."""
    try:
        records = [TraceRecord._make(item) for item in json.loads(packet)]
        return [
            record._replace(
                tensors=[TensorRecord._make(tensor) for tensor in record.tensors],
                steps=[StepRecord._make(step) for step in record.steps],
            )
            for record in records
        ]
    except TypeError as error:
        raise ValueError(f"not a packet of traces: {packet[:200]!r} ({error})") from error
