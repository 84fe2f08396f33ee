"""What is written down about gangs: counters for the log and for the front end, and the timeline."""

from gangway.executor.messages import Left
from gangway.executor.slots import SlotCounts, SlotStatus
from gangway.scheduler.counters import CounterBook
from gangway.scheduler.gangs import Gang
from gangway.scheduler.policy import Start
from gangway.scheduler.timeline import Stretch, TimelineWriter

_DEFAULT_VERSION = 1  # as a mask
_REFUSALS = (SlotStatus.LATE, SlotStatus.QUEUE_FULL)
_USUAL = SlotCounts(1, 0, 0, _DEFAULT_VERSION)


class Accounts:
    """Is told what happens to gangs. `timeline` None: nobody wants one."""

    def __init__(self, timeline: TimelineWriter | None = None) -> None:
        self.counters = CounterBook()
        self._timeline = timeline
        self._joined: dict[tuple[int, int], int] = {}  # (lease, rank) -> the layer at which it joined; for the timeline

    def begins(self, gang: Gang, start: Start) -> SlotCounts:
        """A block is about to begin; return what the query's slot is to say."""
        counters = self.counters.of(gang.model)
        conflict = start.wanted > len(start.cores)
        gang.blocks += 1
        gang.conflicts += conflict
        counters.blocks += 1
        counters.conflicts += conflict
        if start.versions:
            for version in start.versions:
                gang.version_mask |= 1 << version
            counters.versions += len(start.versions) - start.versions.count(0)
        else:
            gang.version_mask |= _DEFAULT_VERSION
        self._note_ranks(gang, range(len(start.cores)), gang.request.query.next_layer)
        if gang.blocks == 1 and not conflict and gang.version_mask == _DEFAULT_VERSION:
            return _USUAL
        return SlotCounts(gang.blocks, gang.conflicts, gang.preemptions, gang.version_mask)

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
        first = gang.request.query.next_layer
        self._timeline.add(
            Stretch(
                core=core,
                begin_us=message.joined_ns / 1e3,
                end_us=message.left_ns / 1e3,
                query_id=gang.request.query.query_id,
                model=gang.model,
                begin_layer=begin_layer,
                end_layer=end_layer,
                rank=message.rank,
                ranks=max(len(gang.cores), message.rank + 1),
                versions=gang.versions[begin_layer - first : end_layer - first],
            )
        )

    def ended(self, gang: Gang, next_layer: int) -> None:
        """All ranks have left; what they did is of use."""
        counters = self.counters.of(gang.model)
        counters.layers += next_layer - gang.request.query.next_layer
        if next_layer < gang.end_layer and not gang.request.dropped:
            gang.preemptions += 1
            counters.preemptions += 1

    def refused(self, model: str, status: SlotStatus) -> None:
        """The scheduler has answered a query; count it if its queue policy was the reason."""
        if status in _REFUSALS:
            self.counters.of(model).rejected += 1

    def _note_ranks(self, gang: Gang, ranks: range, layer: int) -> None:
        if self._timeline is not None:
            self._joined.update({(gang.lease, rank): layer for rank in ranks})
