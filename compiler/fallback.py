"""Models that the compiler refuses are left to onnxruntime: the artifact holds the ONNX file, as one layer.

Accepted is what onnxruntime opens, if requests can hold its inputs and outputs: tensors of numbers or strings, of any
shape. Runs with zeros show whether the first dimension may be a batch, and which sizes are possible. One that fails
shows nothing.

Sessions live in a process of their own, since an operator may end that. Then each run has one, too: which of them it
ends fails, and shows nothing.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gangway.artifact.datatypes import STORAGE
from gangway.artifact.format import (
    ITEM_BYTES,
    MAX_TENSORS,
    MOST_PLAUSIBLE_ELEMENTS,
    ONNX_FILE,
    OPTIMISED_ONNX_FILE,
    PLAUSIBLE_SIZES,
    Engine,
    Layer,
    Manifest,
    TargetSpec,
    TensorSpec,
    Version,
    trial_texts,
)
from gangway.artifact.onnx_session import open_session, reason_of, run_session
from gangway.artifact.writer import OnnxArtifactWriter
from gangway.base.host_limits import FreeMemory, allocated_by
from gangway.compiler.arguments import NO_DIMENSIONS, ModelSource
from gangway.compiler.errors import (
    CompilerFaultError,
    EndedApartError,
    MixedRowsError,
    ModelError,
    UnreadableModelError,
    UnsupportedModelError,
    faults_as_refusals,
)
from gangway.compiler.frontend.graph import Graph
from gangway.compiler.frontend.importer import (
    count_parameters,
    deciding_inputs,
    dimension_name,
    read_graph,
    zipped_outputs,
)
from gangway.compiler.frontend.ml_operators import classes_of_zip_maps, drop_zip_maps
from gangway.compiler.frontend.simplify import simplify
from gangway.compiler.frontend.widened_file import or_widened
from gangway.compiler.key import compiler_version, external_files, model_key
from gangway.compiler.known_texts import Texts, known_texts
from gangway.compiler.lower.reference import run_apart
from gangway.compiler.model_file import make_readable, parse, with_weights

LONGEST_REASON = 2000  # it may list nodes, whose names can have any length
MAX_TENSOR_BYTES = 1 << 30  # of one row; as for compiled models
LEAST_SAVED_BYTES = 1 << 20  # a smaller model costs little, however many sessions it has
PART = 4  # a size that others have where one is their sum, as that of an attention mask is
SAVING_FACTOR = 4  # times its size is the memory that onnxruntime takes to save a model, at most
WIDE_REGISTERS = "avx512f"  # the feature by which onnxruntime chooses layouts
VNNI = "avx512_vnni"  # the extension with which products of 8-bit numbers are exact as they are
_TYPES = {  # others: capitals
    "float": "FP32",
    "double": "FP64",
    "float16": "FP16",
    "bfloat16": "BF16",
    "bool": "BOOL",
    "string": "BYTES",
}


@dataclass(frozen=True)
class Signature:
    """A model's inputs and outputs. `trial_sizes` of symbols are possible, as a run has shown; empty: none is known."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batched: bool
    trial_sizes: dict[str, int] = field(default_factory=dict)


class TrialOutput(NamedTuple):
    """An output of a trial: what it has in common with that of another session, however large it is."""

    shape: tuple[int, ...]
    digest: bytes


@dataclass(frozen=True)
class SessionTrials:
    """Runs of a session with zeros; `are_apart`: each in a process of its own; `texts`: of inputs, by column."""

    session: Any
    are_apart: bool
    texts: Mapping[str, Texts] = field(default_factory=dict)

    def run(self, inputs: Sequence[Any], rows: int, sizes: Mapping[str, int]) -> Sequence[TrialOutput]:
        """Return what the model answers. Raises what onnxruntime raises; EndedApartError, and all others as that."""
        if not self.are_apart:
            return self._run(inputs, rows, sizes)
        try:
            return run_apart(lambda: self._run(inputs, rows, sizes), is_limited=False)
        except EndedApartError as error:
            raise EndedApartError(f"{error} that runs the model with zeros") from error

    def _run(self, inputs: Sequence[Any], rows: int, sizes: Mapping[str, int]) -> Sequence[TrialOutput]:
        outputs = self.session.get_outputs()
        bfloat16 = {tensor.name for tensor in (*inputs, *outputs) if _datatype(tensor) == "BF16"}
        feeds = {tensor.name: _zeros(tensor, rows, sizes, self.texts.get(tensor.name, ())) for tensor in inputs}
        arrays = run_session(self.session, [tensor.name for tensor in outputs], feeds, bfloat16)
        return [_answer(array) for array in arrays]


