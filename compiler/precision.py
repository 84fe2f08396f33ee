"""Compile a model in the precision that is asked for, and compare its answers with those in fp32.

What is chosen is kept beside the artifacts, `precisions/KEY.json`: a later start finds both artifacts by it.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from gangway.artifact.cache import Cache
from gangway.artifact.format import Engine, TargetSpec
from gangway.artifact.precision import BF16, FP32, ChosenPrecision, WantedPrecision
from gangway.base.files import write_whole
from gangway.base.json_codec import decode, encode
from gangway.compiler.arguments import NO_DIMENSIONS, NO_OPTIONS, CompileOptions
from gangway.compiler.errors import CompilerFaultError, faults_as_refusals
from gangway.compiler.key import known_compiler, model_key
from gangway.compiler.pipeline import CompileResult, compile_model, find_compiled
from gangway.compiler.progress import AGREEMENT_PHASE, Progress
from gangway.compiler.target import for_precision

MOST_ROUNDS = 4  # of compiling with more layers in fp32
NO_INSTRUCTIONS = "the processor has no instructions for bf16"
_log = logging.getLogger(__name__)


def compile_in_precision(
    path: Path,
    model_name: str,
    cache: Cache,
    target: TargetSpec,
    progress: Progress,
    wanted: WantedPrecision,
    options: CompileOptions = NO_OPTIONS,
) -> CompileResult:
    """Return the artifact in bf16 if its answers agree with those in fp32, else that in fp32.

    Its manifest's `precision_note` says how they agree, or why it is in fp32. Layers by which they differ most stay in
    fp32, as the options' `keep_fp32` do in any case; their `precision` is not heeded. Errors as of `compile_model`.
    """
    kept, options = tuple(sorted(options.keep_fp32)), replace(options, precision=FP32, keep_fp32=())
    exact = compile_model(path, model_name, cache, target, progress, options)
    if wanted.name == FP32 or exact.manifest.engine is not Engine.NATIVE:
        return exact
    if not for_precision(target, BF16).extensions:
        return noted(exact, NO_INSTRUCTIONS)
    job = _Job(path, model_name, cache, target, progress, options.dimensions)
    record = job.record(wanted.min_cosine, kept)
    chosen = _read(record)
    is_known = chosen is not None
    if chosen is None:
        try:
            with faults_as_refusals():
                chosen = job.choose(exact, wanted.min_cosine, kept)
        except CompilerFaultError as error:
            _log.warning("%s: it stays in fp32: %s", model_name, error)
            return noted(exact, str(error))
        record.parent.mkdir(exist_ok=True)
        write_whole(record, encode(chosen))
    compiled = exact if chosen.name == FP32 else job.compiled(chosen.kept)
    return replace(noted(compiled, str(chosen)), cached=compiled.cached and is_known)


def find_in_precision(
    path: Path,
    model_name: str,
    cache: Cache,
    target: TargetSpec,
    wanted: WantedPrecision,
    dimensions: Mapping[str, int] = NO_DIMENSIONS,
) -> CompileResult | None:
    """Return what `compile_in_precision` finds in the cache; None if it must compile. Raises ModelError, OSError."""
    exact = find_compiled(path, cache, target, CompileOptions(dimensions))
    if exact is None or wanted.name == FP32 or exact.manifest.engine is not Engine.NATIVE:
        return exact
    if not for_precision(target, BF16).extensions:
        return noted(exact, NO_INSTRUCTIONS)
    job = _Job(path, model_name, cache, target, lambda *_: None, dimensions)
    chosen = _read(job.record(wanted.min_cosine, ()))
    if chosen is None:
        return None
    found = exact if chosen.name == FP32 else find_compiled(path, cache, target, job.options(chosen.kept))
    return found and noted(found, str(chosen))


def noted(compiled: CompileResult, note: str) -> CompileResult:
    """Return it with a note on its precision."""
    return replace(compiled, manifest=replace(compiled.manifest, precision_note=note))


@dataclass(frozen=True)
class _Job:
    """A model to be compiled in bf16."""

    path: Path
    model_name: str
    cache: Cache
    target: TargetSpec
    progress: Progress
    dimensions: Mapping[str, int]

    def record(self, min_cosine: float, keep_fp32: Collection[str]) -> Path:
        """Return the file of what is chosen."""
        compiler = known_compiler(self.cache.root)
        target = for_precision(self.target, BF16)
        key = model_key(self.path, target, self.dimensions, compiler, BF16, keep_fp32)
        return self.cache.root / "precisions" / f"{key}-{min_cosine!r}.json"

    def options(self, kept: tuple[str, ...]) -> CompileOptions:
        """Return the options by which layers `kept` are in fp32."""
        return CompileOptions(self.dimensions, precision=BF16, keep_fp32=kept)

    def compiled(self, kept: tuple[str, ...]) -> CompileResult:
        """Return that artifact."""
        options = self.options(kept)
        return compile_model(self.path, self.model_name, self.cache, self.target, self.progress, options)

    def choose(self, exact: CompileResult, min_cosine: float, kept: tuple[str, ...]) -> ChosenPrecision:
        """Compile with ever more layers in fp32, until answers agree or there are no others."""
        from gangway.compiler.comparison.agreement import compare  # noqa: PLC0415 - numpy and TVM take a second

        rounds = 0
        while True:
            compiled = self.compiled(kept)
            self.progress(AGREEMENT_PHASE, 0, 1)
            found = compare(self.path, self.dimensions, exact, compiled, min_cosine)
            if not found.to_keep:
                return ChosenPrecision(BF16, found.agreement, kept)
            rounds += 1
            if found.keeps_all or rounds == MOST_ROUNDS:
                return ChosenPrecision(FP32, found.agreement)
            kept = tuple(sorted({*kept, *found.to_keep}))


def _read(record: Path) -> ChosenPrecision | None:
    try:
        return decode(ChosenPrecision, record.read_bytes(), "precision")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        _log.warning("damaged record of a precision ignored: %s: %s", record, error)
        return None
