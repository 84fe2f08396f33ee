"""The entrance of the compiler: an ONNX file becomes an artifact in the cache, unless the cache has it already.

Only when something must be compiled, `job.py` is imported, and with it onnx, numpy and TVM (a second).
"""

import gc
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gangway.artifact.cache import Cache
from gangway.artifact.format import Manifest, Precision, TargetSpec
from gangway.artifact.instances import SizeSpan
from gangway.artifact.tuning import Tuning, TuningError, find_tuning
from gangway.compiler.arguments import NO_DIMENSIONS
from gangway.compiler.errors import (
    CompilerFaultError,
    ModelError,
    UnreadableModelError,
    UnsupportedModelError,
    faults_as_refusals,
)
from gangway.compiler.key import (
    UNCOMPILED,
    WHOLE,
    files_stamp,
    known_compiler,
    model_key,
    require_compiler,
    stand_in_key,
    with_optional,
)
from gangway.compiler.progress import FALLBACK_PHASE, TUNED_PHASE, Phases, Progress
from gangway.compiler.target import for_file, for_precision

# A compilation makes objects and keeps them: looking through them for garbage as often as is usual takes a quarter of
# the time to import TVM.
COLLECT_AFTER = 100_000
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CompileResult:
    """The result: where the artifact lies, and whether the cache had it already."""

    manifest: Manifest
    folder: Path
    cached: bool


@dataclass(frozen=True)
class _Choice:
    """The precision of products, and names of layers that keep float32."""

    precision: Precision = "fp32"
    keep_fp32: tuple[str, ...] = ()


def compile_model(
    path: Path,
    model_name: str,
    cache: Cache,
    target: TargetSpec,
    progress: Progress,
    dimensions: Mapping[str, int] = NO_DIMENSIONS,
    optional: Sequence[str] = (),
    with_batch: bool = False,
    whole: bool = False,
    uncompiled: str | None = None,
    precision: Precision = "fp32",
    keep_fp32: Collection[str] = (),
    span: SizeSpan | None = None,
) -> CompileResult:
    """Return the artifact of the ONNX file `path`, compiled unless the cache holds it.

    If the model has been tuned on this machine, it is the one with the tuning's versions, which has a key of its own.
    `dimensions` gives values to symbolic dimensions, each set of which is tuned by itself. `optional` names inputs
    that requests may leave out, since they have initializers, too; such a model is left to onnxruntime. `with_batch`: a
    model whose first dimension cannot be a batch is not wanted. `whole`: it is left to onnxruntime, because the first
    dimensions of its inputs may differ. `uncompiled`: why it is, for now. `keep_fp32` names layers that keep float32,
    whatever the `precision` is. The manifest's precision is float32 where this machine or onnxruntime has no other.
    `span`: one artifact for several sizes, in float32.
    Errors as of `compile_static`.
    """
    start_ns = time.monotonic_ns()
    progress("key", 0, 1)
    choice = _choice(target, precision, keep_fp32)
    target = for_file(path, target, choice.precision)
    mark = with_optional(optional) if optional else WHOLE if whole else UNCOMPILED if uncompiled else NO_DIMENSIONS
    if optional or whole or uncompiled:
        target, choice = for_file(path, target, "fp32"), _Choice()
    if span is not None:
        dimensions = span.sizes(span.last, dimensions)
    key = _key(path, target, mark or (span.marked(dimensions) if span else dimensions), cache, choice)
    if with_batch and not cache.folder(key).exists():
        require_compiler()
        from gangway.compiler.frontend.importer import require_batch  # noqa: PLC0415

        require_batch(path)
    if optional or whole or uncompiled:
        refusal = uncompiled or "first dimensions of its inputs may differ"
        if optional:
            refusal = f"it has optional inputs: {', '.join(optional)}"
        return _leave(path, model_name, key, mark, optional, refusal, start_ns, cache, target, progress)
    tuning = find_tuning(cache.root, key, target.name)
    if tuning and (manifest := cache.lookup(tuning.tuned_key)):
        return CompileResult(manifest, cache.folder(tuning.tuned_key), True)
    static = _compile_static(path, model_name, key, start_ns, cache, target, progress, dimensions, choice, span)
    if tuning is None:
        return static
    try:
        with faults_as_refusals(TuningError):
            return _compile_tuned(path, tuning, static, cache, progress, dimensions)
    except (TuningError, CompilerFaultError) as error:
        _log.warning("tuning ignored: %s", error)
        return static


