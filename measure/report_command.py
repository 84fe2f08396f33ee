"""`gangway report`: pictures and CSV files of what `gangway profile` and `gangway tune` measured of a model."""

import argparse
import csv
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from gangway.artifact.cache import add_cache_dir, add_dimension
from gangway.artifact.precision import add_precision
from gangway.artifact.profile import ProfileError, machine_id, profile_path, read_profile
from gangway.artifact.tuning import find_tuning_by_result
from gangway.base.command_line import CommandParser
from gangway.base.console import Console, Table
from gangway.base.host_limits import cpu_name
from gangway.base.html_page import write_html
from gangway.measure.arguments import compiled_manifest, in_each_precision, model_and_cores, model_words
from gangway.measure.report_tables import SERIES, Evidence, Row
from gangway.server.errors import CompileError

PAGE_COLUMNS = 120
PAGE_ROWS = 40  # of each table on a page
UNMEASURED = {
    "interference": "nothing was measured beside interference",
    "loss_by_count": "no kernel was measured in several versions beside interference",
}
"""Why a picture may have nothing to show."""


class MissingError(Exception):
    """Something has not been measured; the message says which command does."""


def main(argv: Sequence[str]) -> int:
    """Run the command; return 0, or 1 when something is missing. Wrong arguments exit with 2 (argparse)."""
    parser = _parser()
    options = parser.parse_args(argv)
    name, path, cores = model_and_cores(parser, options)
    options = in_each_precision(options)[0]  # only versions in fp32 are tuned
    try:
        from gangway.measure.report_pictures import PICTURES, save  # noqa: PLC0415 - needs an extra package

        evidence = _evidence(name, path, options, len(cores))
        options.output.mkdir(parents=True, exist_ok=True)
        pictures = {}
        page = Console(file=io.StringIO(), record=True, width=PAGE_COLUMNS)
        for series, collect in SERIES.items():
            rows = collect(evidence)
            if rows:
                picture = options.output / f"{series}.png"
                _write_csv(options.output / f"{series}.csv", rows)
                save(PICTURES[series](evidence, rows), picture)
                pictures[series] = picture.read_bytes()
                page.print(_table(series, rows))
                print(picture)
            else:
                page.print(f"no {series}: {UNMEASURED[series]}")
                print(f"no {series}: {UNMEASURED[series]}")
        if options.html:
            write_html(options.html, f"gangway report: {name}", page, pictures)
            print(options.html)
    except (CompileError, MissingError, ProfileError, OSError) as error:
        print(f"gangway report: {error}", file=sys.stderr)
        return 1
    return 0


def _evidence(name: str, path: Path, options: argparse.Namespace, cores: int) -> Evidence:
    """Return what the cache knows of the model. Raises MissingError, ProfileError, CompileError."""
    manifest = compiled_manifest(options, name, path)
    target = manifest.target.name
    tuning = find_tuning_by_result(options.cache_dir, manifest.key, target)
    profile = profile_path(options.cache_dir, manifest.key, machine_id(cpu_name(), cores, target))
    words = model_words(options)
    if tuning is None:
        raise MissingError(f"{name} has not been tuned on this machine: first `gangway tune {words}`, then "
                           f"`gangway profile {words}`, with the same --cache-dir and --cores")  # fmt: skip
    if not profile.exists():
        raise MissingError(f"the tuned {name} has no profile for {cores} cores of this machine: `gangway profile "
                           f"{words}`, with the same --cache-dir and --cores, makes it")  # fmt: skip
    return Evidence(manifest, read_profile(profile), tuning)


def _table(series: str, rows: Sequence[Row]) -> Table:
    """Return the first rows; the CSV file has all."""
    table = Table(*rows[0], title=f"{series}, {min(len(rows), PAGE_ROWS)} of {len(rows)} rows")
    for row in rows[:PAGE_ROWS]:
        table.add_row(*(f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in row.values()))
    return table


def _write_csv(path: Path, rows: Sequence[Row]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="gangway report",
        description="Draw what was measured of a model on this machine, as in VELTAIR's paper: speed-up of layers with "
        "cores (its figure 4a), performance of versions over interference (6), loss by number of versions (7), samples "
        "and Pareto front (9), layers by number of versions (14c). Writes a PNG and a CSV file of each. Needs what "
        "`gangway tune` and then `gangway profile` leave in the cache.",
    )
    add = parser.add_argument
    add("path", type=Path, metavar="PATH", help="an .onnx file or a model directory (its latest version)")
    add("--html", type=Path, metavar="FILE", help="write one page of tables, pictures, command and machine, too")
    add("-o", "--output", type=Path, required=True, metavar="DIR", help="where to write; made if it is absent")
    add("--cores", default="all", metavar="LIST", help="cores that the profile was measured on (all)")
    add_dimension(parser)
    add_precision(parser)
    add_cache_dir(parser)
    return parser
