"""Answers that differ from the recorded ones deliberately, and why.

The corpus was recorded from gRPC's own core and from uvicorn. Where another server is right, too, or more so, the case
stands here by protocol, server and name.
"""

from collections.abc import Mapping

DELIBERATE: Mapping[tuple[str, str, str], str] = {}
