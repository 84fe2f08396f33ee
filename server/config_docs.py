"""The tables of docs/config.md, from `config_table.py`: `python -m gangway.server.config_docs docs/config.md`."""

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from gangway.server.config_table import FIELDS, PARAMETERS, Entry

_TABLE = "<!-- {name}: written by python -m gangway.server.config_docs -->\n"
_END = "<!-- end -->"


def tables() -> Mapping[str, str]:
    """Return the tables by name, in Markdown."""
    return {
        "fields": "\n".join(_rows("field", FIELDS)),
        "parameters": "\n".join(_rows("parameter", PARAMETERS)),
    }


def with_tables(text: str) -> str:
    """Return the page with its tables as they should be. Raises ValueError if the page has no place for one."""
    for name, table in tables().items():
        begin = _TABLE.format(name=name)
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(_END), re.DOTALL)
        if not pattern.search(text):
            raise ValueError(f"there is no place for the table '{name}'")
        before, after = pattern.split(text, maxsplit=1)
        text = f"{before}{begin}{table}\n{_END}{after}"
    return text


def _rows(heading: str, entries: Mapping[str, Entry]) -> Iterator[str]:
    yield f"| {heading} | | |"
    yield "|---|---|---|"
    for name, entry in entries.items():
        yield f"| `{name}` | {entry.fate} | {entry.note} |"


def main(argv: list[str]) -> int:
    """Write the tables into the page that is named."""
    path = Path(argv[0])
    path.write_text(with_tables(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
