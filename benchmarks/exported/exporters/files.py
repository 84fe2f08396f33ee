"""How a script of an exporter's environment writes its files, each with a description of requests beside it.

It imports nothing but the standard library: each script runs in an environment of its own.
"""

import argparse
import importlib.metadata
import json
import re
import shutil
import sys
import time
import traceback
from pathlib import Path

_FILES = {}


def tensor(*shape, dtype="float32", draw="normal", low=0.0, high=1.0):
    """Describe an input: `shape` has numbers and names of sizes; `draw`: normal, uniform, integers, ones, mask, ids."""
    return {"shape": list(shape), "dtype": dtype, "draw": draw, "low": low, "high": high}


def tokens(*shape, high=1000):
    """Describe numbers of tokens."""
    return tensor(*shape, dtype="int64", draw="integers", low=5, high=high)


def mask(*shape):
    """Describe an attention mask: 1, and 0 at the end of all rows but the first."""
    return tensor(*shape, dtype="int64", draw="mask")


def ones(*shape, dtype="int64"):
    """Describe an input of ones."""
    return tensor(*shape, dtype=dtype, draw="ones")


def words(*shape, choices):
    """Describe strings out of `choices`."""
    return {"shape": list(shape), "dtype": "object", "draw": "words", "choices": list(choices)}


def sizes(names, *rows):
    """Return what is asked: sizes("B T", (1, 32), (4, 32)) is [{"B": 1, "T": 32}, {"B": 4, "T": 32}]."""
    return [dict(zip(names.split(), row, strict=True)) for row in rows]


BATCHES = sizes("B", (1,), (3,))


def add(name, write, inputs, asks=None, tolerance=1e-3, packages=()):
    """Add a file: `write(path)` makes it. `inputs`, `asks`: as of `tensor` and `sizes`; asks: batches of 1 and 3."""
    asks = BATCHES if asks is None else asks
    _FILES[name] = (write, {"inputs": inputs, "asks": asks, "tolerance": tolerance}, tuple(packages))


def main(exporter, packages):
    """Write the files named on the command line, or all, to a folder; print a line for each. `packages`: of interest."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="regular expressions; none: all")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name, (write, description, more) in _FILES.items():
        path = options.folder / f"{name}.onnx"
        wanted = not options.names or any(re.fullmatch(pattern, name) for pattern in options.names)
        if not wanted or path.with_suffix(".json").exists():
            continue
        start = time.monotonic()
        try:
            write(path)
        except Exception as error:
            failed += 1
            shown = " ".join(str(error).split())[-300:]
            print(f"failed  {path.name}: {type(error).__name__}: {shown}", flush=True)
            path.with_suffix(".err").write_text(traceback.format_exc())
            continue
        versions = {package: importlib.metadata.version(package) for package in (*packages, *more)}
        described = {"exporter": exporter, "versions": versions, **description}
        path.with_suffix(".json").write_text(json.dumps(described) + "\n")
        print(f"written {path} {time.monotonic() - start:.1f} s, {path.stat().st_size >> 10} KB", flush=True)
    sys.exit(failed > 0)


def moved(source, path):
    """Move a file that an exporter has put elsewhere."""
    shutil.move(source, path)
