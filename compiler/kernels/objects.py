"""Kernels in machine code, in the cache: one object file each, shared by layers, sizes, models and processes.

A file is called by what decides its code: the family of its plan, the target and the compiler. Kernels of a family that
read numbers at run time lie in one folder; each file has the conditions under which its kernel is right. Behind the
object there is a checksum: a damaged file counts as missing. A cache that cannot be used costs time, no more.

Templates are Python, so they write one kernel after the other. Meanwhile LLVM, which needs no interpreter, builds those
before on the cores that this process may use.
"""

import hashlib
import logging
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangway.artifact.format import TargetSpec
from gangway.artifact.trim import KERNELS_FOLDER
from gangway.compiler.errors import UnsupportedModelError, naming
from gangway.compiler.kernels import codegen
from gangway.compiler.kernels.attention_specs import AttentionSpec
from gangway.compiler.kernels.codegen import Plan
from gangway.compiler.kernels.extents import Conditions, traced
from gangway.compiler.kernels.families import VARYING_IN_ROWS, Family, family_of, with_extents
from gangway.compiler.kernels.libraries import link_shared
from gangway.compiler.kernels.linker import link
from gangway.compiler.kernels.sealed_files import keep, read_payload, seal, take
from gangway.compiler.kernels.specs import BatchPlan, KernelSpec
from gangway.compiler.kernels.templates import registry
from gangway.compiler.key import compiler_version

OBJECT_SUFFIX = ".o"
LIBRARY_SUFFIX = ".so"
VARYING_SUFFIX = "_sized"  # of the symbols of kernels with extents
MOST_BUILDS = 4  # at a time, each of which takes memory
_log = logging.getLogger(__name__)
_SYMBOL_DIGITS = 16


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel's function, and the int32 numbers that it reads as its last argument; none: it has no such argument."""

    symbol: str
    extents: tuple[int, ...]


@dataclass(frozen=True)
class _Build:
    """A kernel that LLVM builds, and the conditions under which it is right."""

    symbol: str
    conditions: Conditions
    path: Future[Path]


def has_extents(symbol: str) -> bool:
    """Whether a kernel has one argument more, behind all others: numbers that it reads at run time."""
    return symbol.endswith(VARYING_SUFFIX)


