"""Artifacts with other kernels than the static choices, for the same layers, weights and places in memory."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from gangway.artifact.format import Manifest, TargetSpec
from gangway.artifact.writer import VariantWriter
from gangway.compiler import codegen
from gangway.compiler.buffers import Step
from gangway.compiler.describe import max_ranks
from gangway.compiler.kernels import Plan, build_part, make_version, symbol_name, with_batch_plans
from gangway.compiler.specs import KernelPlan


class KernelStore:
    """Kernels in machine code, each compiled once, in object files of a folder; `symbols` are the functions' names."""

    def __init__(self, folder: Path, target: TargetSpec) -> None:
        self._folder = folder
        self._target = target
        self.symbols: dict[Plan, str] = {}

    def build(self, plans: Iterable[KernelPlan], progress: Callable[[int, int], None]) -> None:
        """Compile those that are not there yet; `progress(done, total)` counts them."""
        missing = [plan for plan in with_batch_plans(plans, self._target) if plan not in self.symbols]
        for done, plan in enumerate(missing):
            progress(done, len(missing))
            symbol = symbol_name(len(self.symbols), plan)
            build_part([(plan, symbol)], self._target, self._object(symbol))
            self.symbols[plan] = symbol
        progress(len(missing), len(missing))

    def link(self, plans: Iterable[KernelPlan], library: Path) -> None:
        """Put kernels that are there into a shared library."""
        codegen.link([self._object(self.symbols[plan]) for plan in with_batch_plans(plans, self._target)], library)

    def _object(self, symbol: str) -> Path:
        return self._folder / f"{symbol}.o"


def write_variant(
    original: Path,
    manifest: Manifest,
    steps: Sequence[Step],
    versions: Sequence[Sequence[KernelPlan]],
    store: KernelStore,
    folder: Path,
) -> Manifest:
    """Write the artifact `folder`, whose name is its key: layer l of `manifest`, in `original`, in `versions[l]`.

    All plans must be in the store. Raises OSError.
    """
    with VariantWriter(folder, original) as writer:
        store.link((plan for plans in versions for plan in plans), writer.kernels_path)
        layers = tuple(
            replace(
                layer,
                versions=tuple(make_version(plan, store.symbols, manifest.target) for plan in plans),
                max_ranks=max_ranks(step, max(plan.tasks for plan in plans)),
            )
            for layer, step, plans in zip(manifest.layers, steps, versions, strict=True)
        )
        return writer.commit(replace(manifest, key=folder.name, layers=layers))
