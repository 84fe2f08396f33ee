"""Which modules of the scheduler run compiled: `setup.py` makes an extension of them by mypyc, in one shared library.

The extension's name has a checksum of the sources that it depends on. Where they have changed since, as in a checkout
that somebody works on, the modules are interpreted as if there were no extension.
"""

import os
import sys
import zlib
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Final

# What a turn of the scheduler consists of. No two have the same last name, which names their `PyInit`.
MODULES: Final = (
    "admission",
    "apply",
    "batching.former",
    "decide",
    "fast_path",
    "gangs",
    "interference",
    "loop",
    "models",
    "observability",
    "policies.arrival_rate",
    "policies.baselines",
    "policies.gangway",
    "policies.gangway_blocks",
    "policies.gangway_jobs",
    "policies.gangway_moves",
    "policies.gangway_order",
    "policies.gangway_overload",
    "policies.layerweaver",
    "policies.precision_choice",
    "policies.turns",
    "policies.veltair",
    "policy",
    "prediction",
    "requests",
    "resources",
    "units",
    "waiting",
)
ROOMS: Final = ("artifact", "base", "executor", "scheduler")  # what is compiled may have constants of these in it
INTERPRETED: Final = "GANGWAY_INTERPRETED"  # a variable: anything in it has the interpreted modules used
# Why they are interpreted:
NOT_MADE: Final = "they were not compiled when Gangway was installed"
CHANGED: Final = "their sources have changed since they were compiled; `make compiled` compiles them again"

_FOLDER: Final = Path(__file__).parent


def extension_name(package: Path = _FOLDER.parent) -> str:
    """Return the full name of the extension that fits the sources of the package `gangway` in a folder."""
    checksum = 0
    for room in ROOMS:
        for path in sorted((package / room).rglob("*.py")):
            checksum = zlib.crc32(path.read_bytes(), checksum)
    return f"gangway.scheduler.compiled_{checksum:08x}__mypyc"


class _Finder(MetaPathFinder):
    """Finds the modules that are compiled in an extension, which is loaded when the first of them is wanted."""

    def __init__(self, extension: str) -> None:
        self._extension = extension
        self._names = frozenset(f"gangway.scheduler.{name}" for name in MODULES)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return where a module is, None for others than those."""
        if fullname not in self._names:
            return None
        file = import_module(self._extension).__file__
        assert file is not None
        return spec_from_file_location(fullname, file, loader=ExtensionFileLoader(fullname, file))


def use(folder: Path = _FOLDER) -> str:
    """Let the compiled modules be imported, if those in a folder fit; return why not, or nothing."""
    if os.environ.get(INTERPRETED):
        return f"{INTERPRETED} is set"
    made = [path.name for suffix in EXTENSION_SUFFIXES for path in folder.glob(f"compiled_*__mypyc{suffix}")]
    if not made:
        return NOT_MADE
    name = extension_name(folder.parent)
    if name.rpartition(".")[2] not in [file.partition(".")[0] for file in made]:
        return CHANGED
    sys.meta_path.insert(0, _Finder(name))
    return ""
