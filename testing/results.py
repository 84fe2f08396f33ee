"""Tables of `docs/measurements`: each suite has its own in `benchmarks/SUITE/results.json`; pages are made of them.

`--json benchmarks/SUITE/results.json` enters the tables of a run there, in the place of those with the same titles.
"""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = "results.json"
ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class ResultTable:
    """Figures of one run, and what made them. A field that the page's text says for several tables is empty."""

    command: str
    machine: str
    date: str
    commit: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> Iterator[str]:
        """Yield lines: what made the table, and the table without spaces beside its bars."""
        made = [f"`{self.command}`" if self.command else "", self.machine, self.date, self.commit]
        if any(made):
            yield from (f"{', '.join(filter(None, made))}:", "")
        yield from (f"|{'|'.join(cells)}|" for cells in (self.columns, ["---"] * len(self.columns), *self.rows))


def read(path: Path) -> dict[str, ResultTable]:
    """Return the tables of a suite by title."""
    return {title: ResultTable(**table) for title, table in json.loads(path.read_text()).items()}


def enter(path: Path, tables: Mapping[str, ResultTable]) -> None:
    """Write tables to a suite's file, a row a line; those with other titles stay."""
    kept = read(path) if path.exists() else {}
    parts = []
    for title, table in {**kept, **tables}.items():
        fields = {name: json.dumps(value, ensure_ascii=False) for name, value in asdict(table).items()}
        rows = ",\n".join(f"   {json.dumps(row, ensure_ascii=False)}" for row in table.rows)
        fields["rows"] = f"[\n{rows}\n  ]"
        lines = ",\n".join(f"  {json.dumps(name)}: {value}" for name, value in fields.items())
        parts.append(f" {json.dumps(title, ensure_ascii=False)}: {{\n{lines}\n }}")
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def commit() -> str:
    """Return the present commit, short."""
    return subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, text=True).strip()
