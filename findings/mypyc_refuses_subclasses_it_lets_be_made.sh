#!/usr/bin/env bash
# mypyc lets interpreted code subclass an exception or a non-native class that it compiled, and takes no instance for one.
#
# A good guess: what may be subclassed may be passed, as with allow_interpreted_subclasses=True: isinstance decides, and
# what mypyc refuses it refuses when an object is made, as it does for native classes.
# Seen instead: the object is made, isinstance says True outside, and `except Failure` of compiled code catches it. But
# isinstance in compiled code says False of it, and an argument annotated with the base raises a TypeError. Exceptions
# that a library raises for callers to refine are of this kind. Interpreted, all is as guessed; mypy --strict has nothing
# to say.
# Seen with: mypy 2.4.1 (mypyc), CPython 3.11.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check mypy==2.4.1 setuptools==80.9.0
cd "$folder"
cat > base.py <<'PYTHON'
from collections.abc import Callable

from mypy_extensions import mypyc_attr


class Native:
    pass


@mypyc_attr(allow_interpreted_subclasses=True)
class Allowed:
    pass


@mypyc_attr(native_class=False)
class NonNative:
    pass


class Failure(Exception):
    pass


def take_allowed(it: Allowed) -> str:
    return "taken"


def take_non_native(it: NonNative) -> str:
    return "taken"


def take_failure(it: Failure) -> str:
    return "taken"


def known(it: object) -> tuple[bool, bool, bool]:
    return isinstance(it, Allowed), isinstance(it, NonNative), isinstance(it, Failure)


def catch(raises: Callable[[], object]) -> str:
    try:
        raises()
    except Failure:
        return "caught"
    return "nothing raised"
PYTHON
cat > look.py <<'PYTHON'
import base


def ended(function, *arguments):
    try:
        return function(*arguments)
    except (TypeError, base.Failure) as error:
        return type(error).__name__


def raises(error):
    raise error


print("compiled" if base.__file__.endswith(".so") else "interpreted")
print("Native:", "refused" if ended(type("Sub", (base.Native,), {})) == "TypeError" else "made")
TAKE = {base.Allowed: base.take_allowed, base.NonNative: base.take_non_native, base.Failure: base.take_failure}
for place, (kind, take) in enumerate(TAKE.items()):
    sub = type("Sub", (kind,), {})()
    print(f"{kind.__name__}: {isinstance(sub, kind)} outside, {base.known(sub)[place]} inside, {ended(take, sub)}")
sub = type("Sub", (base.Failure,), {})()
print("except Failure:", ended(base.catch, lambda: raises(base.Failure())), "and", ended(base.catch, lambda: raises(sub)))
PYTHON
venv/bin/mypy --strict base.py
interpreted=$(venv/bin/python look.py)
PATH="$folder/venv/bin:$PATH" venv/bin/mypyc base.py > log.txt 2>&1
compiled=$(venv/bin/python look.py)
printf '%s\n' "$interpreted" "$compiled"
[ "$interpreted" = "interpreted
Native: made
Allowed: True outside, True inside, taken
NonNative: True outside, True inside, taken
Failure: True outside, True inside, taken
except Failure: caught and caught" ]
[ "$compiled" = "compiled
Native: refused
Allowed: True outside, True inside, taken
NonNative: True outside, False inside, TypeError
Failure: True outside, False inside, TypeError
except Failure: caught and caught" ]
