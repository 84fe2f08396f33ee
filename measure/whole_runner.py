"""A model that onnxruntime executes, against the clock: requests of zeros, as frames."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from gangway.artifact.format import ITEM_BYTES, MOST_PLAUSIBLE_ELEMENTS, Manifest, TensorSpec
from gangway.executor.frames import example_bytes, plan_frame, write_header
from gangway.executor.slots import SlotRequest, SlotStatus
from gangway.measure.model_runner import ANSWER_BYTES, MODEL_ID, ModelRunner, RunError, aligned

USUAL_SIZE: Final = 224  # of symbolic dimensions: pixels, or tokens
_HEADER_BYTES: Final = 4096  # of a frame, for each tensor

Sizes = Mapping[str, int]


class WholeRunner(ModelRunner):
    """A runner of such a model. Symbolic dimensions have the usual size, or one that the manifest says is possible.

    Entering raises RunError if none is.
    """

    computed = (SlotStatus.OK,)

    def __init__(
        self, cache_dir: Path, manifest: Manifest, cores: Sequence[int], max_rows: int, gangs: int = 1
    ) -> None:
        batched = manifest.batched and not manifest.mixes_rows
        self._possible = list(_possible_sizes(manifest))
        self._sizes: Sizes = self._possible[0] if self._possible else {}
        largest = [_row_bytes(tensor, self._possible, manifest.batched) for tensor in manifest.inputs]
        inputs = [replace(each, row_bytes=size) for each, size in zip(manifest.inputs, largest, strict=True)]
        outputs = [
            replace(each, row_bytes=_HEADER_BYTES + (each.row_bytes or ANSWER_BYTES)) for each in manifest.outputs
        ]
        sized = replace(manifest, inputs=tuple(inputs), outputs=tuple(outputs), batched=batched)
        self._rows_in_shape = manifest.batched
        super().__init__(cache_dir, sized, cores, max_rows, gangs)

    def __enter__(self) -> "WholeRunner":
        super().__enter__()
        try:
            self._choose_sizes()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _choose_sizes(self) -> None:
        failure = RunError(f"no sizes of {self.manifest.model_name} are known to be possible")
        for sizes in self._possible:
            self._sizes = sizes
            try:
                self.run(1, 1)
            except RunError as error:
                failure = error
                self.left([0])
            else:
                return
        raise failure

    def _reserve(self, rows: int) -> None:
        if rows > self.room_rows:
            raise ValueError(f"room for {self.room_rows} rows, not for {rows}")
        self.arena.allocate(0, _HEADER_BYTES)
        self.io.allocate(self._offsets[0], self.io.size_bytes - self._offsets[0])

    def _request(self, gang: int, rows: int) -> SlotRequest:
        tensors = []
        for tensor in self.manifest.inputs:
            shape = _shape(tensor, self._sizes, rows if self._rows_in_shape else None)
            tensors.append(
                (shape, example_bytes(tensor.datatype, shape, ITEM_BYTES.get(tensor.datatype, 0), tensor.example_texts))
            )
        frame = plan_frame([(shape, len(content)) for shape, content in tensors])
        begin = self._offsets[0] + gang * rows * sum(aligned(tensor.row_bytes) for tensor in self.manifest.inputs)
        answer_bytes = rows * sum(aligned(tensor.row_bytes) for tensor in self.manifest.outputs)
        answer = self._offsets[len(self.manifest.inputs)] + gang * answer_bytes
        view = self.io.view[begin : begin + frame.size_bytes]
        write_header(view, frame)
        for part, (_, content) in zip(frame.parts, tensors, strict=True):
            view[part.offset : part.offset + part.size_bytes] = content
        return SlotRequest(MODEL_ID, rows, (begin,), (answer,), frame_bytes=(frame.size_bytes, answer_bytes))


def _possible_sizes(manifest: Manifest) -> Iterator[Sizes]:
    symbols = {symbol for tensor in manifest.inputs for symbol in tensor.symbols if symbol}
    usual = dict.fromkeys(symbols, USUAL_SIZE)
    if (
        symbols
        and max(_elements(tensor, usual, manifest.batched) for tensor in manifest.inputs) <= MOST_PLAUSIBLE_ELEMENTS
    ):
        yield usual
    if symbols <= manifest.trial_sizes.keys():
        yield manifest.trial_sizes


def _shape(tensor: TensorSpec, sizes: Sizes, rows: int | None) -> tuple[int, ...]:
    """Return a request's shape; `rows`: along the first axis of every tensor, if that is the batch."""
    symbols = tensor.symbols or ("",) * len(tensor.shape)
    shape = [sizes.get(symbol, 1) if size == -1 else size for size, symbol in zip(tensor.shape, symbols, strict=True)]
    if rows is not None:
        shape[0] = rows
    return tuple(shape)


def _elements(tensor: TensorSpec, sizes: Sizes, batched: bool) -> int:
    return math.prod(_shape(tensor, sizes, 1 if batched else None))


def _row_bytes(tensor: TensorSpec, possible: Sequence[Sizes], batched: bool) -> int:
    """Return what a row of a request takes at most, its share of a header included."""
    item_bytes = ITEM_BYTES.get(
        tensor.datatype, max([8, *(4 + len(text.encode()) for text, *_ in tensor.example_texts)])
    )
    return _HEADER_BYTES + item_bytes * max((_elements(tensor, sizes, batched) for sizes in possible), default=0)
