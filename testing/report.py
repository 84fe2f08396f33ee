"""How every benchmark reports: the machine, the command, tables, targets beside what was measured, and a JSON file."""

import argparse
import datetime
import json
import os
import platform
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gangway.base.console import Console, Table
from testing import results

# A file or a pipe has no width of its own: wide enough that no cell is wrapped.
ROOT = Path(__file__).parent.parent
CONSOLE = Console()

Cell = str | int | float
Row = Mapping[str, Cell]


@dataclass(frozen=True)
class Target:
    """A bound that the project sets itself, from above or from below, in the unit that `what` names."""

    what: str
    measured: float
    at_most: float | None = None
    at_least: float | None = None

    @property
    def met(self) -> bool:
        """Whether the measurement keeps the bound. What could not be measured (NaN) does not."""
        if self.at_most is not None:
            return self.measured <= self.at_most
        return self.at_least is not None and self.measured >= self.at_least

    @property
    def bound(self) -> str:
        """As the table shows it."""
        return (
            f"<= {format_cell(self.at_most)}" if self.at_most is not None else f">= {format_cell(self.at_least or 0.0)}"
        )


@dataclass
class Report:
    """Collects the tables and targets of one run and prints them as they come."""

    title: str
    machine: dict[str, Cell]
    command: str
    tables: dict[str, list[dict[str, Cell]]] = field(default_factory=dict)
    targets: list[Target] = field(default_factory=list)

    def table(self, title: str, rows: Sequence[Row]) -> None:
        """Print a table whose columns are the keys of its first row."""
        self.tables[title] = [dict(row) for row in rows]
        table = Table(*(rows[0] if rows else ("nothing",)), title=title)
        for column in table.columns[1:]:
            column.justify = "right"
        for row in rows:
            table.add_row(*(format_cell(cell) for cell in row.values()))
        CONSOLE.print(table)

    def target(self, what: str, measured: float, at_most: float) -> None:
        """Note a bound and what was measured against it."""
        self.targets.append(Target(what, measured, at_most))

    def goal(self, what: str, measured: float, at_least: float) -> None:
        """Note a bound from below and what was measured against it."""
        self.targets.append(Target(what, measured, at_least=at_least))

    def finish(self, json_path: Path | None) -> int:
        """Print the targets, write the JSON file if one was asked for; return 0 if every target was met, else 1."""
        if self.targets:
            rows = [
                {"target": t.what, "measured": t.measured, "bound": t.bound, "": "met" if t.met else "MISSED"}
                for t in self.targets
            ]
            self.table("targets", rows)
        if json_path is not None and json_path.name == results.NAME:
            results.enter(json_path, self._results())
        elif json_path is not None:
            json_path.write_text(json.dumps(asdict(self), indent=2) + "\n")
        return 0 if all(target.met for target in self.targets) else 1

    def _results(self) -> dict[str, results.ResultTable]:
        """Return the tables as a page shows them."""
        made = (self.command, str(self.machine["cpu"]), datetime.date.today().isoformat(), results.commit())
        return {
            title: results.ResultTable(
                *made, list(rows[0]), [[format_cell(cell) for cell in row.values()] for row in rows]
            )
            for title, rows in self.tables.items()
            if rows and title != "targets"
        }


def start_report(title: str) -> Report:
    """Print what is measured, where, and by which command. From now on SIGTERM ends the servers that run, too."""
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    module = Path(sys.argv[0]).with_suffix("").relative_to(ROOT)
    name = ".".join(module.parent.parts if module.name == "__main__" else module.parts)
    report = Report(title, describe_machine(), f"python -m {name} {shlex.join(sys.argv[1:])}".strip())
    print(f"{title}\nmachine: {', '.join(f'{key} {value}' for key, value in report.machine.items())}")
    print(f"command: {report.command}\n", flush=True)
    return report


def describe_machine() -> dict[str, Cell]:
    """Return what decides how a number is to be read: processor, usable cores, load when the run began."""
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load average": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
    }


def option_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write tables and targets to this file too; tables enter a suite's results.json",
    )
    return parser


def add_repository_option(parser: argparse.ArgumentParser) -> None:
    """Declare --repository, the model repository to measure with."""
    default = Path(__file__).parent.parent / "models"
    parser.add_argument(
        "--repository", type=Path, default=default, help="model repository; the zoo is written there if it is absent"
    )


def format_cell(cell: Cell) -> str:
    """Return three significant digits of a float, anything else as it is."""
    if not isinstance(cell, float):
        return str(cell)
    if cell != 0 and (abs(cell) < 1e-3 or abs(cell) >= 1e6):
        return f"{cell:.2e}"
    return f"{cell:.0f}" if abs(cell) >= 1000 else f"{cell:#.3g}".rstrip(".")


def _cpu_name() -> str:
    with open("/proc/cpuinfo") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
