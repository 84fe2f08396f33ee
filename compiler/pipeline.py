"""The entrance of the compiler: an ONNX file becomes an artifact in the cache, unless the cache has it already.

Only when something must be compiled, `job.py` is imported, and with it onnx, numpy and TVM (a second).
"""

import gc
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gangway.artifact.cache import Cache
from gangway.artifact.format import Manifest, TargetSpec
from gangway.artifact.tuning import Tuning, TuningError, find_tuning
from gangway.compiler.arguments import NO_DIMENSIONS, NO_OPTIONS, CompileOptions, ModelSource
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


def compile_model(
    path: Path,
    model_name: str,
    cache: Cache,
    target: TargetSpec,
    progress: Progress,
    options: CompileOptions = NO_OPTIONS,
) -> CompileResult:
    """Return the artifact of the ONNX file `path`, compiled unless the cache holds it.

    If the model has been tuned on this machine, it is the one with the tuning's versions, which has a key of its own.
    The manifest's precision is float32 where this machine or onnxruntime has no other. Errors as of `compile_static`.
    """
    job = _Compilation.of(path, model_name, cache, target, progress, options)
    source = job.source
    if options.with_batch and not cache.folder(source.key).exists():
        require_compiler()
        from gangway.compiler.frontend.importer import require_batch  # noqa: PLC0415

        require_batch(path)
    if options.refusal:
        return job.leave(options.refusal, _mark(options))
    tuning = find_tuning(cache.root, source.key, source.target.name)
    if tuning and (manifest := cache.lookup(tuning.tuned_key)):
        return CompileResult(manifest, cache.folder(tuning.tuned_key), True)
    static = job.compile()
    if tuning is None:
        return static
    try:
        with faults_as_refusals(TuningError):
            return job.compile_tuned(tuning, static)
    except (TuningError, CompilerFaultError) as error:
        _log.warning("tuning ignored: %s", error)
        return static


def compile_static(
    path: Path,
    model_name: str,
    cache: Cache,
    target: TargetSpec,
    progress: Progress,
    options: CompileOptions = NO_OPTIONS,
) -> CompileResult:
    """Return the artifact with the static choice of each kernel, compiled unless the cache holds it.

    What cannot be compiled is left to onnxruntime, if that accepts it: see the manifest's `engine`. Not so if
    `dimensions` gives values to symbolic dimensions: onnxruntime serves all of them with the artifact without values.
    A model at which the compiler itself fails is left to onnxruntime, too, until the next attempt.

    Raises ModelError (UnsupportedModelError is one), and OSError when files cannot be read or written.
    """
    return _Compilation.of(path, model_name, cache, target, progress, options).compile()


def find_compiled(
    path: Path, cache: Cache, target: TargetSpec, options: CompileOptions = NO_OPTIONS
) -> CompileResult | None:
    """Return what `compile_model` finds in the cache; None if it must compile. Raises ModelError, OSError."""
    options = _possible(options, target)
    target = for_file(path, target, options.precision)
    key = _key(path, target, cache, options, options.dimensions)
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
    key = stand_in_key(_key(path, target, cache, NO_OPTIONS, NO_DIMENSIONS))
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
            manifest = make(ModelSource(path, model_name, key, target), cache.folder(key), stamp)
            _tell_zip_maps(path, model_name)
            return CompileResult(manifest, cache.folder(key), False)
    return compile_model(path, model_name, cache, target, progress, CompileOptions(with_batch=with_batch))


def _possible(options: CompileOptions, target: TargetSpec) -> CompileOptions:
    """Return the options in float32 where this machine, or onnxruntime, has no other precision."""
    if options.refusal or not for_precision(target, options.precision).extensions:
        return replace(options, precision="fp32", keep_fp32=())
    return options


def _mark(options: CompileOptions) -> Mapping[str, int]:
    """Return what tells the key of a model that is left to onnxruntime without an attempt from that of its file."""
    if options.optional:
        return with_optional(options.optional)
    return WHOLE if options.whole else UNCOMPILED if options.uncompiled else NO_DIMENSIONS


def _key(path: Path, target: TargetSpec, cache: Cache, options: CompileOptions, dimensions: Mapping[str, int]) -> str:
    return model_key(path, target, dimensions, known_compiler(cache.root), options.precision, options.keep_fp32)


