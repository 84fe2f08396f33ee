"""Compressed requests, inflated up to a limit: a few kilobytes can stand for gigabytes."""

import zlib

import grpc
from gangway.server.errors import RequestError, invalid

# No message of the protocol begins with these: the first is no tag of protobuf, the others are of an unknown field.
_GZIP = b"\x1f\x8b\x08"
_DEFLATE = frozenset(bytes([0x78, flags]) for flags in range(256) if (0x78 * 256 + flags) % 31 == 0)
_FIRST_BYTES = (_GZIP[0], 0x78)
_EITHER = 32 + zlib.MAX_WBITS  # zlib's word for: gzip or deflate, look at the header


def inflated(message: bytes, max_bytes: int) -> bytes:
    """Return the message as it was before its sender compressed it by gzip or deflate; others as they are.

    Raises RequestError: RESOURCE_EXHAUSTED if it has more than `max_bytes`, INVALID_ARGUMENT if it is damaged.
    """
    if not message or message[0] not in _FIRST_BYTES:
        return message
    if not (message.startswith(_GZIP) or message[:2] in _DEFLATE):
        return message
    inflater = zlib.decompressobj(_EITHER)
    try:
        result = inflater.decompress(message, max_bytes + 1)
    except zlib.error as error:
        invalid(f"the request's compressed message is damaged: {error}")
    if len(result) > max_bytes:
        text = f"Received message larger than max: more than {max_bytes} bytes after decompression"
        raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
    if not inflater.eof or inflater.unused_data:
        invalid("the request's compressed message is damaged: it has no proper end")
    return result
