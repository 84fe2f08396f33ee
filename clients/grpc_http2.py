"""gRPC's part of an HTTP/2 connection (PROTOCOL-HTTP2.md): settings, request headers, message prefix, status. Pure."""

import struct
from collections.abc import Iterable, Iterator
from urllib.parse import unquote

import grpc
from h2.config import H2Configuration
from h2.connection import ConnectionInputs, H2Connection, H2ConnectionStateMachine
from h2.events import Event
from h2.settings import SettingCodes

DATA = 0x0  # a frame's type
FORGET_EVERY = 64  # streams that are opened
LARGEST_WINDOW = (1 << 31) - 1
OUR_SETTINGS: dict[SettingCodes | int, int] = {
    SettingCodes.ENABLE_PUSH: 0,
    SettingCodes.INITIAL_WINDOW_SIZE: LARGEST_WINDOW,
    SettingCodes.MAX_FRAME_SIZE: (1 << 24) - 1,
}
STATUS_NAMES = {str(code.value[0]): code.name for code in grpc.StatusCode}
RESET_STATUS = {8: "CANCELLED", 11: "RESOURCE_EXHAUSTED", 12: "PERMISSION_DENIED"}

Headers = list[tuple[bytes, bytes]]


class _StateMachine(H2ConnectionStateMachine):
    """Lets calls under way end after a server's goodbye (RFC 9113, 6.8), where h2 gives the connection up."""

    def process_input(self, input_: ConnectionInputs) -> list[Event]:
        return [] if input_ is ConnectionInputs.RECV_GOAWAY else super().process_input(input_)


class _Connection(H2Connection):
    """Does not count its open streams each time that it opens one: the owner keeps the server's limit.

    Counting looks at all of them. With 300 under way that was 7 % of what a request of 600 KB costs its client.
    """

    @property
    def open_outbound_streams(self) -> int:
        """Count for one of `FORGET_EVERY` streams only, which makes h2 forget the closed ones; else say 0."""
        opened = (self.highest_outbound_stream_id + 1) // 2
        return super().open_outbound_streams if opened % FORGET_EVERY == 0 else 0


def client_connection() -> H2Connection:
    """Return a connection that has said what it allows the server: all that it can. Headers are ours, unchecked."""
    unchecked = H2Configuration(
        validate_outbound_headers=False,
        normalize_outbound_headers=False,
        validate_inbound_headers=False,
        normalize_inbound_headers=False,
    )
    http = _Connection(unchecked)
    http.state_machine = _StateMachine()
    http.initiate_connection()
    http.update_settings(OUR_SETTINGS)
    http.increment_flow_control_window(LARGEST_WINDOW - http.inbound_flow_control_window)
    return http


def message_body(message: bytes) -> bytes:
    """Return a serialised message as it travels: with gRPC's prefix (not compressed, length)."""
    return struct.pack(">BI", 0, len(message)) + message


def data_frames(stream: int, body: memoryview, largest_bytes: int) -> Iterator[memoryview]:
    """Yield DATA frames (RFC 9113, 6.1) that do not end the stream: for each its header, and its part of the body."""
    for begin in range(0, len(body), largest_bytes):
        part = body[begin : begin + largest_bytes]
        yield memoryview(struct.pack(">BHBBI", len(part) >> 16, len(part) & 0xFFFF, DATA, 0, stream))
        yield part


def request_headers(url: str, method: str, timeout_s: float, scheme: str = "http") -> Headers:
    """Return the headers that begin a call."""
    headers = {
        ":method": "POST",
        ":scheme": scheme,
        ":path": method,
        ":authority": url,
        "te": "trailers",
        "grpc-timeout": f"{max(1, round(timeout_s * 1000))}m",
        "content-type": "application/grpc",
        "user-agent": "gangway-perf",
    }
    return [(name.encode(), value.encode()) for name, value in headers.items()]


def status_of_headers(raw: Iterable[tuple[bytes, bytes]]) -> tuple[str, str]:
    """Return "OK" or a gRPC status, and the message, of the headers that end a call."""
    headers = {bytes(name): bytes(value).decode(errors="replace") for name, value in raw}
    code = headers.get(b"grpc-status", f"HTTP {headers.get(b':status', '?')}")
    return STATUS_NAMES.get(code, "UNKNOWN"), unquote(headers.get(b"grpc-message", ""))


def status_of_reset(code: int) -> tuple[str, str]:
    """Return the gRPC status and a message of a stream that the server reset with this error code."""
    return RESET_STATUS.get(code, "INTERNAL"), f"stream reset, error {code}"
