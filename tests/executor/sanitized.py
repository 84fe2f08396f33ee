"""Builds C programmes that exercise the native part, under a sanitizer."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

SANITIZERS = ("thread", "address,undefined")
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-fno-sanitize-recover=all")
NATIVE = Path(__file__).parents[2] / "executor" / "native"


def build(kept, sources, name, sanitizer, *more_flags):
    """Compile and link `sources`, unless the folder `kept` has the same programme; return its path.

    Of each name and sanitizer only the last one is kept.
    """
    flags = [*FLAGS, f"-fsanitize={sanitizer}", *more_flags]
    folder = kept / f"{name}-{sanitizer}"
    binary = folder / _key(sources, flags)
    if not binary.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        unfinished = binary.with_suffix(f".{os.getpid()}")
        subprocess.run(["gcc", *flags, *map(str, sources), "-pthread", "-o", str(unfinished)], check=True)
        unfinished.rename(binary)
    return binary


def _key(sources, flags):
    """A hash of compiler, flags, sources and all headers that these may include."""
    compiler = subprocess.run(["gcc", "--version"], capture_output=True, check=True).stdout
    key = hashlib.sha256(compiler + "\0".join(flags).encode())
    for path in (*sorted(sources), *sorted(NATIVE.glob("*.h")), *sorted(Path(__file__).parent.glob("*.h"))):
        key.update(path.name.encode() + path.read_bytes())
    return key.hexdigest()
