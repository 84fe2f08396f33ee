"""Where the tensors of a request lie in the io segment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from hashlib import blake2b

from gangway.artifact.format import ALIGNMENT_BYTES, TensorSpec
from gangway.executor.frames import Frame, is_absent
from gangway.executor.slots import NEVER_JOINED
from gangway.server.in_place.elsewhere import NOWHERE, Elsewhere


@dataclass(frozen=True)
class TensorLayout:
    """What the data plane must know of a model: its number, and the bytes per row of each input and output."""

    model_id: int
    input_bytes: tuple[int, ...]
    output_bytes: tuple[int, ...]

    @classmethod
    def of(cls, model_id: int, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> "TensorLayout":
        """Return the layout of a model with this signature."""
        return cls(model_id, tuple(spec.row_bytes for spec in inputs), tuple(spec.row_bytes for spec in outputs))

    @property
    def frame_bytes(self) -> tuple[int, int]:
        """No frames."""
        return 0, 0

    @property
    def join_key(self) -> int:
        """Rows of all requests are alike, so any of them may be joined."""
        return 0

    @cached_property
    def _placements(self) -> dict[int, "Placement"]:
        return {}

    @cached_property
    def _partial_placements(self) -> dict[tuple[int, tuple[int, ...], tuple[int, ...]], "Placement"]:
        return {}

    def place(self, rows: int, elsewhere: Elsewhere = NOWHERE) -> "Placement":
        """Return where the tensors of a request of so many rows lie within one block, but for those elsewhere."""
        if elsewhere is not NOWHERE:
            return self._place_without(rows, elsewhere)
        placement = self._placements.get(rows)
        if placement is None:
            placement = self._placements[rows] = Placement.of(self.input_bytes, self.output_bytes, rows)
        return placement

    def _place_without(self, rows: int, elsewhere: Elsewhere) -> "Placement":
        key = (rows, tuple(elsewhere.inputs), tuple(elsewhere.outputs))
        placement = self._partial_placements.get(key)
        if placement is None:
            inputs = [0 if i in elsewhere.inputs else size for i, size in enumerate(self.input_bytes)]
            outputs = [0 if i in elsewhere.outputs else size for i, size in enumerate(self.output_bytes)]
            placement = self._partial_placements[key] = Placement.of(inputs, outputs, rows)
        return placement


@dataclass(frozen=True)
class FrameLayout:
    """One request to a model for onnxruntime: what is in the block of its inputs, and bytes for that of its answer.

    `joins`: it may be joined with others.
    """

    model_id: int
    inputs: Frame
    output_bytes: int
    joins: bool = True

    @property
    def frame_bytes(self) -> tuple[int, int]:
        """The sizes of both blocks."""
        return self.inputs.size_bytes, self.output_bytes

    @property
    def join_key(self) -> int:
        """A number that only requests have with inputs of the same shapes, but for rows: these may be joined."""
        if not self.joins:
            return NEVER_JOINED
        return _key_of(tuple([None if is_absent(part) else part.shape[1:] for part in self.inputs.parts]))

    def place(self, rows: int, elsewhere: Elsewhere = NOWHERE) -> "Placement":
        """Return where the two blocks lie within one."""
        return Placement.of((self.inputs.size_bytes,), (self.output_bytes,), 1)


@dataclass(eq=False)
class HeldBlock:
    """Memory that outlives a request. It is given back when its owner has dropped it and no request uses it."""

    offset: int
    size_bytes: int
    uses: int = 0
    dropped: bool = False


@dataclass(frozen=True)
class HeldLayout:
    """A compiled model's layout, but for tensors that lie in held blocks: offset in the segment and size, by index.

    `base` has no bytes for these.
    """

    base: TensorLayout
    inputs: Mapping[int, tuple[int, int]]
    outputs: Mapping[int, tuple[int, int]]
    blocks: tuple[HeldBlock, ...]

    @property
    def model_id(self) -> int:
        """The model's number."""
        return self.base.model_id

    @property
    def frame_bytes(self) -> tuple[int, int]:
        """No frames."""
        return 0, 0

    @property
    def join_key(self) -> int:
        """Rows of all requests are alike, so any of them may be joined."""
        return 0

    def place(self, rows: int, elsewhere: Elsewhere = NOWHERE) -> "Placement":
        """Return where all other tensors lie within one block."""
        return self.base.place(rows, elsewhere)

    def placed(self, others: "Placement", block: int) -> "Placement":
        """Return where all tensors lie, seen from the block where the others are."""
        inputs, outputs = list(others.inputs), list(others.outputs)
        for places, held in ((inputs, self.inputs), (outputs, self.outputs)):
            for index, (offset, size) in held.items():
                places[index] = (offset - block, size)
        return replace(others, inputs=tuple(inputs), outputs=tuple(outputs))


Layout = TensorLayout | FrameLayout | HeldLayout


@lru_cache(maxsize=1024)
def _key_of(shapes: tuple[tuple[int, ...] | None, ...]) -> int:
    """Return the same number in every process; the highest bit, which means never, is not set."""
    digest = blake2b(repr(shapes).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") & ~NEVER_JOINED


@dataclass(frozen=True)
class Placement:
    """One block holds all tensors of a request: (offset, size) of each, and the block's size."""

    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]
    size_bytes: int

    @classmethod
    def of(cls, inputs: Sequence[int], outputs: Sequence[int], rows: int) -> "Placement":
        """Return the placement of tensors with these bytes per row."""
        places, position = [], 0
        for row_bytes in (*inputs, *outputs):
            places.append((position, rows * row_bytes))
            position += -(-rows * row_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return cls(tuple(places[: len(inputs)]), tuple(places[len(inputs) :]), position)
