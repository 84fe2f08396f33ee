"""Requests that are handed over to an instance of a Python model by native code, under sanitizers (handover.c)."""

import subprocess
from pathlib import Path

import pytest

from tests.executor.sanitized import SANITIZERS, build

HERE = Path(__file__).parent
SOURCES = [HERE / "handover.c", HERE.parent.parent / "executor" / "native" / "instance.c"]


@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_answers_of_all_kinds(programmes: Path, sanitizer: str) -> None:
    binary = build(programmes, SOURCES, "handover", sanitizer)
    done = subprocess.run([str(binary)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
