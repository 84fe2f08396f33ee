"""Answers that differ from the recorded ones deliberately, and why.

The corpus was recorded from gRPC's own core and from uvicorn. Where another server is right, too, or more so, the case
stands here by protocol, server and name.
"""

from collections.abc import Mapping

_ANSWERED_FIRST = "a request before what is no HTTP is answered, even if both come in one piece"

DELIBERATE: Mapping[tuple[str, str, str], str] = {
    ("http", "plain", "fuzz: head 26"): _ANSWERED_FIRST,
    ("http", "plain", "fuzz: head 47"): _ANSWERED_FIRST,
}
