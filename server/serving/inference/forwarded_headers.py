"""Headers of calls that become parameters of requests, by the patterns of --grpc-header-forward-pattern and of HTTP's.

They are for Python models, steps of ensembles included: what serves all other models reads no parameters.
"""

import re
from collections.abc import Mapping
from typing import Final

from gangway.server.requests.remembered import Remembered
from gangway.server.serving.call import Call
from gangway.server.tracing.record import GRPC, HTTP

MAX_NAME_CHARACTERS: Final = 256  # of a header that is looked at: patterns may go over a name many times
NONE: Final[Mapping[str, str]] = {}


class ForwardedHeaders:
    """Which headers are forwarded: those whose name has a match of the front end's pattern. Empty patterns: none."""

    def __init__(self, grpc_pattern: str = "", http_pattern: str = "") -> None:
        given = {GRPC: grpc_pattern, HTTP: http_pattern}
        self._patterns = {front_end: re.compile(text) for front_end, text in given.items() if text}
        self._known: Remembered[tuple[str, str], bool] = Remembered()

    def of(self, call: Call) -> Mapping[str, str]:
        """Return the headers of a call that are forwarded. Of one that is there twice the last value counts."""
        pattern = self._patterns.get(call.front_end)
        if pattern is None:
            return NONE
        found = {}
        for name, value in call.spelled_metadata():
            key = call.front_end, name
            matches = self._known.known.get(key)
            if matches is None:
                matches = len(name) <= MAX_NAME_CHARACTERS and pattern.search(name) is not None
                self._known.add(key, matches, len(name))
            if matches:
                content = value.encode("latin-1") if isinstance(value, str) else value  # as it has come
                found[name] = content.decode(errors="replace")
        return found
