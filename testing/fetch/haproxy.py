"""Fetch HAProxy for tests and benchmarks of `gangway route` into `tools/`, which git ignores, unless it is there.

It comes from Debian's packages. Nothing is installed; root is not needed.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

from gangway.cluster.haproxy import RouterError, find_haproxy
from testing.fetching import TOOLS, FetchError, debian_package, report, succeeds

FOLDER = TOOLS / "haproxy"
PACKAGES = ("haproxy", "liblua5.3-0", "libopentracing-c-wrapper0", "libopentracing1")
ADVICE = "install HAProxy 2.6 or newer by hand"


def with_haproxy() -> dict[str, str]:
    """Return the environment in which `gangway route` finds what was fetched."""
    return {**os.environ, "PATH": f"{os.environ.get('PATH', '')}:{FOLDER}"}


def missing_haproxy() -> str:
    """Return why there is no HAProxy, "" if there is one."""
    try:
        find_haproxy()
    except RouterError as error:
        return "" if (FOLDER / "haproxy").exists() else f"{error}; or run python -m testing.fetch.haproxy"
    return ""


def fetch() -> None:
    """Make `tools/haproxy`, unless the machine has HAProxy. Raises FetchError."""
    if not missing_haproxy():
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TOOLS) as name:
        contents = [debian_package(package, Path(name), ADVICE) for package in PACKAGES]
        shutil.copy(contents[0] / "usr/sbin/haproxy", FOLDER / "haproxy.bin")
        for content in contents[1:]:
            for library in content.rglob("*.so.*"):
                shutil.copy(library, FOLDER / library.name)
    starter = FOLDER / "haproxy"
    starter.write_text('#!/bin/sh\nhere="$(dirname "$0")"\nLD_LIBRARY_PATH="$here" exec "$here/haproxy.bin" "$@"\n')
    starter.chmod(0o755)
    if not succeeds([str(starter), "-v"]):
        starter.unlink()
        raise FetchError(f"{FOLDER}/haproxy.bin was fetched, but does not start: {ADVICE}")


if __name__ == "__main__":
    sys.exit(report("fetch_haproxy", fetch))