def _answer(array: Any) -> TrialOutput:
    content: Any = repr(array.tolist()).encode() if array.dtype == object else np.ascontiguousarray(array)
    return TrialOutput(array.shape, hashlib.sha256(content).digest())


def leave_to_onnxruntime(
    source: ModelSource,
    folder: Path,
    refusal: ModelError,
    phase_us: dict[str, int],
    optional: Sequence[str] = (),
    mark: Mapping[str, int] = NO_DIMENSIONS,
) -> Manifest:
    """Make the artifact `folder` of an ONNX file, which the compiler refuses to compile.

    If it thinks that the file contradicts itself, onnxruntime must not only open the model, but run it.
    `optional` names inputs that have initializers, which requests may leave out. `mark` is what the key was made with.

    Raises UnsupportedModelError, with both reasons, if it cannot be served in this way either; ModelError; OSError.
    """
    start_ns = time.monotonic_ns()
    path, target, reason = source.path, source.target, str(refusal)
    with OnnxArtifactWriter(folder) as writer:
        try:
            writer.copy(path, list(external_files(path)))
            if model_key(writer.model_path, target, mark) != source.key:
                raise ModelError(f"{path.name} changed while it was read")
            make_readable_copy(writer)
            must_run = not isinstance(refusal, UnsupportedModelError)

            def look(parts: Iterable[bytes] | None) -> _Found:
                if parts is not None:
                    writer.replace_model(parts)
                return _look_at(writer.model_path, optional, must_run)

            found = or_widened(writer.model_path, look)
            signature, session_bytes = found.signature, found.session_bytes
            saved_bytes = _save_optimised(writer, found, target)
        except EndedApartError as error:
            why = f"onnxruntime cannot serve it: {error} that opens the model"
            raise UnsupportedModelError(_both(refusal, why)) from error
        except (OSError, UnreadableModelError):
            raise
        except ModelError as error:
            raise UnsupportedModelError(_both(refusal, str(error))) from error
        if not mark:
            signature = _with_values(signature, path)
        classes = zipped_outputs(path)
        rows = _rows(path, refusal, signature, will_be_compiled=not mark)
        phase_us["onnxruntime"] = (time.monotonic_ns() - start_ns) // 1000
        manifest = Manifest(
            key=source.key,
            model_name=source.model_name,
            batched=signature.batched,
            inputs=signature.inputs,
            outputs=tuple(replace(spec, classes=classes.get(spec.name, ())) for spec in signature.outputs),
            layers=(whole_layer(),),
            arena_bytes=0,
            target=target,
            files={},  # the writer knows them
            engine=Engine.ONNXRUNTIME,
            fallback_reason=reason[:LONGEST_REASON],
            mixes_rows=rows.mixture[:LONGEST_REASON],
            fixed_rows=rows.are_fixed,
            apart_rows=rows.are_apart,
            trial_sizes=signature.trial_sizes,
            phase_us=phase_us,
            parameters=count_parameters(path),
            session_bytes=session_bytes if saved_bytes is None else saved_bytes,
            compiler_version=compiler_version(),
        )
        return writer.commit(manifest)


@dataclass(frozen=True)
class _Found:
    """What a session shows: also how it behaves, and what memory it takes. `are_apart`: how its trials are run."""

    signature: Signature
    behaviour: object
    session_bytes: int
    are_apart: bool


def _look_at(path: Path, optional: Sequence[str], must_run: bool) -> _Found:
    """Return what a session of an ONNX file shows.

    Raises UnsupportedModelError, and EndedApartError if opening it ends the process.
    """
    try:
        return run_apart(lambda: _opened(path, optional, must_run, are_apart=False), is_limited=False)
    except EndedApartError:  # by a trial, maybe
        return run_apart(lambda: _opened(path, optional, must_run, are_apart=True), is_limited=False)