def find_compiled(
    path: Path,
    cache: Cache,
    target: TargetSpec,
    precision: Precision = "fp32",
    keep_fp32: Collection[str] = (),
    dimensions: Mapping[str, int] = NO_DIMENSIONS,
) -> CompileResult | None:
    """Return what `compile_model` finds in the cache; None if it must compile. Raises ModelError, OSError."""
    choice = _choice(target, precision, keep_fp32)
    target = for_file(path, target, choice.precision)
    key = _key(path, target, dimensions, cache, choice)
    if tuning := find_tuning(cache.root, key, target.name):
        key = tuning.tuned_key
    manifest = cache.lookup(key)
    return CompileResult(manifest, cache.folder(key), True) if manifest else None


def make_stand_in(
    path: Path, model_name: str, cache: Cache, target: TargetSpec, progress: Progress, with_batch: bool = False
) -> CompileResult:
    """Return what serves a model until it is compiled: by onnxruntime, under a key of its own, made in a second.

    A model of open sizes is left to onnxruntime at once, as `compile_model` does. So is one that cannot have a stand-in
    for another reason, after the compiler has been imported. Errors as of `compile_static`.
    """
    stamp = files_stamp(path)
    target = for_file(path, target, "fp32")
    key = stand_in_key(_key(path, target, NO_DIMENSIONS, cache, _Choice()))
    with cache.lock(key):
        if manifest := cache.lookup(key):
            return CompileResult(manifest, cache.folder(key), True)
        require_compiler()
        with suppress(ModelError), faults_as_refusals():
            from gangway.compiler.frontend.importer import require_batch, require_sizes  # noqa: PLC0415 - onnx, numpy
            from gangway.compiler.stand_in import make_stand_in as make  # noqa: PLC0415 - and onnxruntime

            if with_batch:
                require_batch(path)
            require_sizes(path)
            manifest = make(path, model_name, key, target, cache.folder(key), stamp)
            _tell_zip_maps(path, model_name)
            return CompileResult(manifest, cache.folder(key), False)
    return compile_model(path, model_name, cache, target, progress, with_batch=with_batch)


def _choice(target: TargetSpec, precision: Precision, keep_fp32: Collection[str]) -> _Choice:
    """Return the precision, float32 where this machine has no other."""
    if not for_precision(target, precision).extensions:
        return _Choice()
    return _Choice(precision, tuple(keep_fp32))


def _compile_tuned(
    path: Path, tuning: Tuning, static: CompileResult, cache: Cache, progress: Progress, dimensions: Mapping[str, int]
) -> CompileResult:
    folder = cache.folder(tuning.tuned_key)
    with cache.lock(tuning.tuned_key):
        if manifest := cache.lookup(tuning.tuned_key):  # another process has compiled it in the meantime
            return CompileResult(manifest, folder, True)
        require_compiler()
        progress(TUNED_PHASE, 0, 1)
        from gangway.compiler.variants import compile_tuned  # noqa: PLC0415

        manifest = compile_tuned(
            path,
            tuning,
            static.folder,
            static.manifest,
            folder,
            lambda *count: progress(TUNED_PHASE, *count),
            dimensions,
        )
        return CompileResult(manifest, folder, False)


def compile_static(
    path: Path,
    model_name: str,
    cache: Cache,
    target: TargetSpec,
    progress: Progress,
    dimensions: Mapping[str, int] = NO_DIMENSIONS,
) -> CompileResult:
    """Return the artifact with the static choice of each kernel, compiled unless the cache holds it.

    What cannot be compiled is left to onnxruntime, if that accepts it: see the manifest's `engine`. Not so if
    `dimensions` gives values to symbolic dimensions: onnxruntime serves all of them with the artifact without values.
    A model at which the compiler itself fails is left to onnxruntime, too, until the next attempt.

    Raises ModelError (UnsupportedModelError is one), and OSError when files cannot be read or written.
    """
    start_ns = time.monotonic_ns()
    progress("key", 0, 1)
    target = for_file(path, target, "fp32")
    key = _key(path, target, dimensions, cache, _Choice())
    return _compile_static(path, model_name, key, start_ns, cache, target, progress, dimensions, _Choice())


def _key(path: Path, target: TargetSpec, dimensions: Mapping[str, int], cache: Cache, choice: "_Choice") -> str:
    compiler = known_compiler(cache.root)
    return model_key(path, target, dimensions, compiler, choice.precision, choice.keep_fp32)


