"""Whether rows of a batch influence each other in a model that onnxruntime executes, as far as runs can show it.

Four different rows are computed alone, together as far as the batch allows, and the last with the first. Each must be
the same every time, up to the rounding of other sizes: then requests may share a run.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, Final

import numpy as np

from gangway.artifact.datatypes import STORAGE, numbers_of
from gangway.executor.frames import join_strings
from gangway.python_backend.elements import split_texts
from gangway.server.control.repository.trial_runs import SymbolSizes, Trial, TrialError, TrialRunner, trial_shapes
from gangway.server.errors import ModelLoadError
from gangway.server.models.served import ServedModel
from gangway.server.models.tensors import Tensor
from gangway.server.requests.codecs import Codec
from gangway.server.requests.data_plane import Submission

INTEGERS: Final = ((0, 1), (1, 2), (0, 0))  # from, to: flags or first entries of a table; divisors; what is never wrong
SCALES: Final = (1.0, 4.0, 0.25, 0.0)  # of numbers in each row: what depends on the range of all must show
TOLERANCE: Final = 1e-3  # relative to the largest number of a row's output
HALF_TOLERANCE: Final = 1e-2  # of numbers with 16 bits

Row = Sequence[Any]  # an array for each input, or each output


def why_rows_mix(runner: TrialRunner, model: ServedModel, sizes: Sequence[SymbolSizes]) -> str:
    """Return how rows of a batched model influence each other; nothing if they do not.

    Blocks until it is known. Raises TrialError if it cannot be tested, ModelLoadError if the runner is stopped.
    """
    failure = "no sizes are known to try the model with"
    for some in sizes:
        for integers in INTEGERS:
            try:
                return _Test(runner, model, some).difference(integers)
            except TrialError as error:
                failure = str(error)
            except ModelLoadError as error:
                if runner.stop.is_set():
                    raise
                raise TrialError(f"whether rows influence each other cannot be tested: {error}") from error
    raise TrialError(f"whether rows influence each other cannot be tested: {failure}")


@dataclass(frozen=True)
class _Test:
    """Runs of one model with these sizes of its symbolic dimensions."""

    runner: TrialRunner
    model: ServedModel
    sizes: SymbolSizes

    def difference(self, integers: tuple[int, int]) -> str:
        """Return what differs, nothing if nothing does; `integers` are the least and the largest. Raises TrialError."""
        rows = _random_rows(self.model, self.sizes, integers)
        alone = [self._run([row]) for row in rows]
        if not all(_has_numbers([row[output] for row in alone]) for output in range(len(alone[0]))):
            raise TrialError("an output has no finite numbers in trial runs")
        for members in (tuple(range(min(len(rows), self.model.max_rows))), (len(rows) - 1, 0)):
            together = self._run([rows[member] for member in members])
            for place, member in enumerate(members):
                for output, whole, single in zip(self._names(), together, alone[member], strict=True):
                    if (single.shape[:1], whole.shape[:1]) != ((1,), (len(members),)):
                        shapes = f"{list(single.shape)} for a row, {list(whole.shape)} for {len(members)}"
                        return f"output {output} has the shape {shapes}"
                    if not _is_same(whole[place : place + 1], single):  # a row of a line of strings is no array
                        return f"a row among {len(members)} has another output {output} than the same row alone"
        return ""

    def _names(self) -> list[str]:
        """Return what each output that `_run` returns is called, in quotes."""
        states = self.model.sequence.settings.states if self.model.sequence else ()
        return [f"'{name}'" for name in (*self.model.outputs, *(state.output_name for state in states))]

    def _run(self, rows: Sequence[Row]) -> Row:
        """Return the outputs of one run. Raises TrialError, ModelLoadError."""
        shapes = trial_shapes(self.model, self.sizes, len(rows))
        states = self.model.sequence.states if self.model.sequence else ()
        kinds = [(tensor.index, tensor.datatype) for tensor in self.model.outputs.values()]
        kinds += [(state.output, state.tensor.datatype) for state in states]
        codec = Codec.framed(self.model, shapes, list(self.model.outputs.values()))
        contents = [_contents(np.concatenate(arrays)) for arrays in zip(*rows, strict=True)]
        outputs: list[Any] = []

        def read(submission: Submission) -> bool:
            (view,) = submission.outputs
            parts = codec.parts_in(view)
            if parts is None:
                return False
            for place, datatype in kinds:
                part = parts[place]
                content = bytes(view[part.offset : part.offset + part.size_bytes])
                outputs.append(_array(content, datatype, part.shape))
            return True

        self.runner.run_once(Trial(codec, contents, len(rows)), read)
        return outputs


def _random_rows(model: ServedModel, sizes: SymbolSizes, integers: tuple[int, int]) -> list[Row]:
    """Return different rows, always the same ones; the last one has the least numbers: zeros, mostly."""
    random = np.random.default_rng(0)
    inputs = trial_shapes(model, sizes).inputs
    return [[_random(random, tensor, shape, scale, integers) for tensor, shape in inputs] for scale in SCALES]


def _random(
    random: np.random.Generator, tensor: Tensor, shape: Sequence[int], scale: float, integers: tuple[int, int]
) -> Any:
    (least, largest), datatype = integers, tensor.datatype
    if tensor.example_texts:
        columns = islice(cycle(tensor.example_texts), math.prod(shape))
        return np.array([random.choice(column) for column in columns], object).reshape(shape)
    if datatype in ("FP16", "FP32", "FP64"):
        return (scale * random.standard_normal(shape) + least).astype(STORAGE[datatype])
    if datatype == "BF16":
        floats = (scale * random.standard_normal(shape) + least).astype(np.float32)
        return (floats.view(np.uint32) >> 16).astype(np.uint16)
    numbers = random.integers(least, largest, shape, endpoint=True)
    if not scale:
        numbers[...] = least
    elif numbers.size:
        numbers.flat[0] = largest  # a single one must differ, too
    return numbers.astype(str).astype(object) if datatype == "BYTES" else numbers.astype(STORAGE[datatype])


def _contents(array: Any) -> bytes:
    return join_strings(array.ravel().tolist()) if array.dtype == object else bytes(array.tobytes())


def _array(content: bytes, datatype: str, shape: Sequence[int]) -> Any:
    if datatype == "BYTES":
        return np.array(split_texts(content, math.prod(shape)), object).reshape(shape)
    return numbers_of(content, datatype).reshape(shape)


def _is_same(first: Any, second: Any) -> bool:
    """Whether two rows of an output are equal, up to the rounding of numbers."""
    if first.shape != second.shape or first.dtype.kind != "f":
        return np.array_equal(first, second)
    tolerance = HALF_TOLERANCE if first.dtype == np.float16 else TOLERANCE
    finite = np.abs(second[np.isfinite(second)], dtype=np.float64)
    return np.allclose(first, second, rtol=0, atol=tolerance * finite.max(initial=0), equal_nan=True)


def _has_numbers(arrays: Sequence[Any]) -> bool:
    """Whether anything can be compared in an output of all rows."""
    return any(array.dtype.kind != "f" or not array.size or np.isfinite(array).any() for array in arrays)
