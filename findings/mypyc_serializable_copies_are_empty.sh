#!/usr/bin/env bash
# A class that mypyc compiled with serializable=True is copied and pickled without its fields, if __init__ has arguments.
#
# A good guess: classes are copied and pickled as before they were compiled; or, as they have no __dict__, not at all,
# and mypyc_attr(serializable=True) is what makes it work.
# Seen instead, by copy.copy and by pickle alike: with serializable=True and an __init__ that takes an argument the copy
# is made without an error, and has no field: the pickle has none in it either. Without it the same class raises a
# TypeError about the missing argument, and a frozen dataclass a FrozenInstanceError, when loaded, not when dumped.
# Right are a dataclass that is not frozen, and any class whose __init__ needs no argument, with serializable or not.
# Interpreted, all are right.
# Seen with: mypy 2.4.1 (mypyc), Python 3.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check mypy==2.4.1 setuptools==80.9.0
cd "$folder"
cat > values.py <<'PYTHON'
from dataclasses import dataclass

from mypy_extensions import mypyc_attr


class Plain:
    def __init__(self, x: int) -> None:
        self.x = x


class Empty:
    def __init__(self) -> None:
        self.x = 0


@mypyc_attr(serializable=True)
class SerializablePlain:
    def __init__(self, x: int) -> None:
        self.x = x


@mypyc_attr(serializable=True)
class SerializableEmpty:
    def __init__(self) -> None:
        self.x = 0


@dataclass
class Open:
    x: int


@dataclass(frozen=True)
class Frozen:
    x: int
PYTHON
cat > look.py <<'PYTHON'
import copy
import pickle

import values


def field_of(make, value):
    try:
        return getattr(make(value), "x", "none")
    except Exception as error:
        return type(error).__name__


def loaded(value):
    return pickle.loads(pickle.dumps(value))


empty, kept = values.Empty(), values.SerializableEmpty()
empty.x = kept.x = 3
print("compiled" if values.__file__.endswith(".so") else "interpreted")
for value in (values.Plain(3), empty, values.SerializablePlain(3), kept, values.Open(3), values.Frozen(3)):
    print(f"{type(value).__name__}(3): {field_of(copy.copy, value)} copied, {field_of(loaded, value)} loaded")
PYTHON
interpreted=$(venv/bin/python look.py)
PATH="$folder/venv/bin:$PATH" venv/bin/mypyc values.py > log.txt 2>&1
compiled=$(venv/bin/python look.py)
printf '%s\n' "$interpreted" "$compiled"
[ "$(grep -c ': 3 copied, 3 loaded' <<< "$interpreted")" = 6 ]
[ "$compiled" = "compiled
Plain(3): TypeError copied, TypeError loaded
Empty(3): 3 copied, 3 loaded
SerializablePlain(3): none copied, none loaded
SerializableEmpty(3): 3 copied, 3 loaded
Open(3): 3 copied, 3 loaded
Frozen(3): FrozenInstanceError copied, FrozenInstanceError loaded" ]
if grep -q "warning:\|error:\|note:" log.txt; then cat log.txt; exit 1; fi
