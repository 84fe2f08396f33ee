"""Fetch Triton's own load generator, perf_analyzer, into `tools/`, which git ignores.

The binary comes from the last wheel of tritonclient that holds one. It needs two shared libraries: CUDA's runtime
(PyPI; no GPU is used) and libb64, which only Debian and its descendants package by this name. Nothing is installed;
root is not needed. The newest one (`--newest`) has a wheel of its own, made for a newer C library than many machines
have. Those of Debian's next release come with it, and a script that starts it with them.
"""

import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

from testing.fetching import TOOLS, FetchError, debian_package, pip_download, report, succeeds

BINARY = TOOLS / "perf_analyzer"
LIBRARIES = TOOLS / "lib"

WHEEL = "tritonclient==2.50.0"  # later wheels hold no perf_analyzer
WHEEL_MEMBER = "tritonclient-2.50.0.data/data/bin/perf_analyzer"
CUDA_WHEEL = "nvidia-cuda-runtime-cu12==12.9.79"
CUDA_MEMBER = "nvidia/cuda_runtime/lib/libcudart.so.12"
DEBIAN_PACKAGE = "libb64-0d"
LIBB64 = "libb64.so.0d"
NEWEST = TOOLS / "perf_analyzer_newest" / "perf_analyzer"
NEWEST_WHEEL = "perf_analyzer==2.60.0"
START = """#!/bin/sh
here=$(dirname "$(realpath "$0")")
exec "$here/lib/ld-linux-x86-64.so.2" --library-path "$here/lib" "$here/binary" "$@"
"""
NEWEST_PLATFORMS = ("manylinux_2_38_x86_64",)
NEWEST_MEMBER = "perf_analyzer/bin/perf_analyzer"
SUITE, SUITE_PACKAGES = "trixie", ("libc6", "libgcc-s1", "libssl3t64", "libstdc++6", "libzstd1", "zlib1g")
SUITE_LIBRARIES = "usr/lib/x86_64-linux-gnu"
PLATFORMS = ("manylinux1_x86_64", "manylinux2014_x86_64")  # newer pips reject the oldest tags unless they are named


def perf_analyzer_environment() -> dict[str, str]:
    """Return the environment that the binary must be started with."""
    return {**os.environ, "LD_LIBRARY_PATH": str(LIBRARIES)}


def fetch() -> None:
    """Make `tools/perf_analyzer` and `tools/lib`, unless they are there. Raises FetchError."""
    if _works():
        return
    LIBRARIES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=TOOLS) as name:
        scratch = Path(name)
        _extract(pip_download(WHEEL, scratch, PLATFORMS), WHEEL_MEMBER, BINARY)
        _extract(pip_download(CUDA_WHEEL, scratch, PLATFORMS), CUDA_MEMBER, LIBRARIES / "libcudart.so.12")
        _fetch_libb64(scratch)
    BINARY.chmod(0o755)
    if not _works():
        raise FetchError(
            f"{BINARY} was fetched, but does not start: run `LD_LIBRARY_PATH={LIBRARIES} {BINARY} --version`"
        )


def _works() -> bool:
    if not BINARY.exists():
        return False
    command = [str(BINARY), "--version"]
    return succeeds(command, perf_analyzer_environment())


def _extract(wheel: Path, member: str, target: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink)


def _fetch_libb64(scratch: Path) -> None:
    extracted = debian_package(DEBIAN_PACKAGE, scratch, f"put {LIBB64} into {LIBRARIES} by hand")
    (library,) = (path for path in extracted.rglob(f"{LIBB64}*") if not path.is_symlink())
    shutil.copy(library, LIBRARIES / LIBB64)


def fetch_newest() -> Path:
    """Make `tools/perf_analyzer_newest`, unless it is there; return the program. Raises FetchError."""
    if NEWEST.exists() and succeeds([str(NEWEST), "--version"]):
        return NEWEST
    shutil.rmtree(NEWEST.parent, ignore_errors=True)
    NEWEST.parent.mkdir(parents=True)
    binary, libraries = NEWEST.with_name("binary"), NEWEST.with_name("lib")
    with tempfile.TemporaryDirectory(dir=TOOLS) as name:
        scratch = Path(name)
        _extract(pip_download(NEWEST_WHEEL, scratch, NEWEST_PLATFORMS), NEWEST_MEMBER, binary)
        for package in SUITE_PACKAGES:
            content = debian_package(package, scratch, "run it on a machine with glibc 2.38", SUITE)
            shutil.copytree(content / SUITE_LIBRARIES, libraries, symlinks=True, dirs_exist_ok=True)
    binary.chmod(0o755)
    NEWEST.write_text(START)
    NEWEST.chmod(0o755)
    if not succeeds([str(NEWEST), "--version"]):
        raise FetchError(f"{NEWEST} was fetched, but does not start: run `{NEWEST} --version`")
    return NEWEST


if __name__ == "__main__":
    if sys.argv[1:] == ["--newest"]:
        sys.exit(report("fetch_perf_analyzer", fetch_newest, lambda: f"perf_analyzer: {NEWEST}"))
    sys.exit(report("fetch_perf_analyzer", fetch, lambda: f"perf_analyzer: {BINARY}"))
