"""Plays the cases of gRPC: a client of HTTP/2 that sends what it is told to, right or wrong."""

import gzip
import socket
import struct
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ngh2
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from ngh2 import events as h2

from gangway.protos import grpc_service_pb2, health_pb2
from tests.wire.corpus import Answer, Renaming, Step, pack, unpack

TIMEOUT_S = 20.0
PATIENCE_S = 0.3  # for an answer to which there is no reason yet
COMPARED = (":status", "content-type", "grpc-status", "grpc-message", "grpc-encoding", "grpc-accept-encoding")
DEADLINE_EXCEEDED = "4"
INFERENCE = "inference.GRPCInferenceService"
DEFAULTS = {
    ":method": "POST",
    ":scheme": "http",
    ":path": "",
    ":authority": "localhost",
    "te": "trailers",
    "content-type": "application/grpc",
    "user-agent": "wire",
}
INFLATE: Mapping[str, Callable[[bytes], bytes]] = {"gzip": gzip.decompress, "deflate": zlib.decompress}


@dataclass
class Stream:
    """A call that is under way, and what has come of it."""

    method: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    reset: int | None = None
    closed: bool = False
    awaited: int = 0  # messages that are sure to have come
    cancelled: bool = False
    in_order: bool = True  # of the messages

    @property
    def messages(self) -> int:
        """How many messages have come whole."""
        count, at = 0, 0
        while at + 5 <= len(self.body):
            at += 5 + int(struct.unpack_from(">I", self.body, at + 1)[0])
            count += at <= len(self.body)
        return count


def header_list(path: str, changes: Mapping[str, Any]) -> list[tuple[bytes, bytes]]:
    """Return a request's headers: the usual ones with changes. None: without it; a list: several of the name."""
    headers = {**DEFAULTS, ":path": path, **changes}
    pairs = [
        (name, each) for name, value in headers.items() for each in (value if isinstance(value, list) else [value])
    ]
    return [(name.encode(), value.encode("latin-1")) for name, value in pairs if value is not None]


