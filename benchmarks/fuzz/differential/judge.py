"""What both sides make of a case, and whether that is the same."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.conformance.runner import CaseRunner, RefusedError, how
from benchmarks.fuzz.differential.cases import Case, draw
from benchmarks.fuzz.differential.draft import Draft, Kind, LeftOutError
from benchmarks.fuzz.differential.numbers import Array
from gangway.compiler.errors import ModelError

LEFT_OUT, REFUSED = "left out", "both refuse"
ONE_STEP = "by one step"
_HALF_RELATIVE = 4e-3


@dataclass(frozen=True)
class Verdict:
    """How a case went: by what it was computed, and how the answer differs; empty: it does not."""

    case: Case
    how: str
    difference: str = ""
    detail: str = ""


def judge(case: Case, runner: CaseRunner, stage: Callable[[str], None]) -> Verdict:
    """Return how a case went. `stage` is told which side is at work: either may end this process."""
    try:
        draft = draw(case)
    except LeftOutError as error:
        return Verdict(case, LEFT_OUT, detail=str(error))
    stage("onnxruntime")
    try:
        model, names, expected = _theirs(draft)
    except LeftOutError as error:
        return Verdict(case, LEFT_OUT, detail=str(error))
    stage("ours")
    try:
        manifest = runner.compile(model)
    except ModelError as error:
        if isinstance(expected, str):
            return Verdict(case, REFUSED)
        return Verdict(case, "refused", f"refused: {error}"[:300])
    way = how(manifest)
    try:
        (found,) = runner.answers(manifest, [[draft.inputs[tensor.name] for tensor in manifest.inputs]])
    except RefusedError:
        return Verdict(
            case,
            REFUSED if isinstance(expected, str) else way,
            "" if isinstance(expected, str) else "refused by a kernel",
        )
    except (RuntimeError, TimeoutError) as error:
        return Verdict(case, way, f"no answer: {error}"[:300])
    if isinstance(expected, str):
        return Verdict(case, way, f"answered what onnxruntime refuses: {expected}")
    order = dict(zip(names, expected, strict=True))
    for tensor, value in zip(manifest.outputs, found, strict=True):
        if difference := compare(value, order[tensor.name], draft):
            return Verdict(case, way, f"{tensor.name}: {difference}")
    return Verdict(case, way)


def _theirs(draft: Draft) -> tuple[bytes, Sequence[str], list[Array] | str]:
    """Return the model, its outputs, and onnxruntime's answers, or why it has none. Raises LeftOutError if it does not
    open the model.
    """
    from gangway.artifact.onnx_session import element_type, open_session  # noqa: PLC0415 - not in processes to be forked

    try:
        session = open_session(draft.model())
    except Exception as error:  # onnxruntime's own exceptions have no common base
        raise LeftOutError(_line(error)) from error
    if draft.batch and not _takes_a_row(session, draft):  # a model of so many rows has no batch
        draft.batch = 0
        session = open_session(draft.model())
    outputs = session.get_outputs()
    kinds = {item.name: (element_type(item.type).replace("string", "object"), list(item.shape)) for item in outputs}
    try:
        answers: list[Array] | str = [np.asarray(value) for value in session.run(None, draft.inputs)]
        ranks = [value.ndim for value in answers if not isinstance(value, str)]
    except Exception as error:
        answers, ranks = _line(error), [len(shape) for _, shape in kinds.values()]
    results: dict[str, Kind] = {}
    for (name, (dtype, shape)), rank in zip(kinds.items(), ranks, strict=True):
        named = [size if isinstance(size, int | str) else f"{name}_{axis}" for axis, size in enumerate(shape)]
        results[name] = (
            dtype,
            named if named and len(named) == rank else None,
        )  # a shape that is not known is empty, too
    return draft.model(results), list(kinds), answers


def _takes_a_row(session: Any, draft: Draft) -> bool:
    try:
        session.run(None, {name: value[:1] for name, value in draft.inputs.items()})
    except Exception:  # onnxruntime's own exceptions have no common base
        return False
    return True


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def compare(found: Array, wanted: Array, draft: Draft) -> str:
    """Return how an answer differs from the wanted one; empty if it does not."""
    if (found.dtype, found.shape) != (wanted.dtype, wanted.shape):
        return f"{found.dtype}{list(found.shape)} instead of {wanted.dtype}{list(wanted.shape)}"
    if wanted.dtype.kind != "f":
        close = np.asarray(found == wanted)
    else:
        close = _is_close(found.astype("f8"), wanted.astype("f8"), draft, wanted.dtype.itemsize)
    if close.all():
        return ""
    index = int(np.argmin(close))
    steps = ""
    if wanted.dtype.kind in "iu" and wanted.dtype.itemsize == 1:
        far = np.abs(found.astype("i4") - wanted.astype("i4")).max()
        steps = f" {ONE_STEP}" if far == 1 else ""
    pair = f"{found.ravel()[index]!r} instead of {wanted.ravel()[index]!r}"
    return f"{int((~close).sum())} of {close.size}: {pair} at {index}{steps}"


def _is_close(found: Array, wanted: Array, draft: Draft, item_bytes: int) -> Any:
    finite = np.abs(wanted[np.isfinite(wanted)]).max(initial=0)
    relative, absolute = draft.relative, draft.absolute + draft.of_largest * finite
    if item_bytes == 2:
        relative, absolute = max(relative, _HALF_RELATIVE), max(absolute, _HALF_RELATIVE * min(1, finite))
    return np.isclose(found, wanted, relative, absolute, equal_nan=True)
