"""A scrape's answer, in the text format of Prometheus, which is the one that Triton serves."""

import threading
import time
from collections.abc import Iterable
from itertools import chain

from gangway.server.metrics.gangway_families import gangway_families
from gangway.server.metrics.reading import Source
from gangway.server.metrics.triton_families import triton_families
from gangway.server.options.metrics import MetricsOptions

STRETCH_SECONDS = 0.0005  # so long at a time the interpreter is kept from requests, about
PAUSE_SECONDS = 0.0002


class Exposition:
    """Writes what `source` reads. Safe for threads: they take turns."""

    def __init__(self, source: Source, options: MetricsOptions) -> None:
        self._source = source
        self._options = options
        self._lock = threading.Lock()

    def render(self) -> bytes:
        """Return the metrics as they are now. Raises OSError if the machine's cannot be read."""
        with self._lock:
            reading = self._source.read()
            families = chain(triton_families(reading, self._options), gangway_families(reading))
            return _with_pauses(families).encode()


def _with_pauses(families: Iterable[str]) -> str:
    """Return the families, and let requests be answered in between."""
    texts = []
    begin_s = time.monotonic()
    for text in families:
        texts.append(text)
        if time.monotonic() - begin_s > STRETCH_SECONDS:
            time.sleep(PAUSE_SECONDS)
            begin_s = time.monotonic()
    return "".join(texts)
