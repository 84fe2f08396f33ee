"""Writes the table of docs/measurements/exported.md: outcomes by exporter, and what comparisons have found.

    python -m benchmarks.exported.table [--compared FILE]

`--compared`: the rows of `benchmarks.exported.compare`, by default those of the last table.
"""

import argparse
import json
import lzma
import sys
import tarfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.exported.graphs import ARCHIVES
from benchmarks.exported.outcomes import read_expected

PAGE = Path(__file__).parents[2] / "docs" / "measurements" / "exported.md"
COMPARED = Path(__file__).parent / "compared.json"
KEPT = ("compared", "engine", "error", "flat", "refusals", "sizes", "varied", "wrong")
BEGIN, END = "<!-- generated: exported -->\n", "<!-- end -->"
HEAD = ("exporter", "files", "kernels, any rows and sizes", "kernels, fixed or each number of rows", "with islands",
        "onnxruntime", "compared", "largest difference", "wrong", "refuses", "refused by both")  # fmt: skip
MADE_OF_OTHERS = {  # how names of files begin that are made of other files
    "dynamic_": "onnxruntime: quantised",
    "qdq_": "onnxruntime: quantised",
    "qoperator_": "onnxruntime: quantised",
    "four_bits_": "onnxruntime: quantised",
    "eight_bits_": "onnxruntime: quantised",
    "half_ort_": "float16 of others",
    "half_": "float16 of others",
    "optimised_": "onnxruntime: optimised",
    "saved_": "onnxruntime: optimised",
    "slim_": "onnxslim, onnxsim",
    "simplified_": "onnxslim, onnxsim",
}
TOGETHER = {  # packages of few files each
    "catboost, lightgbm, xgboost": ("catboost", "lightgbm", "xgboost-cpu"),
    "flax, jax2onnx": ("flax", "jax2onnx"),
}
MAIN = ("torchvision", "timm", "transformers", "lightgbm", "xgboost-cpu", "catboost", "scikit-learn", "keras", "flax")


@dataclass
class Row:
    """What is counted of an exporter."""

    counts: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    errors: list[float] = field(default_factory=list)

    def cells(self) -> dict[str, int | str]:
        """Return what stands in the columns."""
        return {**self.counts, **({"largest difference": f"{max(self.errors):.0e}"} if self.errors else {})}


def main() -> int:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--compared", type=Path, metavar="FILE", help="rows of benchmarks.exported.compare")
    options = parser.parse_args()
    if options.compared:
        rows = json.loads(options.compared.read_text())
        kept = [json.dumps([name, *(row[key] for key in KEPT)]) for name, row in sorted(rows.items())]
        COMPARED.write_text("[\n" + ",\n".join(kept) + "\n]\n")
    compared = {name: dict(zip(KEPT, row, strict=True)) for name, *row in json.loads(COMPARED.read_text())}
    before, rest = PAGE.read_text().split(BEGIN)
    PAGE.write_text(before + BEGIN + "\n".join(table(read_expected(), compared)) + "\n" + END + rest.split(END)[1])
    return 0


def table(expected: Mapping[str, str], compared: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of the table."""
    rows: dict[str, Row] = defaultdict(Row)
    for name, described in _descriptions():
        row = rows[_exporter(name, described["versions"])]
        row.counts["files"] += 1
        row.counts[_column(expected[name])] += 1
        found = compared.get(name)
        if found is None:
            continue
        shows = bool(found["compared"] and not found["flat"])
        row.counts["compared"] += shows
        row.counts["wrong"] += bool(found["wrong"])
        row.counts["refuses"] += bool(found["refusals"])
        row.counts["refused by both"] += not found["compared"] and not found["refusals"]
        if shows and not found["wrong"]:
            row.errors.append(found["error"])
    total = Row(errors=[error for row in rows.values() for error in row.errors])
    for row in rows.values():
        for column, count in row.counts.items():
            total.counts[column] += count
    columns = [column for column in HEAD if total.cells().get(column, column == HEAD[0])]
    yield f"|{'|'.join(columns)}|"
    yield "|---|" + "---:|" * (len(columns) - 1)
    shares = {column: f"{count / total.counts['files']:.0%}" for column, count in total.counts.items()}
    cells: dict[str, Mapping[str, int | str]] = {title: row.cells() for title, row in sorted(rows.items())}
    cells |= {"all": total.cells(), "share": shares}
    for title, counts in cells.items():
        yield f"|{'|'.join([title, *(str(counts.get(column) or '') for column in columns[1:])])}|"
    if missing := [column for column in HEAD if column not in columns]:
        yield from ("", f"No file is counted as: {', '.join(missing)}.")


def _column(outcome: str) -> str:
    if outcome == "no kernels":
        return "onnxruntime"
    if "each number of rows" in outcome:
        return "kernels, fixed or each number of rows"
    if "islands" in outcome:
        return "with islands"
    return "kernels, fixed or each number of rows" if "fixed rows" in outcome else "kernels, any rows and sizes"


def _exporter(name: str, versions: Mapping[str, str]) -> str:
    for start, title in MADE_OF_OTHERS.items():
        if name.startswith(start):
            return title
    main = next((package for package in MAIN if package in versions), "")
    if "ultralytics" in versions:
        return "ultralytics"
    if "torch" in versions:
        if name.startswith("ts_"):
            return "torch, TorchScript"
        return f"torch, dynamo: {main or 'modules'}"
    package = main or next(iter(versions))
    return next((title for title, packages in TOGETHER.items() if package in packages), package)


def _descriptions() -> Sequence[tuple[str, dict[str, Any]]]:
    found = []
    for archive in sorted(ARCHIVES.glob("*.tar.xz")):
        with lzma.open(archive) as packed, tarfile.open(fileobj=packed) as tar:
            for member in tar.getmembers():
                content = tar.extractfile(member) if member.name.endswith(".json") else None
                if content is not None:
                    found.append((Path(member.name).stem, json.load(content)))
    return found


if __name__ == "__main__":
    sys.exit(main())
