#!/usr/bin/env bash
# A functools.cached_property of a class that mypyc compiled computes at each access, without an error or a warning.
#
# A good guess: native classes have no __dict__ to keep the value in, so mypyc either refuses the decorator, or keeps the
# class interpreted, as it does for classes with unknown decorators; and what passes type checks runs as before.
# Seen instead: it compiles as a plain property. A dataclass does the same. What counted on identity, or on being
# computed once, changes its behaviour. The same function under functools.cache outside the class keeps its value.
# Seen with: mypy 2.4.1 (mypyc), Python 3.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check mypy==2.4.1 setuptools==80.9.0
cd "$folder"
cat > tables.py <<'PYTHON'
from dataclasses import dataclass
from functools import cache, cached_property

computed: list[str] = []


class Table:
    def __init__(self, count: int) -> None:
        self.count = count

    @cached_property
    def rows(self) -> list[int]:
        computed.append("class")
        return list(range(self.count))


@dataclass(frozen=True)
class FrozenTable:
    count: int

    @cached_property
    def rows(self) -> list[int]:
        computed.append("dataclass")
        return list(range(self.count))


@cache
def rows_of(count: int) -> list[int]:
    computed.append("function")
    return list(range(count))
PYTHON
cat > look.py <<'PYTHON'
from collections import Counter

import tables

plain, frozen = tables.Table(3), tables.FrozenTable(3)
same = [plain.rows is plain.rows, frozen.rows is frozen.rows, tables.rows_of(3) is tables.rows_of(3)]
print("compiled" if tables.__file__.endswith(".so") else "interpreted", same, dict(Counter(tables.computed)))
PYTHON
interpreted=$(venv/bin/python look.py)
PATH="$folder/venv/bin:$PATH" venv/bin/mypyc tables.py > log.txt 2>&1
compiled=$(venv/bin/python look.py)
printf '%s\n' "$interpreted" "$compiled"
[ "$interpreted" = "interpreted [True, True, True] {'class': 1, 'dataclass': 1, 'function': 1}" ]
[ "$compiled" = "compiled [False, False, True] {'class': 2, 'dataclass': 2, 'function': 1}" ]
if grep -q "warning:\|error:\|note:" log.txt; then cat log.txt; exit 1; fi
