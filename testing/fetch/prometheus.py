"""Fetch Prometheus for the tests of `deploy/compose`, unless the machine has it, into `tools/`, which git ignores.

It comes from Debian's packages. Nothing is installed, no service is started, and root is not needed.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from testing.fetching import TOOLS, FetchError, debian_package, report, succeeds

FOLDER = TOOLS / "prometheus"
BINARIES = ("prometheus", "promtool")
ADVICE = "install Prometheus 2.42 or newer by hand"


def find(binary: str) -> str | None:
    """Return where a programme of Prometheus is: of the machine, else what was fetched; None if it is nowhere."""
    return shutil.which(binary) or shutil.which(binary, path=str(FOLDER))


def fetch() -> None:
    """Make `tools/prometheus`, unless the machine has Prometheus. Raises FetchError."""
    if all(map(find, BINARIES)):
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TOOLS) as name:
        content = debian_package("prometheus", Path(name), ADVICE)
        for binary in BINARIES:
            shutil.copy(content / "usr/bin" / binary, FOLDER / binary)
            if not succeeds([str(FOLDER / binary), "--version"]):
                raise FetchError(f"{FOLDER / binary} was fetched, but does not start: {ADVICE}")


if __name__ == "__main__":
    sys.exit(report("fetch_prometheus", fetch, lambda: f"prometheus: {find('prometheus')}"))