class GrpcPlayer:
    """One connection. `segment`: the file that clients share with the server."""

    def __init__(self, address: str, renaming: Renaming, segment: Path) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._http = ngh2.Connection(ngh2.Role.CLIENT)
        self._renaming = renaming
        self._segment = segment
        self._streams: dict[int, Stream] = {}
        self._ids: list[int] = []
        self._goaway: int | None = None
        self._lost = False
        self._memory: list[str] = []

    def play(self, steps: list[Step]) -> Answer:
        """Take all steps and wait for the end of every call."""
        with self._socket:
            self._http.initiate_connection()
            for word, *arguments in steps:
                with suppress(ngh2.NGH2Error):  # the server has ended the call or the connection already
                    getattr(self, f"_{word}")(*arguments)
            for number in range(len(self._ids)):
                self._wait(number)
        answer: Answer = {"calls": [self._outcome(self._streams[stream]) for stream in self._ids]}
        if self._goaway:
            answer["goaway"] = self._goaway
        if self._memory:
            answer["memory"] = self._memory
        return answer

    # -- steps

    def _open(self, method: str, changes: Mapping[str, Any], ended: bool = False) -> None:
        path = method if method.startswith("/") or not method else f"/{INFERENCE}/{method}"
        stream = self._http.send_request(header_list(path, changes), end_stream=ended)
        self._ids.append(stream)
        self._streams[stream] = Stream(method)
        self._flush()

    def _message(self, number: int, text: str, flag: int = 0) -> None:
        data = self._renaming.sent(unpack(text))
        self._send(number, struct.pack(">BI", flag, len(data)) + data)

    def _data(self, number: int, text: str) -> None:
        self._send(number, unpack(text))

    def _end(self, number: int) -> None:
        self._http.end_stream(self._ids[number])
        self._flush()

    def _cancel(self, number: int, code: int = 8) -> None:
        stream = self._streams[self._ids[number]]
        if not stream.closed:
            self._http.reset_stream(self._ids[number], code)
            stream.closed = stream.cancelled = True
            self._flush()

    def _answers(self, number: int, count: int) -> None:
        self._streams[self._ids[number]].awaited = count
        self._read_until(lambda: self._streams[self._ids[number]].messages >= count, number, TIMEOUT_S)

    def _any_order(self, number: int) -> None:
        self._streams[self._ids[number]].in_order = False

    def _wait(self, number: int) -> None:
        self._read_until(lambda: False, number, TIMEOUT_S)

    def _pause(self, number: int) -> None:
        """See that nothing is answered yet."""
        self._read_until(lambda: False, number, PATIENCE_S)

    def _remember(self, offset: int, size: int) -> None:
        self._memory.append(pack(self._segment.read_bytes()[offset : offset + size]))

    # -- the connection

    def _send(self, number: int, data: bytes) -> None:
        self._http.send_data(self._ids[number], data)
        self._flush()

    def _flush(self) -> None:
        with suppress(OSError):
            while data := self._http.data_to_send():
                self._socket.sendall(data)

    def _read_until(self, condition: Callable[[], bool], number: int, timeout_s: float) -> None:
        """Read until a condition holds, the call has ended or the time is up."""
        end_s = time.monotonic() + timeout_s
        while not (condition() or self._streams[self._ids[number]].closed or self._lost):
            self._socket.settimeout(max(end_s - time.monotonic(), 0.001))
            try:
                data = self._socket.recv(1 << 18)
            except TimeoutError:
                return
            except OSError:
                data = b""
            if data:
                self._http.receive_data(data)
            self._lost = not data
            self._handle()
            self._socket.settimeout(TIMEOUT_S)
            self._flush()

    def _handle(self) -> None:
        for event in self._http.events():
            stream = self._streams.get(getattr(event, "stream_id", 0), Stream(""))
            match event:
                case h2.ResponseReceived() | h2.TrailersReceived():
                    stream.headers |= {name.decode(): value.decode("latin-1") for name, value in event.headers}
                    stream.closed |= "grpc-status" in stream.headers  # nothing follows, whatever is still to be sent
                case h2.DataReceived():
                    stream.body += event.data
                case h2.StreamReset():
                    stream.reset = event.error_code
                case h2.StreamClosed():
                    stream.closed = True
                case h2.GoAwayReceived():
                    self._goaway = event.error_code

    # -- answers

    def _outcome(self, stream: Stream) -> Answer:
        """Return all that matters of a call."""
        headers = {name: stream.headers[name] for name in COMPARED if name in stream.headers}
        if said := headers.get("grpc-message"):
            headers["grpc-message"] = self._renaming.answered(said.encode("latin-1")).decode("latin-1")
        if headers.get("grpc-status") == DEADLINE_EXCEEDED:
            for name in ("grpc-message", "grpc-accept-encoding"):  # they tell who noticed first
                headers.pop(name, None)
        outcome: Answer = {"headers": headers}
        messages, at, body = [], 0, stream.body
        while at + 5 <= len(body) and at + 5 + (size := struct.unpack_from(">I", body, at + 1)[0]) <= len(body):
            data, flag = body[at + 5 : at + 5 + size], body[at]
            data = INFLATE[headers["grpc-encoding"]](data) if flag else data
            messages.append(f"{flag}{pack(self._renaming.answered(settled(stream.method, data)))}")
            at += 5 + size
        if not stream.in_order:
            messages.sort()
        if stream.cancelled:
            return {"cancelled": messages[: stream.awaited]}
        if messages:
            outcome["messages"] = messages
        if at < len(body):
            outcome["rest"] = pack(body[at:])
        if "grpc-status" not in headers:
            outcome["end"] = (
                f"reset {stream.reset}"
                if stream.reset is not None
                else "closed"
                if stream.closed or self._lost
                else "waits"
            )
        return outcome


def settled(method: str, data: bytes) -> bytes:
    """Return a message without what varies: order of maps, times, the version, what a model's configuration measures.

    Those of inference are left alone, unless they have parameters.
    """
    service = (health_pb2 if "Health" in method else grpc_service_pb2).DESCRIPTOR.services_by_name
    names = service["Health" if "Health" in method else "GRPCInferenceService"].methods_by_name
    descriptor = names.get(method.rpartition("/")[2])
    if descriptor is None or ("Infer" in method and b"shared_memory" not in data):
        return data
    try:
        message: Any = GetMessageClass(descriptor.output_type).FromString(data)
    except DecodeError:
        return data
    if method == "ServerMetadata":
        message.version = "VERSION"
    if method == "ModelConfig":
        for name in [each for each in message.config.parameters if each.startswith("gangway_")]:
            del message.config.parameters[name]
    _clear_times(message)
    return bytes(message.SerializeToString(deterministic=True))


def _clear_times(message: Message) -> None:
    """Set times to one nanosecond, except those that are 0."""
    for descriptor, value in message.ListFields():
        if descriptor.name in ("ns", "last_inference"):
            setattr(message, descriptor.name, 1)
        elif descriptor.message_type and not descriptor.message_type.GetOptions().map_entry:
            for inner in value if descriptor.is_repeated else [value]:
                _clear_times(inner)
