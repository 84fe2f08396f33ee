"""Answers that differ from the recorded ones deliberately, and why.

The corpus was recorded from gRPC's own core and from uvicorn. Where another server is right, too, or more so, the case
stands here by protocol, server and name.
"""

from collections.abc import Mapping

_ANSWERED_FIRST = "a request before what is no HTTP is answered, even if both come in one piece"
_MALFORMED = "RFC 9113, 8.1.1: the stream of a malformed request is reset with PROTOCOL_ERROR"
_NO_REPR = "the path is a text, without Python's mark of bytes"
_NAMES = "GET /v2/models names the models that are ready, as KServe's servers do"
_KEPT = "HTTP/1.0 is kept alive if the client wishes so, as by Triton and for ApacheBench"
_NOTHING = "a body without bytes is not inflated: a session's headers come with requests that have none"

DELIBERATE: Mapping[tuple[str, str, str], str] = {
    ("http", "plain", "paths: GET /v2/models"): _NAMES,
    ("http", "plain", "fuzz: head 2"): _NAMES,
    ("http", "plain", "fuzz: head 44"): _NAMES,
    ("http", "plain", "connections: HTTP/1.0 kept alive"): _KEPT,
    ("http", "plain", "bodies: gzip of nothing"): _NOTHING,
    ("http", "plain", "fuzz: head 26"): _ANSWERED_FIRST,
    ("http", "plain", "fuzz: head 47"): _ANSWERED_FIRST,
    ("grpc", "plain", "calls: content type of JSON"): "a request that is none of gRPC's is answered with 415",
    ("grpc", "plain", "calls: another te"): _MALFORMED,
    ("grpc", "plain", "calls: no method"): _MALFORMED,
    ("grpc", "plain", "calls: no scheme"): _MALFORMED,
    ("grpc", "plain", "calls: no authority"): _MALFORMED,
    ("grpc", "plain", "calls: no path"): _MALFORMED,
    ("grpc", "plain", "calls: a path that is empty"): _MALFORMED,
    ("grpc", "plain", "calls: a path without a slash"): _MALFORMED,
    ("grpc", "plain", "calls: a connection header"): _MALFORMED,
    ("grpc", "plain", "calls: blanks around a value"): _MALFORMED,
    ("grpc", "plain", "calls: metadata of too much"): "all metadata count, not the longest value alone",
    ("grpc", "plain", "messages: no message of a metadata method"): _NO_REPR,
}
