"""`python -m gangway.compiler.check`: what will serve the parts of ONNX files. `gangway check` starts it."""

import argparse
import json
import shutil
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from gangway.artifact.cache import add_dimension
from gangway.base.files import words_of
from gangway.compiler.errors import ModelError
from gangway.compiler.key import require_compiler

if TYPE_CHECKING:
    from gangway.compiler.check.file_check import FileCheck

MAX_COLUMNS = 100
ROWS = {"any": "any number of rows", "each": "each number of rows that requests have", "fixed": "the rows of the file"}


def main(argv: Sequence[str]) -> int:
    """Say it for each file; return 1 if nothing serves one of them, or one cannot be read."""
    options = _parser().parse_args(argv)
    try:
        require_compiler()
        from gangway.compiler.check.file_check import ServedBy, check_file  # noqa: PLC0415 - of these packages

        checks: dict[str, FileCheck] = {}
        for number, file in enumerate(files := _files(options.path), 1):
            if sys.stderr.isatty():
                print(f"{number}/{len(files)} {file} ...", end="\r", file=sys.stderr, flush=True)
            checks[str(file)] = found = check_file(file, dict(options.dimension))
            if not options.json:
                print("\n".join(_lines(str(file), found)), flush=True)
    except (ModelError, OSError) as error:
        print(f"gangway check: {words_of(error)}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps([{"file": file, **asdict(found)} for file, found in checks.items()], indent=1))
    elif len(checks) > 1:
        counts = Counter(_verdict(found) for found in checks.values())
        print(f"\n{len(checks)} files: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}")
    return int(any(found.served_by is ServedBy.NOTHING for found in checks.values()))


def _files(paths: Sequence[Path]) -> list[Path]:
    """Return the files, and all ONNX files below the folders. Raises ModelError if there are none."""
    files = [file for path in paths for file in (sorted(path.rglob("*.onnx")) if path.is_dir() else [path])]
    if not files:
        raise ModelError(f"there is no .onnx file in {paths[0]}")
    return files


def _verdict(found: "FileCheck") -> str:
    return f"served by {found.served_by}" if found.served_by != "nothing" else "cannot be served"


def _lines(file: str, found: "FileCheck") -> Iterator[str]:
    """Yield what is printed of a file."""
    columns = min(shutil.get_terminal_size().columns, MAX_COLUMNS)
    yield from _wrapped(f"{file}: {_verdict(found)}", columns)
    if not found.layers:
        yield from _wrapped(f"  why: {found.reason}", columns)
        return
    yield from _wrapped(f"  rows: {ROWS[found.rows]}{f', since {found.reason}' if found.reason else ''}", columns)
    if found.open_sizes:
        read = ", ".join(f"{name}={found.sizes[name]}" for name in found.open_sizes)
        yield from _wrapped(f"  sizes: each that requests have; read with {read}", columns)
    by_tvm = f", {', '.join(found.by_tvm)} by TVM" if found.by_tvm else ""
    yield from _wrapped(f"  layers: {found.layers}{by_tvm}", columns)
    for island in found.islands:
        nodes = ", ".join(name if count == 1 else f"{count} {name}" for name, count in island.nodes.items())
        yield from _wrapped(f"  {'tail' if island.is_tail else 'island'}: {nodes}: {island.reason}", columns)


def _wrapped(line: str, columns: int) -> list[str]:
    return textwrap.wrap(line, columns, subsequent_indent="       ", break_on_hyphens=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m gangway.compiler.check", description=__doc__)
    parser.add_argument("path", type=Path, nargs="+", metavar="PATH", help="an .onnx file, or a folder of such files")
    parser.add_argument("--json", action="store_true", help="print a list of objects, one for each file")
    add_dimension(parser)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
