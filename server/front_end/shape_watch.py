"""Which sizes of symbolic dimensions a front end sees, and what it tells the supervisor about them."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

from gangway.server.messages import ShapeWanted
from gangway.server.models.served import ServedModel

Sizes = tuple[int, ...]

ASK_AGAIN_S = 60.0  # the supervisor may have had too much to do
MAX_REMEMBERED = 1024


class ShapeWatch:
    """Asks for each size once, and again after a while. `tell` says whether the supervisor could be told."""

    def __init__(self, tell: Callable[[ShapeWanted], bool]) -> None:
        self._tell = tell
        self._lock = threading.Lock()
        self._asked: OrderedDict[tuple[str, int, Sizes], float] = OrderedDict()
        self._used: dict[tuple[str, int, Sizes], float] = {}

    def used(self, model: ServedModel, sizes: Sizes) -> None:
        """A request of these sizes has been answered. Safe for threads."""
        now = time.monotonic()
        key = (model.name, model.version, sizes)
        if sizes in model.compiled:
            self._used[key] = now
            return
        with self._lock:
            if now - self._asked.get(key, -ASK_AGAIN_S) < ASK_AGAIN_S:
                return
            self._asked[key] = now
            if len(self._asked) > MAX_REMEMBERED:
                self._asked.popitem(last=False)
            oldest = sorted(model.compiled, key=lambda other: self._used.get((model.name, model.version, other), 0.0))
            self._used = {
                known: at for known, at in list(self._used.items()) if known[:2] != key[:2] or known[2] in oldest
            }
            if not self._tell(ShapeWanted(model.name, model.version, sizes, tuple(oldest))):
                del self._asked[key]
