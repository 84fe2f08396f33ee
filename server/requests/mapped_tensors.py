"""Which tensors of a request the workers use where the client has them, and which are copied.

Floating-point numbers of compiled models stay in place. Whole numbers are always copied: kernels use them as indices
and divisors, so they must not change after the check. So are outputs that share memory with another tensor of the
request, and tensors that do not begin at a multiple of their elements' size. Small tensors are copied because that is
cheaper than the checks.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec

from gangway.artifact.format import ITEM_BYTES
from gangway.base.peer import Peer, close_descriptor
from gangway.executor import _native
from gangway.executor.control import LostRegions
from gangway.executor.regions import OfferRegion, RegionMapped, RegionMessage, WithdrawRegion
from gangway.executor.slots import place_in_region
from gangway.server.models.tensors import Shapes, Tensor
from gangway.server.requests.codecs import Codec, Sinks
from gangway.server.requests.data_plane import NO_EXTERNAL, ExternalTensors
from gangway.server.requests.regions import Contents, MappedRegion, Region, RegionPart, RegionRange

_log = logging.getLogger(__name__)


class Mappings:
    """A front end's part in mapping regions: it offers them to the supervisor, uses those that are mapped, withdraws
    them.

    A region is offered when a request could first use it in place. Until the workers have mapped it, and if they do
    not, requests are served with copies. For the loop's thread, but for what is called when a region is not used any
    more.
    """

    def __init__(self, supervisor: Peer[RegionMessage], lost: LostRegions, loop: asyncio.AbstractEventLoop) -> None:
        self._supervisor = supervisor
        self._lost = lost
        self._loop = loop
        self._tokens = 0
        self._offered: dict[int, Region] = {}  # by token; not answered yet
        self._unsent: deque[tuple[RegionMessage, int]] = deque()
        loop.call_soon_threadsafe(loop.add_reader, supervisor.fileno(), self._hear)

    def offer(self, region: Region) -> None:
        """Have workers map a region, which the caller holds, unless that has been tried already."""
        if region.offered:
            return
        region.offered = True
        self._tokens += 1
        token = self._tokens
        self._offered[token] = region
        try:
            descriptor = os.dup(region.descriptor)  # the region may be closed before it is sent
        except OSError:
            self._answered(token, 0)
            return
        registration = region.registration
        self._say(OfferRegion(token, registration.offset, registration.size_bytes), descriptor)

    def forget(self, region: Region) -> None:
        """The region is about to be closed. It is unmapped when the last request that is under way has ended."""
        region.closed = True
        self.lose(region)

    def lose(self, region: Region) -> None:
        """Do not use the region in place any more."""
        mapped, region.mapped = region.mapped, None
        if mapped is not None:
            self._withdraw(mapped)

    def is_lost(self, mapped: MappedRegion) -> bool:
        """Whether a worker has found that memory of the region is missing."""
        return self._lost.is_lost(mapped.number)

    def _withdraw(self, mapped: MappedRegion) -> None:
        mapped.uses.close(lambda: self._say(WithdrawRegion(mapped.token)))

    def _say(self, message: RegionMessage, descriptor: int = -1) -> None:
        """Tell the supervisor, in order; then the descriptor is closed."""
        self._unsent.append((message, descriptor))
        self._loop.call_soon_threadsafe(self._speak)

    def _speak(self) -> None:
        while self._unsent:
            message, descriptor = self._unsent[0]
            try:
                self._supervisor.send(message, descriptor)
            except BlockingIOError:
                self._loop.add_writer(self._supervisor.fileno(), self._speak)
                return
            except (BrokenPipeError, ConnectionError):
                return  # the supervisor is gone, and this process is about to be
            except OSError as error:
                _log.error("a client's shared memory cannot be mapped, so its tensors are copied: %s", error)
                if isinstance(message, OfferRegion):
                    self._answered(message.token, 0)
            self._unsent.popleft()
            close_descriptor(descriptor)
        self._loop.remove_writer(self._supervisor.fileno())

    def _hear(self) -> None:
        try:
            while (message := self._supervisor.receive()) is not None:
                if isinstance(message, RegionMapped):
                    self._answered(message.token, message.number)
        except (EOFError, OSError):
            self._loop.remove_reader(self._supervisor.fileno())

    def _answered(self, token: int, number: int) -> None:
        region, mapped = self._offered.pop(token), MappedRegion(token, number)
        if number and region.closed:
            self._withdraw(mapped)
        elif number:
            region.mapped = mapped


_MISSING: Final = "shared memory region '%s' is shorter than registered; its tensors are copied from now on"
DATATYPES: Final = frozenset({"FP16", "FP32", "FP64"})
LEAST_BYTES: Final = 128 << 10  # of all such tensors of a request: copying as much takes as long as the checks
LEAST_TENSOR_BYTES: Final = 4 << 10


class Candidates(msgspec.Struct, frozen=True):
    """What of a request can be in place, if regions and their places allow it.

    `inputs`: (which of the request's contents, place in the model, alignment); `outputs`: (place in the model, where it
    shall be, alignment).
    """

    inputs: tuple[tuple[int, int, int], ...]
    outputs: tuple[tuple[int, RegionRange, int], ...]


def candidates_of(
    codec: Codec, shapes: Shapes, sources: Sequence[RegionRange | None], outputs: Mapping[str, Tensor]
) -> Candidates | None:
    """Return what of a request can be in place; None if nothing can, or it is not worth it."""
    memory, rows, total_bytes = codec.memory, shapes.rows, 0
    if memory is None or not codec.has_places:
        return None
    inputs = []
    for index, (source, (tensor, _)) in enumerate(zip(sources, shapes.inputs, strict=False)):
        size_bytes = rows * memory.input_bytes[tensor.index]
        if source is not None and source.size_bytes == size_bytes and _may_be(tensor, size_bytes):
            inputs.append((index, tensor.index, _alignment(tensor)))
            total_bytes += size_bytes
    found = []
    for tensor in outputs.values():
        size_bytes = rows * memory.output_bytes[tensor.index]
        sink = codec.sinks.get(tensor.index)
        if sink is not None and _may_be(tensor, size_bytes):
            exact = RegionRange(sink.region, sink.offset, size_bytes)
            if not _shares(tensor.index, exact, sources, codec.sinks):
                found.append((tensor.index, exact, _alignment(tensor)))
                total_bytes += size_bytes
    return Candidates(tuple(inputs), tuple(found)) if total_bytes >= LEAST_BYTES else None


def choose_mapped(
    candidates: Candidates, contents: Contents, regions: Mapping[str, Region], mappings: Mappings
) -> ExternalTensors:
    """Return what of one request is in place; the regions stay mapped until the request lets go of it."""
    chosen = MappedTensors(mappings)
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
        chosen.release()
        raise
    return chosen if chosen.count else NO_EXTERNAL


class MappedTensors(ExternalTensors):
    """Tensors in regions that all workers have mapped."""

    def __init__(self, mappings: Mappings) -> None:
        super().__init__()
        self._mappings = mappings
        self._held: dict[Region, MappedRegion] = {}
        self._filled: dict[Region, bool] = {}

    def word_of(self, part: RegionPart, alignment: int) -> int:
        """Return what a slot says of this place; 0 if the tensor must be copied."""
        region = part.region
        if (region.registration.offset + part.offset) % alignment:
            return 0
        if not self._is_filled(region) and any(region.holes(part.offset, part.size_bytes)):
            return 0
        mapped = self._held.get(region) or self._hold(region)
        return place_in_region(mapped.number, part.offset) if mapped else 0

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.inputs) + len(self.outputs)

    @property
    def delivered(self) -> Collection[int]:
        """All outputs that there are."""
        return self.outputs

    def has_lost_memory(self) -> bool:
        """Whether memory of a region was missing at any time, or is now. Only while the regions are held open."""
        lost = [region for region, mapped in self._held.items() if self._mappings.is_lost(mapped)]
        for region in lost:
            _log.warning(_MISSING, region.registration.name)
            self._mappings.lose(region)
        return bool(lost) or not all(region.is_whole for region in self._held)

    def release(self) -> None:
        """Let the regions be unmapped, as far as this request is concerned."""
        for mapped in self._held.values():
            mapped.uses.end()

    def _is_filled(self, region: Region) -> bool:
        """Whether a region has no holes, by one look for all tensors of the request: a step of a decoder has dozens."""
        found = self._filled.get(region)
        if found is None:
            found = self._filled[region] = region.is_filled
        return found

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