class KernelObjects:
    """What one compilation takes from the cache folder `root`, and adds to it.

    `share_key`: what compilations for several sizes of a model have in common, whose kernels may serve several sizes;
    empty if there is one size. `scratch`: a folder of the same file system, for this compilation only.
    """

    def __init__(self, root: Path, scratch: Path, target: TargetSpec, share_key: str) -> None:
        self._share_key = share_key
        self._root = root / KERNELS_FOLDER
        self._scratch = scratch
        self._target = target
        self._context = f"{compiler_version()} {target!r}"
        self._objects: dict[str, Path] = {}  # by symbol
        self._builds: dict[str, list[_Build]] = defaultdict(list)  # by key of the family

    def build(
        self, plans: Iterable[Plan], layers: Mapping[KernelSpec, str], progress: Callable[[int, int], None]
    ) -> dict[Plan, CompiledKernel]:
        """Return the kernel of each plan; those that the cache lacks are compiled, and counted by `progress`.

        `layers`: what specs are called where something goes wrong.
        """
        plans = list(plans)
        in_rows = {  # with a kernel that reads no extents
            plan.spec for plan in plans if isinstance(plan, BatchPlan) and not isinstance(plan.spec, VARYING_IN_ROWS)
        }
        families = {
            plan: family_of(plan, self._context, bool(self._share_key) and plan.spec not in in_rows) for plan in plans
        }
        constants = {plan: family_of(plan, self._context, varying=False) for plan in families}
        paired = {plan.spec for plan in plans if isinstance(plan, BatchPlan) and families[plan].parameters}
        found = {
            plan: self._find(family) or (None if plan.spec in paired else self._find(constants[plan]))
            for plan, family in families.items()
        }
        kernels = {plan: kernel for plan, kernel in found.items() if kernel}
        missing = [plan for plan in families if plan not in kernels]
        known, threads = len(kernels), min(MOST_BUILDS, len(os.sched_getaffinity(0)))
        waiting: deque[tuple[Plan, _Build]] = deque()

        def finish() -> None:
            plan, build = waiting.popleft()
            with naming(layers[plan.spec]):
                if not self._ends_well(build, plan):
                    build = self._begin(plan, constants[plan], constants[plan], pool)
                    self._ends_well(build, plan)
                kernels[plan] = CompiledKernel(
                    build.symbol, families[plan].parameters if has_extents(build.symbol) else ()
                )
            progress(len(kernels) - known, len(missing))

        progress(0, len(missing))
        with ThreadPoolExecutor(threads, "builds") as pool:
            for plan in missing:
                with naming(layers[plan.spec]):
                    waiting.append((plan, self._begin(plan, families[plan], constants[plan], pool)))
                if len(waiting) > 2 * threads:  # what templates have written takes memory
                    finish()
            while waiting:
                finish()
        for spec in paired:  # whose two kernels have the same arguments
            if len({has_extents(kernels[plan].symbol) for plan in plans if plan.spec is spec}) > 1:
                raise UnsupportedModelError(f"{layers[spec]}: one of two kernels reads no numbers at run time")
        return kernels

    def _ends_well(self, build: _Build, plan: Plan) -> bool:
        """Wait for a kernel; return whether there is one. Raises what went wrong, unless another kernel may do."""
        try:
            self._objects[build.symbol] = build.path.result()
        except Exception as error:
            if not has_extents(build.symbol):
                raise
            _log.debug("%s: compiled for these numbers only: %r", plan.description, error)
            return False
        return True

    def link(self, library: Path) -> None:
        """Write a shared library with the kernels of `build`, or a link to one that has them. Raises LinkError.

        Sizes of a model share libraries: that of a further one has its new kernels and needs those of others, which
        then lie beside it.
        """
        if self._share_key:
            link_shared(self._objects, self._root / self._share_key, library)
            return
        name = hashlib.sha256("\n".join(sorted(self._objects)).encode()).hexdigest()[:32] + LIBRARY_SUFFIX
        kept = self._root / name
        if take(kept, library) is None:
            link([self._objects[symbol] for symbol in sorted(self._objects)], library)
            seal(library, b"")
            keep(library, kept)

    def _find(self, family: Family) -> CompiledKernel | None:
        """Return a kernel of the family that is right for these parameters."""
        for path in _listed(self._root / family.key):
            conditions = _conditions(path)
            if conditions is None or not conditions.met(family.parameters):
                continue
            symbol = path.stem
            if symbol not in self._objects:
                taken = self._scratch / path.name
                if take(path, taken) is None:
                    continue
                self._objects[symbol] = taken
            return CompiledKernel(symbol, family.parameters)
        return None

    def _begin(self, plan: Plan, family: Family, constants: Family, pool: Executor) -> _Build:
        """Build a kernel that reads the family's parameters, or else, if its template cannot, one of `constants`."""
        for build in self._builds[family.key]:
            if build.conditions.met(family.parameters):
                return build
        kind = type(plan.spec).__name__.removesuffix("Spec").lower() + "_rows" * isinstance(plan, BatchPlan)
        conditions, simplified, function = Conditions(), True, None
        symbol = f"{kind}_{_digest(repr(family))}{VARYING_SUFFIX}"
        if family.parameters:
            try:
                function, conditions = self._varying_kernel(plan, family, symbol)
                simplified = isinstance(plan.spec, AttentionSpec)  # else LLVM takes vectors apart
            except registry.UnsupportedSpecError:
                raise
            except Exception as error:
                _log.debug("%s: compiled for these numbers only: %r", plan.description, error)
        if function is None:
            family, symbol = constants, f"{kind}_{_digest(repr(constants))}"
            function = registry.emit(plan, self._target, symbol)
        path = pool.submit(self._built, symbol, function, family, conditions, simplified)
        self._builds[family.key].append(build := _Build(symbol, conditions, path))
        return build

    def _varying_kernel(self, plan: Plan, family: Family, symbol: str) -> tuple[Any, Conditions]:
        with traced(family.parameters) as first:
            registry.emit_as(plan.spec, with_extents(plan, first.extents), self._target, symbol)
        with traced(family.parameters, first) as trace:
            function = registry.emit_as(plan.spec, with_extents(plan, trace.extents), self._target, symbol)
        return function, trace.conditions

    def _built(self, symbol: str, function: Any, family: Family, conditions: Conditions, simplified: bool) -> Path:
        path = self._scratch / f"{symbol}{OBJECT_SUFFIX}"
        codegen.build_object({symbol: function}, self._target, path, simplified)
        seal(path, conditions.to_json())
        keep(path, self._root / family.key / path.name)
        return path


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_SYMBOL_DIGITS]


_known_conditions: dict[Path, Conditions] = {}  # of files that this process has read


def _listed(folder: Path) -> list[Path]:
    """The object files of a family, in an order that does not change."""
    with suppress(OSError):
        return sorted(path for path in folder.iterdir() if path.suffix == OBJECT_SUFFIX)
    return []


def _conditions(path: Path) -> Conditions | None:
    """The conditions in an object file; None if it is damaged, or has gone."""
    if path not in _known_conditions:
        payload = read_payload(path)
        if payload is None:
            return None
        with suppress(ValueError):
            _known_conditions[path] = Conditions.from_json(payload)
    return _known_conditions.get(path)
