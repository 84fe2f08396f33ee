"""What is written down about gangs: counters for the log and for the front end, and the timeline."""

from functools import reduce
from operator import or_

from gangway.executor.messages import Left
from gangway.executor.slots import SlotCounts, SlotStatus
from gangway.scheduler.counters import CounterBook
from gangway.scheduler.gangs import Gang
from gangway.scheduler.policy import Start
from gangway.scheduler.timeline import Stretch, TimelineWriter
from gangway.scheduler.units import NOTHING

_DEFAULT_VERSION = 1  # as a mask: bit v is version v of a layer
_REFUSALS = (SlotStatus.LATE, SlotStatus.QUEUE_FULL, SlotStatus.CROWDED)
_USUAL = SlotCounts(1, 0, 0, _DEFAULT_VERSION)


class Accounts:
    """Is told what happens to gangs. `timeline` None: nobody wants one."""

    def __init__(self, timeline: TimelineWriter | None = None) -> None:
        self.counters = CounterBook()
        self._timeline = timeline
        self._joined: dict[tuple[int, int], int] = {}  # (lease, rank) -> the layer at which it joined; for the timeline

    def begins(self, gang: Gang, start: Start) -> None:
        """A block is about to begin: count it for its model, and for each of its requests."""
        counters = self.counters.of(gang.model)
        conflict = start.wanted > len(start.cores)
        gang.blocks += 1
        counters.blocks += 1
        counters.conflicts += conflict
        versions = _DEFAULT_VERSION
        if start.versions:
            versions = reduce(or_, [1 << version for version in start.versions])
            counters.versions += len(start.versions) - start.versions.count(0)
        for piece in gang.unit.pieces:
            piece.request.counts = _add_block(piece.request.counts, conflict, versions)
        if self._timeline is not None:
            self._note_ranks(gang, range(len(start.cores)), gang.unit.query.next_layer)

    def walked_through(self, model: str, layers: int) -> None:
        """A query was begun without a decision, and answered."""
        counters = self.counters.of(model)
        counters.blocks += 1
        counters.layers += layers

    def grows(self, gang: Gang, ranks: int) -> None:
        """Ranks up to this number are about to join."""
        self.counters.of(gang.model).grown += 1
        if self._timeline is not None:
            self._note_ranks(gang, range(gang.wanted, ranks), gang.shared.position()[1])

    def shrinks(self, gang: Gang) -> None:
        """Ranks have been told to leave."""
        self.counters.of(gang.model).shrunk += 1

    def left(self, gang: Gang, core: int, message: Left) -> None:
        """A rank has left that was on this core."""
        if self._timeline is None:
            return
        begin_layer = self._joined.pop((gang.lease, message.rank), 0)
        end_layer = max(gang.shared.position()[1], begin_layer + 1)
        first = gang.unit.query.next_layer
        self._timeline.add(
            Stretch(
                core=core,
                begin_us=message.joined_ns / 1e3,
                end_us=message.left_ns / 1e3,
                query_id=gang.unit.query.query_id,
                model=gang.model,
                begin_layer=begin_layer,
                end_layer=end_layer,
                rank=message.rank,
                ranks=max(len(gang.cores), message.rank + 1),
                versions=gang.versions[begin_layer - first : end_layer - first],
                place=gang.unit.place,
            )
        )

    def ended(self, gang: Gang, next_layer: int) -> None:
        """All ranks have left; what they did is of use."""
        counters = self.counters.of(gang.model)
        counters.layers += next_layer - gang.unit.query.next_layer
        if next_layer < gang.end_layer and not gang.unit.dropped:
            counters.preemptions += 1
            for piece in gang.unit.pieces:
                counts = piece.request.counts
                piece.request.counts = counts._replace(preemptions=counts.preemptions + 1)

    def refused(self, model: str, status: SlotStatus) -> None:
        """The scheduler has answered a request; count it if its queue policy was the reason."""
        if status in _REFUSALS:
            self.counters.of(model).rejected += 1

    def _note_ranks(self, gang: Gang, ranks: range, layer: int) -> None:
        self._joined.update({(gang.lease, rank): layer for rank in ranks})


def _add_block(counts: SlotCounts, conflict: bool, versions: int) -> SlotCounts:
    if counts is NOTHING and not conflict and versions == _DEFAULT_VERSION:
        return _USUAL
    blocks, conflicts, preemptions, before = counts
    return SlotCounts(blocks + 1, conflicts + conflict, preemptions, before | versions)
