"""Offers of another protocol, which a server may ignore: Java's HTTP client and `curl --http2` make them."""

from collections.abc import Iterable


def without_offer(method: bytes, target: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the head of a request as it would be without its offer. Names of headers are lower-case."""
    lines = [b"%b %b HTTP/%b" % (method, target, version.encode())]
    lines += [b"%b: %b" % header for header in headers if header[0] != b"upgrade"]
    return b"\r\n".join([*lines, b"", b""])
