"""Shared libraries of a model that is compiled for several sizes: each holds what the ones before it lack.

A further size has few kernels of its own. They become a library that needs those with the others, by name, in its own
folder (DT_NEEDED and DT_RUNPATH of the System V ABI). The dynamic linker finds a symbol in any of them, and has one
copy in memory of a library that several artifacts link to.
"""

import hashlib
import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gangway.artifact.format import LIBRARY_PREFIX
from gangway.compiler.kernels.linker import link
from gangway.compiler.kernels.sealed_files import keep, read_payload, seal, take

MOST_NEEDED = 6  # more libraries than these and the new one are linked to one
_SUFFIX = ".so"
_DIGITS = 32


@dataclass(frozen=True)
class _Library:
    """A library that the cache has: the symbols in it, and the names of those that it needs."""

    name: str
    symbols: frozenset[str]
    needs: frozenset[str]


def link_shared(objects: Mapping[str, Path], folder: Path, library: Path) -> None:
    """Make `library` hold the objects' symbols, with libraries beside it that it needs; `folder` keeps all of them.

    Raises LinkError.
    """
    chosen = _choose(objects.keys(), _kept_libraries(folder))
    whole = next((one for one in chosen if {one.name, *one.needs} >= {other.name for other in chosen}), None)
    has_all = whole is not None and objects.keys() <= frozenset[str]().union(*(one.symbols for one in chosen))
    others = [one for one in chosen if not has_all or one is not whole]
    if any(take(folder / one.name, library.with_name(one.name)) is None for one in others):
        for one in others:  # somebody has emptied the cache meanwhile
            library.with_name(one.name).unlink(missing_ok=True)
        chosen, others, has_all = [], [], False
    if has_all and whole is not None and take(folder / whole.name, library) is not None:
        return
    symbols = sorted(objects.keys() - frozenset[str]().union(*(one.symbols for one in others)))
    content = {"symbols": symbols, "needs": sorted(one.name for one in others)}
    text = json.dumps(content)
    name = LIBRARY_PREFIX + hashlib.sha256(text.encode()).hexdigest()[:_DIGITS] + _SUFFIX
    needed = [one.name for one in others]
    link([objects[symbol] for symbol in symbols], library, name, needed)
    seal(library, text.encode())
    keep(library, folder / name)


def _choose(symbols: Collection[str], kept: Mapping[str, _Library]) -> list[_Library]:
    """Return libraries with most of the symbols, and those that they need; none if they would be too many."""
    chosen: dict[str, _Library] = {}
    missing = set(symbols)
    whole = [one for one in kept.values() if one.needs <= kept.keys()]
    while missing and whole:
        best = max(whole, key=lambda one: (len(missing & one.symbols), one.name))
        if not missing & best.symbols:
            break
        for name in (best.name, *sorted(best.needs)):
            chosen[name] = kept[name]
            missing -= kept[name].symbols
    return list(chosen.values()) if len(chosen) <= MOST_NEEDED else []


_known: dict[Path, _Library] = {}  # that this process has read


def _kept_libraries(folder: Path) -> dict[str, _Library]:
    """The libraries of a folder that are whole, by name."""
    paths: list[Path] = []
    with suppress(OSError):
        paths = sorted(path for path in folder.iterdir() if path.suffix == _SUFFIX)
    found = {}
    for path in paths:
        if path not in _known and (payload := read_payload(path)) is not None:
            with suppress(ValueError, KeyError, TypeError):
                content = json.loads(payload)
                _known[path] = _Library(path.name, frozenset(content["symbols"]), frozenset(content["needs"]))
        if path in _known:
            found[path.name] = _known[path]
    return found
