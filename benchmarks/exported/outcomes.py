"""What will serve each exported file, as the static check says, and what is expected.

python -m benchmarks.exported.outcomes            compares the archives with expected.json
python -m benchmarks.exported.outcomes --update   writes expected.json
python -m benchmarks.exported.outcomes --pack [--cache DIR]   makes the archives of the files of `make`, before
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from benchmarks.exported.graphs import ARCHIVES, Exported, exported_files, pack, unpack
from benchmarks.exported.make import CACHE
from gangway.compiler.check.file_check import CompiledRows, FileCheck, ServedBy, check_file

BEST = "kernels, any rows"
EXPECTED = Path(__file__).parent / "expected.json"


def main() -> int:
    """Return 1 if an outcome is not as expected."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--update", action="store_true", help="write what is found")
    parser.add_argument("--gains", action="store_true", help="only files that kernels do not serve for any rows")
    parser.add_argument("--pack", action="store_true", help="make the archives anew")
    parser.add_argument(
        "--cache", type=Path, default=CACHE, metavar="DIR", help=f"of benchmarks.exported.make ({CACHE})"
    )
    options = parser.parse_args()
    if options.pack:
        for folder in sorted(each for each in options.cache.iterdir() if each.is_dir() and each.name != "environments"):
            pack(exported_files(folder), ARCHIVES / f"{folder.name}.tar.xz")
    expected = read_expected()
    found = {
        name: said
        for name, said in expected.items()
        if options.gains and said.startswith(BEST) and "islands" not in said
    }
    for archive in sorted(ARCHIVES.glob("*.tar.xz")):
        with tempfile.TemporaryDirectory() as folder:
            files = [file for file in unpack(archive, Path(folder)) if file.name not in found]
            found |= {file.name: outcome(check(file)) for file in files}
    for line in changes(found, expected):
        print(line)
    if options.update:
        EXPECTED.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        return 0
    return int(found != expected)


def read_expected() -> dict[str, str]:
    """Return the outcomes by the names of files."""
    expected: dict[str, str] = json.loads(EXPECTED.read_text()) if EXPECTED.exists() else {}
    return expected


def check(file: Exported) -> FileCheck:
    """Return what is said of a file with the sizes of its first request."""
    return check_file(file.path, file.sizes(file.asks[0]))


def outcome(found: FileCheck) -> str:
    """Return what is said of a file in one line: engine, rows, sizes, islands."""
    if found.served_by in (ServedBy.ONNXRUNTIME, ServedBy.NOTHING):  # which of them depends on the machine's locales
        return "no kernels"
    rows = {CompiledRows.ANY: "any rows", CompiledRows.EACH: "each number of rows", CompiledRows.FIXED: "fixed rows"}[
        found.rows
    ]
    nodes = ", ".join(sorted({name for island in found.islands for name in island.nodes}))
    return f"kernels, {rows}{', each size' * bool(found.open_sizes)}{f'; islands: {nodes}' if nodes else ''}"


def changes(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Return a line for each file whose outcome is another one than expected, or that only one side has."""
    return [
        f"{name}: {expected.get(name, 'not known')} -> {found.get(name, 'gone')}"
        for name in sorted(found.keys() | expected.keys())
        if found.get(name) != expected.get(name)
    ]


if __name__ == "__main__":
    sys.exit(main())
