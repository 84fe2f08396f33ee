"""Builds C programmes that exercise the native part, under a sanitizer."""

import hashlib
import os
import subprocess
from pathlib import Path

SANITIZERS = ("thread", "address,undefined")
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-fno-sanitize-recover=all")
SMALL = ("-DRANK_COPY_BYTES=512", "-DCOPY_BYTES=512")  # rows are small here, and are to be copied by several ranks
HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "executor" / "native"


def build(kept, sources, name, sanitizer):
    """Compile and link `sources`, unless the folder `kept` has the same programme; return its path.

    Programmes share what has been compiled. Of each name and sanitizer only the last one is kept.
    """
    flags = [*FLAGS, *SMALL, f"-fsanitize={sanitizer}"]
    common = hashlib.sha256(subprocess.run(["gcc", "--version"], capture_output=True, check=True).stdout)
    common.update("\0".join(flags).encode())
    for header in (*sorted(NATIVE.glob("*.h")), *sorted(HERE.glob("*.h"))):  # all that sources may include
        common.update(header.name.encode() + header.read_bytes())

    def made(stem, content, *command):
        key = common.copy()
        key.update(content)
        path = folder / f"{stem}.{key.hexdigest()}"
        if not path.exists():
            unfinished = path.with_suffix(f".{os.getpid()}")
            subprocess.run(["gcc", *flags, *map(str, command), "-o", str(unfinished)], check=True)
            for old in folder.glob(f"{stem}.{'?' * len(key.hexdigest())}"):
                old.unlink(missing_ok=True)
            unfinished.rename(path)
        return path

    folder = kept / sanitizer
    folder.mkdir(parents=True, exist_ok=True)
    objects = [made(f"{path.parent.name}-{path.stem}", path.read_bytes(), "-c", path) for path in sources]
    return made(f"programme-{name}", "".join(path.name for path in objects).encode(), *objects, "-pthread")
