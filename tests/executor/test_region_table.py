"""The workers' table of clients' regions under sanitizers: see regions.c."""

import subprocess
from pathlib import Path

import pytest

from tests.executor.sanitized import SANITIZERS, build

HERE = Path(__file__).parent
SOURCES = [HERE / "regions.c", HERE.parent.parent / "executor" / "native" / "region.c"]


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_places_and_shrinking(sanitizer, programmes):
    binary = build(programmes, SOURCES, "regions", sanitizer)
    done = subprocess.run([str(binary)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