def _opened(path: Path, optional: Sequence[str], must_run: bool, are_apart: bool) -> _Found:
    try:
        session, session_bytes = allocated_by(lambda: open_session(path))
        takes_texts = any(_datatype(tensor) == "BYTES" for tensor in session.get_inputs())
        trials = SessionTrials(session, are_apart, known_texts(path) if takes_texts else {})
        signature = read_signature(trials, optional)
        inputs = trials.session.get_inputs()
        if must_run and not _has_open_sizes(inputs):
            trials.run(inputs, rows=1, sizes={})
        return _Found(signature, _behaviour(trials, signature.trial_sizes), session_bytes, are_apart)
    except ModelError as error:
        raise UnsupportedModelError(f"onnxruntime cannot serve it: {error}") from error
    except Exception as error:  # onnxruntime's own exceptions have no common base
        raise UnsupportedModelError(f"onnxruntime refuses it: {reason_of(error)}") from error


def _both(refusal: ModelError, why: str) -> str:
    """Return why neither engine serves a model, the cause first.

    That is what the compiler finds wrong with the file. What it only lacks says less than why onnxruntime refuses it.
    """
    if isinstance(refusal, UnsupportedModelError):
        return f"{why}; nor can it be compiled: {refusal}"
    return f"{refusal}; and {why}"


def _save_optimised(writer: OnnxArtifactWriter, found: _Found, target: TargetSpec) -> int | None:
    """Have the artifact hold the model as onnxruntime optimises it, with weights that all sessions map.

    Return the memory that a session has of its own. None: the artifact holds the copy. That is so for a small model,
    one that takes too much memory to be saved, and one that onnxruntime writes wrongly, as some with constants among
    their inputs.

    Convolutions have layouts for the widest registers of the machine. Machines that execute code for AVX-512 agree on
    them, others may not: for these the layouts are left to each session. With layouts nothing is optimised later, so
    products are exact on all machines of the target.
    """
    size_bytes = sum(path.stat().st_size for path in writer.model_path.parent.rglob("*"))
    if size_bytes < LEAST_SAVED_BYTES or FreeMemory().measure() < SAVING_FACTOR * size_bytes:
        return None
    layouts = WIDE_REGISTERS in target.features
    path = writer.room_for_saved(OPTIMISED_ONNX_FILE if layouts else ONNX_FILE)
    exact = VNNI not in target.extensions if layouts else None

    def save() -> tuple[bool, int]:
        open_session(writer.model_path, save=path, layouts=layouts, exact=exact)
        session, session_bytes = allocated_by(lambda: open_session(path, optimise=not layouts))
        texts = {spec.name: spec.example_texts for spec in found.signature.inputs}
        trials = SessionTrials(session, found.are_apart, texts)
        return _behaviour(trials, found.signature.trial_sizes) == found.behaviour, session_bytes

    is_alike, session_bytes = False, 0
    with suppress(UnsupportedModelError):
        is_alike, session_bytes = run_apart(save, is_limited=False)
    writer.choose(saved=is_alike)
    return session_bytes if is_alike else None


def _behaviour(trials: SessionTrials, sizes: Mapping[str, int]) -> object:
    """Return what equal sessions have in common: inputs, outputs, and answers to zeros where these are possible."""
    session = trials.session
    tensors = (*session.get_inputs(), *session.get_outputs(), *session.get_overridable_initializers())
    answers: Sequence[TrialOutput] = ()
    with suppress(Exception):  # whatever it does not like about zeros, or about sizes that nobody knows
        answers = trials.run(session.get_inputs(), 1, sizes)
    return [(tensor.name, tensor.type, tensor.shape) for tensor in tensors], answers


def require_servable(path: Path) -> None:
    """Raise UnsupportedModelError if onnxruntime does not open the model, or if a request cannot hold its tensors.

    The model is not run. Raises ModelError, OSError.
    """

    def opened(parts: Iterable[bytes] | None) -> None:
        parts = _readable(path) if parts is None else parts
        try:
            session = open_session(path) if parts is None else open_session(b"".join(parts), beside=path.parent)
        except Exception as error:  # onnxruntime's own exceptions have no common base
            raise UnsupportedModelError(f"onnxruntime refuses it: {reason_of(error)}") from error
        check_tensors(session.get_inputs(), session.get_outputs())

    or_widened(path, lambda parts: run_apart(lambda: opened(parts), is_limited=False))


