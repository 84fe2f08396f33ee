"""A near name for one that is not known: "did you mean"."""

import difflib
from collections.abc import Iterable
from typing import Final

NEAR: Final = 0.75  # of difflib's ratio, 0 to 1
MAX_CHARACTERS: Final = 128
MAX_NAMES: Final = 500  # more cost milliseconds to compare, which anyone could ask for again and again


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the known name that is most like a word, empty if none is near.

    Capital letters, hyphens and underscores make no difference. A name without its last parts is near if no other
    known name begins so: "qos" for "qos_ms".
    """
    names = {_plain(name): name for name in known}
    if len(word) > MAX_CHARACTERS or len(names) > MAX_NAMES:
        return ""
    word = _plain(word)
    longer = [name for plain, name in names.items() if plain.startswith(f"{word}_")]
    if len(longer) == 1:
        return longer[0]
    found = difflib.get_close_matches(word, names, 1, NEAR)
    return names[found[0]] if found else ""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return "; did you mean 'NAME'?", or nothing if no known name is near."""
    near = nearest(word, known)
    return f"; did you mean {near!r}?" if near else ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")