def _compile_static(
    path: Path,
    model_name: str,
    key: str,
    start_ns: int,
    cache: Cache,
    target: TargetSpec,
    progress: Progress,
    dimensions: Mapping[str, int],
    choice: "_Choice",
    span: SizeSpan | None = None,
) -> CompileResult:
    folder = cache.folder(key)
    if manifest := cache.lookup(key):
        return CompileResult(manifest, folder, True)
    with cache.lock(key):
        if manifest := cache.lookup(key):  # another process has compiled it in the meantime
            return CompileResult(manifest, folder, True)
        require_compiler()
        phases = Phases(progress, {"key": (time.monotonic_ns() - start_ns) // 1000})
        try:
            with faults_as_refusals():
                manifest = _run_job(path, model_name, key, cache, target, phases, dimensions, choice, span)
            _tell_zip_maps(path, model_name)
            return CompileResult(manifest, folder, False)
        except (CompilerFaultError, MemoryError) as error:
            if dimensions:
                raise
            refusal: ModelError = CompilerFaultError(str(error) or "out of memory")  # and no frames, which hold much
        except ModelError as error:
            if dimensions or isinstance(error, UnreadableModelError):
                raise
            refusal = error
        if choice.precision != "fp32":
            return compile_static(path, model_name, cache, target, progress)
        if isinstance(refusal, CompilerFaultError):
            _log.warning("%s: the compiler failed, so onnxruntime serves it: %s", model_name, refusal)
            key = _key(path, target, UNCOMPILED, cache, choice)
            return _leave(path, model_name, key, UNCOMPILED, (), str(refusal), start_ns, cache, target, progress)
        progress(FALLBACK_PHASE, 0, 1)
        from gangway.compiler.fallback import leave_to_onnxruntime  # noqa: PLC0415

        try:
            manifest = leave_to_onnxruntime(path, model_name, key, target, phases.times_us, folder, refusal)
        except UnsupportedModelError as error:
            raise type(refusal)(str(error)) from error  # what the compiler finds wrong says more about the file
        _tell_zip_maps(path, model_name)
        return CompileResult(manifest, folder, False)


def _run_job(
    path: Path,
    model_name: str,
    key: str,
    cache: Cache,
    target: TargetSpec,
    phases: Phases,
    dimensions: Mapping[str, int],
    choice: "_Choice",
    span: SizeSpan | None,
) -> Manifest:
    with phases.timed("import"):
        gc.set_threshold(COLLECT_AFTER)
        if not dimensions:
            from gangway.compiler.frontend.importer import require_sizes  # noqa: PLC0415 - onnx and numpy

            require_sizes(path)
        from gangway.compiler.job import CompileJob  # noqa: PLC0415 - TVM takes a second
        from gangway.compiler.span import SpanJob  # noqa: PLC0415
    if span is not None:
        return SpanJob(path, model_name, key, target, phases, dimensions, span).run(cache.folder(key))
    job = CompileJob(path, model_name, key, target, phases, dimensions, choice.precision, choice.keep_fp32)
    return job.run(cache.folder(key))


def _tell_zip_maps(path: Path, model_name: str) -> None:
    """Log which outputs a served model answers otherwise than its file says."""
    from gangway.compiler.frontend.importer import zipped_outputs  # noqa: PLC0415

    for name in zipped_outputs(path):
        _log.info(
            "%s: output '%s' is a tensor of scores [rows, classes], since its ZipMap is left out", model_name, name
        )


def _leave(
    path: Path,
    model_name: str,
    key: str,
    mark: Mapping[str, int],
    optional: Sequence[str],
    refusal: str,
    start_ns: int,
    cache: Cache,
    target: TargetSpec,
    progress: Progress,
) -> CompileResult:
    folder = cache.folder(key)
    with cache.lock(key):
        if manifest := cache.lookup(key):
            return CompileResult(manifest, folder, True)
        require_compiler()
        phase_us = {"key": (time.monotonic_ns() - start_ns) // 1000}
        progress("import", 0, 1)
        progress(FALLBACK_PHASE, 0, 1)
        from gangway.compiler.fallback import leave_to_onnxruntime  # noqa: PLC0415

        error = UnsupportedModelError(refusal)
        manifest = leave_to_onnxruntime(path, model_name, key, target, phase_us, folder, error, optional, mark)
        _tell_zip_maps(path, model_name)
        return CompileResult(manifest, folder, False)
