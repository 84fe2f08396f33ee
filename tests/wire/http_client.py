"""Plays the cases of HTTP: sockets that send what they are told to, right or wrong."""

import gzip
import re
import socket
import zlib
from contextlib import suppress
from pathlib import Path

from tests.wire.corpus import Answer, Renaming, Step, pack, unpack

TIMEOUT_S = 20.0
PATIENCE_S = 0.3
LEFT_OUT = frozenset({"date", "server", "content-length"})
VOLATILE = (
    (re.compile(rb'"(ns|last_inference)":"?[1-9][0-9]*"?'), rb'"\1":1'),
    (re.compile(rb'"version":"[0-9]+[.][^"]*"'), b'"version":"VERSION"'),
    (re.compile(rb'"gangway_[a-z_]+":{"string_value":"[^"]*"},'), b""),
)


class HttpPlayer:
    """One connection. `segment`: the file that clients share with the server."""

    def __init__(self, address: str, renaming: Renaming, segment: Path) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)), TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._renaming = renaming
        self._segment = segment
        self._received = b""
        self._replies: list[Answer] = []
        self._memory: list[str] = []
        self._end = ""
        self._half_closed = False

    def play(self, steps: list[Step]) -> Answer:
        """Take all steps."""
        with self._socket:
            for word, *arguments in steps:
                getattr(self, f"_{word}")(*arguments)
        answer: Answer = {"replies": self._replies}
        if self._end:
            answer["end"] = self._end
        if self._memory:
            answer["memory"] = self._memory
        return answer

    # -- steps

    def _send(self, text: str) -> None:
        with suppress(ConnectionError):  # the server has answered already, and closed
            self._socket.sendall(self._renaming.sent(unpack(text)))

    def _half_close(self) -> None:
        self._half_closed = True
        self._socket.shutdown(socket.SHUT_WR)

    def _read(self, count: int = 1, verb: str = "GET", body: bool = True) -> None:
        """Read so many replies, interim ones not counted. `body`: False if it varies too much."""
        while count and not self._end:
            reply = self._reply(verb, body)
            if reply is not None:
                self._replies.append(reply)
                count -= reply["status"] >= 200

    def _closed(self, patience_s: float = TIMEOUT_S) -> None:
        """Wait for the server to close; replies that come before count."""
        self._socket.settimeout(patience_s)
        while not self._end:
            reply = self._reply("GET", True)
            if reply is not None:
                self._replies.append(reply)

    def _pause(self) -> None:
        """See that nothing is answered yet."""
        self._closed(PATIENCE_S)
        self._end = "" if self._end == "waits" else self._end
        self._socket.settimeout(TIMEOUT_S)

    def _remember(self, offset: int, size: int) -> None:
        self._memory.append(pack(self._segment.read_bytes()[offset : offset + size]))

    # -- replies

    def _more(self) -> bool:
        try:
            data = self._socket.recv(1 << 18)
        except TimeoutError:
            self._end = "waits"
            return False
        except ConnectionError:
            data = b""
        self._received += data
        if not data:
            self._end = "closed"
        return bool(data)

    def _line(self, end: bytes) -> bytes | None:
        while end not in self._received:
            if not self._more():
                return None
        line, _, self._received = self._received.partition(end)
        return line

    def _bytes(self, size: int) -> bytes:
        while len(self._received) < size and self._more():
            pass
        data, self._received = self._received[:size], self._received[size:]
        return data

    def _reply(self, verb: str, with_body: bool) -> Answer | None:
        head = self._line(b"\r\n\r\n")
        if head is None:
            return None
        first, *lines = head.decode("latin-1").split("\r\n")
        pairs = [line.partition(":") for line in lines]
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        status = int(first.split()[1])
        if status == 100 and self._half_closed:
            return self._reply(verb, with_body)  # the server finds out whether a client is there; a slow one does
        body = b"" if verb == "HEAD" or status < 200 or status in (204, 304) else self._body(headers)
        if status >= 200 and "content-length" in headers and verb != "HEAD":
            assert len(body) == int(headers["content-length"]) or self._end
        if encoding := headers.get("content-encoding"):
            body = gzip.decompress(body) if encoding == "gzip" else zlib.decompress(body)
        for pattern, instead in VOLATILE:
            body = pattern.sub(instead, body)
        reply: Answer = {"status": status}
        if kept := {name: value for name, value in headers.items() if name not in LEFT_OUT}:
            reply["headers"] = kept
        if body and with_body:
            reply["body"] = pack(self._renaming.answered(body))
        return reply

    def _body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding") == "chunked":
            body = b""
            while size := int(self._line(b"\r\n") or b"0", 16):
                body += self._bytes(size)
                self._line(b"\r\n")
            self._line(b"\r\n")
            return body
        if "content-length" in headers:
            return self._bytes(int(headers["content-length"]))
        while self._more():
            pass
        data, self._received = self._received, b""
        return data
