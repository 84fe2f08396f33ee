"""What measurements do most of the time, made short."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gangway.measure import interference, machine


@contextmanager
def small_cache() -> Iterator[None]:
    """Let the last-level cache be small: measurements read several times as much as it holds, again and again."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (interference, machine):
            patch.setattr(module, "l3_bytes", lambda: 1 << 20)
        yield
