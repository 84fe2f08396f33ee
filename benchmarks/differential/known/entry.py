"""One difference from Triton, and why it is meant."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """One difference that is meant.

    `area`, `what`, `why`: for the table. `difference`: a regular expression of the lines that `compare.Difference`
    writes, `PLACE: TRITON -> GANGWAY`; `cases`: one of the names of cases. `surprises`: what shows it, of those that no
    reader would guess; they stand in `docs/reference/differences.md`.
    """

    area: str
    what: str
    why: str
    difference: str
    cases: str = ""
    surprises: str = ""

    def covers(self, case: str, text: str) -> bool:
        """Whether a difference is this one."""
        return bool(re.search(self.cases, case) and re.search(self.difference, text, re.DOTALL))


ERROR = r"^[\d.]*(message|error_message|body\.error|events\.\d+\.error): "
TOLD = r"outputs\.y\.(data|binary): "  # by a model, in its output
