"""Which tensors of a request the workers use where the client has them, and which are copied.

In place are floating-point numbers of compiled models. Whole numbers are always copied: kernels use them as places and
divisors, and what has been looked at must not change before it is used. So are outputs that share memory with another
tensor of the request, tensors that do not begin at a multiple of their elements' size, and small ones, where copying
costs less than all this.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from gangway.artifact.item_bytes import ITEM_BYTES
from gangway.executor import _native
from gangway.executor.slots import place_in_region
from gangway.server.calls import Call, Contents, Sinks, TensorCall
from gangway.server.in_place.elsewhere import NOWHERE, Elsewhere
from gangway.server.in_place.mapped import MappedRegion
from gangway.server.in_place.mappings import Mappings
from gangway.server.models import Shapes
from gangway.server.region_ranges import RegionPart, RegionRange
from gangway.server.regions import Region
from gangway.server.tensor import Tensor

_MISSING: Final = "memory of shared memory region '%s' is missing; its tensors are copied from now on"
DATATYPES: Final = frozenset({"FP16", "FP32", "FP64"})
LEAST_BYTES: Final = 128 << 10  # of all such tensors of a request: copying as much takes as long as the checks
LEAST_TENSOR_BYTES: Final = 4 << 10
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidates:
    """What of a request can be in place, if regions and their places allow it.

    `inputs`: (which of the request's contents, place in the model, alignment); `outputs`: (place in the model, where it
    shall be, alignment).
    """

    inputs: tuple[tuple[int, int, int], ...]
    outputs: tuple[tuple[int, RegionRange, int], ...]


def candidates_of(
    call: Call, shapes: Shapes, sources: Sequence[RegionRange | None], outputs: Mapping[str, Tensor]
) -> Candidates | None:
    """Return what of a request can be in place; None if nothing can, or it is not worth it."""
    if not isinstance(call, TensorCall):
        return None
    memory, rows, total_bytes = call.memory, shapes.rows, 0
    inputs = []
    for index, (source, (tensor, _)) in enumerate(zip(sources, shapes.inputs, strict=False)):
        size_bytes = rows * memory.input_bytes[tensor.index]
        if source is not None and source.size_bytes == size_bytes and _may_be(tensor, size_bytes):
            inputs.append((index, tensor.index, _alignment(tensor)))
            total_bytes += size_bytes
    found = []
    for tensor in outputs.values():
        size_bytes = rows * memory.output_bytes[tensor.index]
        sink = call.sinks.get(tensor.index)
        if sink is not None and _may_be(tensor, size_bytes):
            exact = RegionRange(sink.region, sink.offset, size_bytes)
            if not _shares(tensor.index, exact, sources, call.sinks):
                found.append((tensor.index, exact, _alignment(tensor)))
                total_bytes += size_bytes
    return Candidates(tuple(inputs), tuple(found)) if total_bytes >= LEAST_BYTES else None


def choose(candidates: Candidates, contents: Contents, regions: Mapping[str, Region], mappings: Mappings) -> Elsewhere:
    """Return what of one request is in place; the regions stay mapped until the request lets go of it."""
    chosen = InPlace(mappings)
    try:
        for index, place, alignment in candidates.inputs:
            part = contents[index]
            if isinstance(part, RegionPart) and (word := chosen.word_of(part, alignment)):
                chosen.inputs[place] = word
        for place, sink, alignment in candidates.outputs:
            if not _is_shared_file(regions[sink.region], regions) and (
                word := chosen.word_of(sink.within(regions), alignment)
            ):
                chosen.outputs[place] = word
    except BaseException:
        chosen.let_go()
        raise
    return chosen if chosen.count else NOWHERE


class InPlace(Elsewhere):
    """Tensors in regions that all workers have mapped."""

    def __init__(self, mappings: Mappings) -> None:
        super().__init__()
        self._mappings = mappings
        self._held: dict[Region, MappedRegion] = {}

    def word_of(self, part: RegionPart, alignment: int) -> int:
        """Return what a slot says of this place; 0 if the tensor must be copied."""
        region = part.region
        if (region.registration.offset + part.offset) % alignment:
            return 0
        mapped = self._held.get(region) or self._hold(region)
        return place_in_region(mapped.number, part.offset) if mapped else 0

    def spoiled(self) -> bool:
        """Whether memory of a region was missing at any time, or is now. Only while the regions are held open."""
        lost = [region for region, mapped in self._held.items() if self._mappings.is_lost(mapped)]
        for region in lost:
            _log.warning(_MISSING, region.registration.name)
            self._mappings.lose(region)
        return bool(lost) or not all(region.is_whole for region in self._held)

    def let_go(self) -> None:
        """Let the regions be unmapped, as far as this request is concerned."""
        for mapped in self._held.values():
            mapped.uses.end()

    def _hold(self, region: Region) -> MappedRegion | None:
        mapped = region.mapped
        if mapped is None:
            self._mappings.offer(region)
            return None
        if not region.is_whole or not mapped.uses.begin():
            return None
        self._held[region] = mapped
        return mapped


def _may_be(tensor: Tensor, size_bytes: int) -> bool:
    return tensor.datatype in DATATYPES and size_bytes >= LEAST_TENSOR_BYTES


def _alignment(tensor: Tensor) -> int:
    return max(ITEM_BYTES[tensor.datatype], _native.REGION_ALIGNMENT)


def _shares(place: int, own: RegionRange, sources: Sequence[RegionRange | None], sinks: Sinks) -> bool:
    """Whether an output shares memory with another tensor, as far as names and places tell."""
    others = [source for source in sources if source is not None]
    others += [sink for index, sink in sinks.items() if index != place]
    return any(
        other.region == own.region
        and other.offset < own.offset + own.size_bytes
        and own.offset < other.offset + other.size_bytes
        for other in others
    )


def _is_shared_file(region: Region, regions: Mapping[str, Region]) -> bool:
    """Whether another region of the request is in the same file: then places say nothing."""
    return any(other is not region and other.identity == region.identity for other in regions.values())
