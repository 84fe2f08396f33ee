"""Rows that outlive a run that is cut off."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from testing.report import Row


@dataclass(frozen=True)
class KeptRows:
    """Rows of the parts of a run that have ended, in a file."""

    path: Path

    def of(self, part: str, make: Callable[[], Iterable[Row]], anew: bool) -> list[Row]:
        """Return the rows that are kept of a part; or make them, also if they shall be made `anew`, and keep them."""
        kept: dict[str, list[Row]] = json.loads(self.path.read_text()) if self.path.exists() else {}
        if anew or part not in kept:
            kept[part] = list(make())
            self.path.write_text(json.dumps(kept, indent=1))
        return kept[part]
