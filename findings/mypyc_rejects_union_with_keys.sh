#!/usr/bin/env bash
# `frozenset | dict.keys()` is a set, which type checkers take for a frozenset; compiled by mypyc the function raises.
#
# A good guess: the left operand decides, as in frozenset | set, so the result is a frozenset, and mypy, which says so, is
# right. Or a frozenset refuses what is no set, with a TypeError.
# Seen instead: frozenset.__or__ takes only sets and frozensets, so the keys' own __ror__ answers, and makes a set. So do
# &, - and ^. With a frozenset at the right it is the same. mypy --strict finds nothing to say about all of these; what
# mypyc compiles checks the result against the annotation, and raises a TypeError at the return.
# Seen with: mypy 2.4.1 (mypyc), CPython 3.11.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check mypy==2.4.1 setuptools==80.9.0
cd "$folder"
cat > names.py <<'PYTHON'
def either(names: frozenset[str], table: dict[str, int]) -> frozenset[str]:
    return names | table.keys()


def both(names: frozenset[str], table: dict[str, int]) -> frozenset[str]:
    return names & table.keys()


def only(names: frozenset[str], table: dict[str, int]) -> frozenset[str]:
    return names - table.keys()


def one(names: frozenset[str], table: dict[str, int]) -> frozenset[str]:
    return names ^ table.keys()


def of_sets(names: frozenset[str], others: set[str]) -> frozenset[str]:
    return names | others
PYTHON
cat > look.py <<'PYTHON'
import names

some, table = frozenset({"a", "b"}), {"b": 1, "c": 2}


def kind(function, *arguments):
    try:
        return type(function(*arguments)).__name__
    except TypeError as error:
        return f"TypeError: {error}"


seen = [kind(function, some, table) for function in (names.either, names.both, names.only, names.one)]
print("compiled" if names.__file__.endswith(".so") else "interpreted", sorted(set(seen)), kind(names.of_sets, some, {"c"}))
PYTHON
venv/bin/mypy --strict names.py
interpreted=$(venv/bin/python look.py)
PATH="$folder/venv/bin:$PATH" venv/bin/mypyc names.py > log.txt 2>&1
compiled=$(venv/bin/python look.py)
printf '%s\n' "$interpreted" "$compiled"
[ "$interpreted" = "interpreted ['set'] frozenset" ]
[ "$compiled" = "compiled ['TypeError: frozenset object expected; got set'] frozenset" ]
