"""What differs from Triton, and why: the table of `docs/reference/triton.md`, by which the comparison judges."""

from collections.abc import Sequence

from benchmarks.differential.known import exchanges, executions, models
from benchmarks.differential.known.entry import Known

KNOWN: Sequence[Known] = (*exchanges.KNOWN, *executions.KNOWN, *models.KNOWN)