def make_readable_copy(writer: OnnxArtifactWriter) -> None:
    """Rewrite the copy of an ONNX file, if requests cannot hold its outputs, or onnxruntime does not read it.

    Raises ModelError.
    """
    if (parts := _readable(writer.model_path)) is not None:
        writer.replace_model(parts)


def _readable(path: Path) -> Iterable[bytes] | None:
    """Return the parts of a file as onnxruntime is to have it; None: as it is. Raises ModelError, OSError."""
    model, _ = parse(path)
    _check_ranks(model)
    has_zip_maps = bool(classes_of_zip_maps(model))
    drop_zip_maps(model)
    return with_weights(model, path) if make_readable(model) or has_zip_maps else None


def read_signature(trials: SessionTrials, optional: Sequence[str] = ()) -> Signature:
    """Return inputs and outputs of an open model. Raises UnsupportedModelError for what a request cannot hold."""
    session = trials.session
    inputs, outputs = [*session.get_inputs(), *_optional_inputs(session, optional)], session.get_outputs()
    check_tensors(inputs, outputs)
    trial, answers = _first_trial(trials, inputs)
    keeps_rows = not _takes_files(inputs) if trial is None else _keeps_rows(trials, inputs, trial, answers)
    batched = _may_be_batch(inputs, outputs) and keeps_rows
    specs = [tuple(_spec(tensor, batched) for tensor in tensors) for tensors in (inputs, outputs)]
    specs[1] = tuple(map(_opened_where_wrong, specs[1], answers)) if answers else specs[1]
    marked = tuple(
        replace(spec, optional=spec.name in optional, example_texts=trials.texts.get(spec.name, ()))
        for spec in specs[0]
    )
    return Signature(marked, specs[1], batched, trial or {})


def _with_values(signature: Signature, path: Path) -> Signature:
    """Return the signature in which inputs say whether their value decides what is computed, and zero is a trial's."""
    names: set[str] = set()
    with suppress(CompilerFaultError), faults_as_refusals():
        names = set(deciding_inputs(path)).difference(*(tensor.symbols for tensor in signature.inputs))
    inputs = tuple(replace(spec, value_symbol=spec.name) if spec.name in names else spec for spec in signature.inputs)
    trial = {**signature.trial_sizes, **dict.fromkeys(names, 0)} if signature.trial_sizes else {}
    return replace(signature, inputs=inputs, trial_sizes=trial)


def _optional_inputs(session: Any, names: Sequence[str]) -> list[Any]:
    found = {tensor.name: tensor for tensor in session.get_overridable_initializers()}
    if missing := [name for name in names if name not in found]:
        raise UnsupportedModelError(f"'{missing[0]}' cannot be optional: no input of that name has an initializer")
    return [found[name] for name in names]


