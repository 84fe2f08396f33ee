"""The workers' table of clients' regions under sanitizers: see regions.c."""

import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = [HERE / "regions.c", HERE.parent.parent / "executor" / "native" / "region.c"]


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_places_and_shrinking(sanitizer, tmp_path):
    binary = tmp_path / "regions"
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    subprocess.run(["gcc", *flags, *map(str, SOURCES), "-pthread", "-o", str(binary)], check=True)
    done = subprocess.run([str(binary)], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
