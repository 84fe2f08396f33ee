"""What the scripts that other people's clients run in share: each check is named, and says how it ended.

Imports nothing but the standard library: the scripts have environments of their own.
"""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

Checks = Sequence[tuple[str, Callable[[], Any]]]
ErrorT = TypeVar("ErrorT", bound=Exception)


def run_checks(checks: Checks) -> int:
    """Run them in their order; print a line of JSON for each; return 1 if one failed."""
    failed = 0
    for name, check in checks:
        try:
            check()
            problem = ""
        except Exception as error:  # whatever a client raises
            problem = f"{type(error).__name__}: {error}"[:300]
        failed += bool(problem)
        print(json.dumps({"check": name, "problem": problem}), flush=True)
    return int(failed > 0)


def expect(condition: bool, what: Any) -> None:
    """Raise AssertionError unless it is so, also when Python ignores assertions."""
    if not condition:
        raise AssertionError(what)


def refused(*kinds: type[ErrorT]) -> AbstractContextManager[list[ErrorT]]:
    """Expect one of these exceptions; it is in the list afterwards."""

    @contextmanager
    def expecting() -> Any:
        caught: list[ErrorT] = []
        try:
            yield caught
        except kinds as error:
            caught.append(error)
        expect(bool(caught), "nothing was raised")

    return expecting()


def addresses() -> tuple[str, str]:
    """Return the server's addresses for HTTP and gRPC, as the script got them."""
    return sys.argv[1], sys.argv[2]