def _may_be_batch(inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
    """Whether the first dimension of everything is symbolic, and no other dimension is called like an input's.

    Otherwise names say nothing: exporters often lose them on the way.
    """
    symbolic = all(tensor.shape and _symbol(tensor, 0) for tensor in (*inputs, *outputs))
    others = {_symbol(tensor, axis) for tensor in inputs for axis in range(1, len(tensor.shape))}
    return symbolic and not others.intersection(_symbol(tensor, 0) for tensor in inputs)


def _takes_files(inputs: Sequence[Any]) -> bool:
    """Whether an input is a line of bytes: the first dimension of a file's content counts no rows."""
    return any(_datatype(tensor) == "UINT8" and len(tensor.shape) == 1 for tensor in inputs)


def _first_trial(trials: SessionTrials, inputs: Sequence[Any]) -> tuple[dict[str, int] | None, Sequence[TrialOutput]]:
    """Return sizes of all symbols with which one row of zeros can be computed, and its answers.

    None, and no answers, if none of the plausible can.
    """
    for number, sizes in enumerate(_plausible(inputs)):
        shapes: Any = [
            [sizes.get(_symbol(tensor, axis), n) for axis, n in enumerate(tensor.shape)] for tensor in inputs
        ]
        if number and max(map(math.prod, shapes), default=0) > MOST_PLAUSIBLE_ELEMENTS:
            continue
        with suppress(Exception):  # whatever it does not like about zeros, or about this size
            return sizes, trials.run(inputs, 1, sizes)
    return None, ()


def _plausible(inputs: Sequence[Any]) -> Iterator[dict[str, int]]:
    """Yield sizes of all symbols: one row, and one size of all others, or one that the others add up to."""
    first = {name: 1 for tensor in inputs if tensor.shape and (name := _symbol(tensor, 0))}
    names = (_symbol(tensor, axis) for tensor in inputs for axis in range(1, len(tensor.shape)))
    others = sorted(filter(None, set(names)))
    yield first | dict.fromkeys(others, PLAUSIBLE_SIZES[0])
    for sizes in sums_of(dict.fromkeys(others, PART), others) if len(others) > 1 else ():
        yield first | sizes
    for size in PLAUSIBLE_SIZES[1:] if _has_open_sizes(inputs) else ():
        yield first | dict.fromkeys(others, size)


def sums_of(sizes: Mapping[str, int], names: Iterable[str]) -> Iterator[dict[str, int]]:
    """Yield sizes of which one of `names` is what the others add up to, as the length of an attention mask is."""
    for name in names:
        yield {**sizes, name: sum(size for other, size in sizes.items() if other != name)}


def _keeps_rows(
    trials: SessionTrials, inputs: Sequence[Any], sizes: Mapping[str, int], one: Sequence[TrialOutput]
) -> bool:
    """Whether the model turns one row into one and two into two, as far as runs with zeros show; `one`: its answers."""
    if any(answer.shape[:1] != (1,) for answer in one):
        return False
    try:
        two = trials.run(inputs, 2, sizes)
    except EndedApartError:  # a worker would end, too, with the requests of others in it
        return False
    except Exception:  # whatever it does not like about two rows of zeros
        return True
    pairs = zip(trials.session.get_outputs(), one, two, strict=True)
    return all(
        answer.shape[:1] == (2,) and _agree(answer.shape[1:], single.shape[1:], tensor.shape[1:])
        for tensor, single, answer in pairs
    )


@dataclass(frozen=True)
class _Rows:
    """How rows of a batch influence each other, as far as the compiler finds out.

    `mixture`: how they do. `are_fixed`: only a known number of rows can be compiled. `are_apart`: they do not.
    """

    mixture: str = ""
    are_fixed: bool = False
    are_apart: bool = False

    @classmethod
    def refused(cls, error: ModelError | None, are_fixed: bool = False) -> "_Rows":
        """Return what the check of the batch says."""
        return cls(str(error) if isinstance(error, MixedRowsError) else "", are_fixed, error is None)


def _rows(path: Path, refusal: ModelError, signature: Signature, will_be_compiled: bool) -> _Rows:
    """Return what is known of rows. What the compiler has not looked at because of symbols it reads as in the trial."""
    if not signature.batched or not signature.trial_sizes:
        return _Rows.refused(refusal)
    symbols = {name for tensor in signature.inputs for name in tensor.symbols[1:] if name}
    sizes = {name: signature.trial_sizes[name] for name in symbols}
    error = refusal if isinstance(refusal, MixedRowsError) or not sizes else _refusal(path, sizes, simplify)
    if not will_be_compiled or error is None:
        return _Rows.refused(error)
    from gangway.compiler.lower.lowering import lower_model  # noqa: PLC0415 - few models get so far

    def lower(graph: Graph) -> object:
        return lower_model(graph, slow=())  # how fast it would be does not count

    if sizes and not isinstance(error, MixedRowsError):
        error = _refusal(path, sizes, lower)  # operators become others, of which more is known
    return _Rows.refused(error, error is not None and _refusal(path, signature.trial_sizes, lower) is None)


def _refusal(path: Path, sizes: Mapping[str, int], stage: Callable[[Graph], object]) -> ModelError | None:
    """Return why the compiler refuses a model of these sizes up to a stage."""
    try:
        with faults_as_refusals():
            stage(read_graph(path, sizes))
    except ModelError as error:
        return error
    return None


def _has_open_sizes(inputs: Sequence[Any]) -> bool:
    """Whether an input has symbolic dimensions other than the first."""
    return any(not isinstance(size, int) for tensor in inputs for size in tensor.shape[1:])


def _agree(shape: Sequence[int], other: Sequence[int], declared: Sequence[Any]) -> bool:
    """Whether two answers have the same sizes where the model declares them, however it does."""
    if not len(shape) == len(other) == len(declared):
        return False
    return all(a == b for a, b, known in zip(shape, other, declared, strict=True) if isinstance(known, int))


def _opened_where_wrong(spec: TensorSpec, answer: TrialOutput) -> TensorSpec:
    """Return an output's spec without sizes that a trial contradicts: what is inferred of some operators is wrong."""
    pairs = tuple(zip(spec.shape, answer.shape, strict=False))
    if len(spec.shape) != len(answer.shape) or all(declared in (-1, size) for declared, size in pairs):
        return spec
    shape = tuple(declared if declared == size else -1 for declared, size in pairs)
    return replace(spec, shape=shape, row_bytes=0)


def _zeros(tensor: Any, rows: int, sizes: Mapping[str, int], texts: Texts) -> Any:
    shape = [sizes.get(_symbol(tensor, axis), size) for axis, size in enumerate(tensor.shape)]
    if shape and not isinstance(tensor.shape[0], int):
        shape[0] = rows
    datatype = _datatype(tensor)
    if datatype != "BYTES":
        return np.zeros(shape, STORAGE[datatype])
    return np.array(trial_texts(texts, math.prod(shape)), object).reshape(shape)


def _check_ranks(model: Any) -> None:
    """Raise UnsupportedModelError for an input without a shape: to onnxruntime it is one of no dimensions."""
    initial = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        kind = value.type.tensor_type
        if value.type.HasField("tensor_type") and not kind.HasField("shape") and value.name not in initial:
            raise UnsupportedModelError(
                f"input '{value.name}' has no shape in the file; a request needs the number of its dimensions, of which"
                " each may be symbolic"
            )


def check_tensors(inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """Raise UnsupportedModelError for what a request cannot hold."""
    for kind, tensors in (("input", inputs), ("output", outputs)):
        if not 1 <= len(tensors) <= MAX_TENSORS:
            raise UnsupportedModelError(f"the model has {len(tensors)} {kind}s; 1 to {MAX_TENSORS} are possible")
        for tensor in tensors:
            _check(kind, tensor)
    if {"BF16", "BYTES"} <= {_datatype(tensor) for tensor in (*inputs, *outputs)}:
        raise UnsupportedModelError("onnxruntime's Python interface cannot take strings and bfloat16 in one model")


def _check(kind: str, tensor: Any) -> None:
    if not tensor.type.startswith("tensor("):
        raise UnsupportedModelError(f"{kind} '{tensor.name}' is a {tensor.type}, not a tensor")
    datatype = _datatype(tensor)
    if datatype not in ITEM_BYTES:
        raise UnsupportedModelError(f"{kind} '{tensor.name}' holds {tensor.type}, not what a request can have")
    size_bytes = _fixed_elements(tensor) * _item_bytes(datatype)
    if size_bytes > MAX_TENSOR_BYTES:
        raise UnsupportedModelError(
            f"{kind} '{tensor.name}' of shape {tensor.shape} has {size_bytes} bytes;"
            f" {MAX_TENSOR_BYTES >> 20} MiB are possible"
        )


def _spec(tensor: Any, batched: bool) -> TensorSpec:
    shape = tuple(max(size, -1) if isinstance(size, int) else -1 for size in tensor.shape)
    symbols = tuple(_symbol(tensor, axis) for axis in range(len(shape)))
    datatype = _datatype(tensor)
    known = -1 not in shape[batched:] and datatype != "BYTES"
    row_bytes = _fixed_elements(tensor) * _item_bytes(datatype) if known else 0
    return TensorSpec(tensor.name, datatype, shape, row_bytes, symbols)


def _symbol(tensor: Any, axis: int) -> str:
    return dimension_name(tensor.name, axis, tensor.shape[axis])


def _datatype(tensor: Any) -> str:
    element = str(tensor.type).removeprefix("tensor(").removesuffix(")")
    return _TYPES.get(element, element.upper())


def _item_bytes(datatype: str) -> int:
    return ITEM_BYTES[datatype] or 1  # a string has one byte at least


def _fixed_elements(tensor: Any) -> int:
    return math.prod(size for size in tensor.shape if isinstance(size, int) and size >= 0)


def whole_layer() -> Layer:
    """Return the one layer of a model that onnxruntime executes as a whole."""
    version = Version("onnxruntime", tasks=1, description="onnxruntime")
    return Layer("onnxruntime", "whole model", "", (), (version,), flops=0, bytes=0, max_ranks=1)