@dataclass(frozen=True)
class _Compilation:
    """What becomes of one ONNX file with one key; `start_ns`: when the key was begun, by the monotonic clock."""

    source: ModelSource
    cache: Cache
    progress: Progress
    options: CompileOptions
    start_ns: int

    @classmethod
    def of(
        cls, path: Path, model_name: str, cache: Cache, target: TargetSpec, progress: Progress, options: CompileOptions
    ) -> "_Compilation":
        """Compute the key. Raises ModelError, OSError."""
        start_ns = time.monotonic_ns()
        progress("key", 0, 1)
        options = _possible(options, target)
        target, mark, span = for_file(path, target, options.precision), _mark(options), options.span
        if span is not None:
            options = replace(options, dimensions=span.sizes(span.last, options.dimensions))
            mark = mark or span.marked(options.dimensions)
        key = _key(path, target, cache, options, mark or options.dimensions)
        return cls(ModelSource(path, model_name, key, target), cache, progress, options, start_ns)

    @property
    def _folder(self) -> Path:
        return self.cache.folder(self.source.key)

    def compile(self) -> CompileResult:
        """Return the artifact; `compile_static` says what it may be instead."""
        source, cache, options = self.source, self.cache, self.options
        if manifest := cache.lookup(source.key):
            return CompileResult(manifest, self._folder, True)
        with cache.lock(source.key):
            if manifest := cache.lookup(source.key):  # another process has compiled it in the meantime
                return CompileResult(manifest, self._folder, True)
            require_compiler()
            phases = Phases(self.progress, self._key_us())
            try:
                with faults_as_refusals():
                    manifest = self._run_job(phases)
                return self._made(manifest)
            except (CompilerFaultError, MemoryError) as error:
                if options.dimensions:
                    raise
                refusal: ModelError = CompilerFaultError(str(error) or "out of memory")  # no frames, which hold much
            except ModelError as error:
                if options.dimensions or isinstance(error, UnreadableModelError):
                    raise
                refusal = error
            if options.precision != "fp32":
                return compile_static(source.path, source.model_name, cache, source.target, self.progress)
            if isinstance(refusal, CompilerFaultError):
                _log.warning("%s: the compiler failed, so onnxruntime serves it: %s", source.model_name, refusal)
                key = _key(source.path, source.target, cache, options, UNCOMPILED)
                return replace(self, source=replace(source, key=key)).leave(str(refusal), UNCOMPILED)
            try:
                return self._left(refusal, phases.times_us)
            except UnsupportedModelError as error:
                raise type(refusal)(str(error)) from error  # what the compiler finds wrong says more about the file

    def _run_job(self, phases: Phases) -> Manifest:
        with phases.timed("import"):
            gc.set_threshold(COLLECT_AFTER)
            if not self.options.dimensions:
                from gangway.compiler.frontend.importer import require_sizes  # noqa: PLC0415 - onnx and numpy

                require_sizes(self.source.path)
            from gangway.compiler.job import CompileJob  # noqa: PLC0415 - TVM takes a second
            from gangway.compiler.span import SpanJob  # noqa: PLC0415
        job = CompileJob if self.options.span is None else SpanJob
        return job(self.source, self.options, phases).run(self._folder)

    def compile_tuned(self, tuning: Tuning, static: CompileResult) -> CompileResult:
        """Return the artifact with a tuning's versions. Raises TuningError, ModelError, OSError."""
        folder, cache = self.cache.folder(tuning.tuned_key), self.cache
        with cache.lock(tuning.tuned_key):
            if manifest := cache.lookup(tuning.tuned_key):  # another process has compiled it in the meantime
                return CompileResult(manifest, folder, True)
            require_compiler()
            self.progress(TUNED_PHASE, 0, 1)
            from gangway.compiler.variants import compile_tuned  # noqa: PLC0415

            manifest = compile_tuned(
                self.source.path,
                tuning,
                static.folder,
                static.manifest,
                folder,
                lambda *count: self.progress(TUNED_PHASE, *count),
                self.options.dimensions,
            )
            return CompileResult(manifest, folder, False)

    def leave(self, refusal: str, mark: Mapping[str, int]) -> CompileResult:
        """Return the artifact of a model that onnxruntime executes; `mark` is what its key was made with."""
        key = self.source.key
        with self.cache.lock(key):
            if manifest := self.cache.lookup(key):
                return CompileResult(manifest, self._folder, True)
            require_compiler()
            phase_us = self._key_us()
            self.progress("import", 0, 1)
            return self._left(UnsupportedModelError(refusal), phase_us, mark)

    def _left(
        self, refusal: ModelError, phase_us: dict[str, int], mark: Mapping[str, int] = NO_DIMENSIONS
    ) -> CompileResult:
        self.progress(FALLBACK_PHASE, 0, 1)
        from gangway.compiler.fallback import leave_to_onnxruntime  # noqa: PLC0415

        optional = self.options.optional
        return self._made(leave_to_onnxruntime(self.source, self._folder, refusal, phase_us, optional, mark))

    def _made(self, manifest: Manifest) -> CompileResult:
        _tell_zip_maps(self.source.path, self.source.model_name)
        return CompileResult(manifest, self._folder, False)

    def _key_us(self) -> dict[str, int]:
        return {"key": (time.monotonic_ns() - self.start_ns) // 1000}


def _tell_zip_maps(path: Path, model_name: str) -> None:
    """Log which outputs a served model answers otherwise than its file says."""
    from gangway.compiler.frontend.importer import zipped_outputs  # noqa: PLC0415

    for name in zipped_outputs(path):
        _log.info(
            "%s: output '%s' is a tensor of scores [rows, classes], since its ZipMap is left out", model_name, name
        )
