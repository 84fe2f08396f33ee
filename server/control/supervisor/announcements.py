"""What clients know of the models: told to every front end, and told again to those that start later."""

import asyncio
import heapq
import itertools
import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from gangway.base.logs import ALWAYS
from gangway.server import messages
from gangway.server.control.supervisor.model_life import TRANSITIONS, VersionState, state_of
from gangway.server.statistics import MODELS, StatisticsTable

ANY_VERSION = -1
NO_ROW = -1  # front ends count in memory of their own
_log = logging.getLogger(__name__)


@dataclass
class _Retiring:
    """A model number that clients do not get any more, and the front ends whose requests may still use it."""

    front_ends: set[int]
    done: asyncio.Future[None]


class Announcements:
    """What front ends know. `send` tells all of them, `present` returns the numbers of those that run.

    Models that are served get rows of `statistics`, as far as there are any.
    """

    def __init__(
        self,
        statistics: StatisticsTable,
        send: Callable[[messages.FrontEndMessage], None],
        present: Callable[[], Collection[int]],
    ) -> None:
        self._rows = RowAllocator(statistics)
        self._send = send
        self._present = present
        self._models: dict[tuple[str, int], messages.ModelReady | messages.ModelUnavailable] = {}
        self._variants: dict[tuple[str, int, tuple[int, ...]], messages.VariantReady] = {}
        self._absent: dict[int, messages.ModelPresence] = {}  # by model number
        self._idle: set[int] = set()  # by model number
        self._retiring: dict[int, _Retiring] = {}  # the same
        self._load_done: messages.InitialLoadDone | None = None
        self._jobs = messages.JobsUnderWay(())
        self._start: messages.StartUnderWay | None = None

    @property
    def entries(self) -> Mapping[tuple[str, int], messages.ModelReady | messages.ModelUnavailable]:
        """What clients know, by name and version."""
        return self._models

    def is_ready(self, name: str, version: int) -> bool:
        """Whether clients know a version of a model as ready, or any (-1)."""
        found = [entry for key, entry in self._models.items() if key[0] == name and version in (key[1], ANY_VERSION)]
        return any(isinstance(entry, messages.ModelReady) and entry.model_id not in self._absent for entry in found)

    def counted(self) -> list[tuple[messages.ModelReady, int]]:
        """Return the models that are served and have counters, with a number that tells when these begin at zero."""
        ready = [entry for entry in self._models.values() if isinstance(entry, messages.ModelReady)]
        return [(model, self._rows.begin_number(model.model_id)) for model in ready if model.statistics_row != NO_ROW]

    def announce(
        self,
        message: messages.ModelReady | messages.ModelUnavailable | messages.ModelRemoved,
        continues: int | None = None,
    ) -> None:
        """Tell clients about a model. What was compiled of it for certain sizes is forgotten.

        `continues`: the number of the model whose counters go on, which is about to retire.
        """
        key = (message.name, message.version)
        whole = self._models.get((message.name, messages.WHOLE_MODEL))
        if whole is not None and messages.is_of_use(message):
            self._note(messages.ModelRemoved(message.name, messages.WHOLE_MODEL))
            del self._models[message.name, messages.WHOLE_MODEL]
        self._note(message)
        self._variants = {sizes: known for sizes, known in self._variants.items() if sizes[:2] != key}
        if isinstance(message, messages.ModelReady):
            if continues is not None:
                self._rows.share(continues, message.model_id)
            message = replace(message, statistics_row=self._rows.take(message.model_id))
        if isinstance(message, messages.ModelRemoved):
            self._models.pop(key, None)
        else:
            self._models[key] = message
        self._send(message)

    def announce_presence(self, message: messages.ModelPresence) -> None:
        """Tell whether an instance of a Python model can answer."""
        if message.reason:
            self._absent[message.model_id] = message
        else:
            self._absent.pop(message.model_id, None)
        self._send(message)

    def announce_idle(self, model_id: int, is_idle: bool) -> None:
        """Tell that workers have given a model's memory back, or have it again; a number that retires is not idle."""
        ready = [each for each in self._models.values() if isinstance(each, messages.ModelReady)]
        model = next((each for each in ready if each.model_id == model_id), None)
        if is_idle == (model_id in self._idle) or (is_idle and model is None):  # None: a variant, or it has retired
            return
        (self._idle.add if is_idle else self._idle.discard)(model_id)
        if model is not None:
            what = "idle, its memory is given back" if is_idle else "loaded for a request"
            _log.info("model %s, version %d: %s", model.name, model.version, what)
        self._send(messages.ModelIdleness(model_id, is_idle))

    def _note(self, message: messages.ModelReady | messages.ModelUnavailable | messages.ModelRemoved) -> None:
        """Log what becomes of a version. What the table does not know is a fault of the server, told and not hidden."""
        before, after = state_of(self._models.get((message.name, message.version))), state_of(message)
        which = "" if message.version == messages.WHOLE_MODEL else f", version {message.version}"
        reason = TRANSITIONS[before].get(after)
        if reason is not None:
            line = "model %s%s: %s -> %s: %s"
            _log.debug(line, message.name, which, before.value, after.value, reason, extra=ALWAYS)
        elif (before, after) != (VersionState.ABSENT, VersionState.ABSENT):
            _log.error(
                "model %s%s: %s after %s is a fault of the server", message.name, which, after.value, before.value
            )

    def announce_target(self, ready: messages.ModelReady) -> None:
        """Tell clients the latency target of a model that has been announced, and what follows from it."""
        key = (ready.name, ready.version)
        known = self._models.get(key)
        if isinstance(known, messages.ModelReady) and known.model_id == ready.model_id:
            news = messages.ModelTarget(ready.model_id, *key, ready.config, ready.qos_us, ready.isolated_us)
            self._models[key] = replace(known, config=news.config, qos_us=news.qos_us, isolated_us=news.isolated_us)
            self._send(news)

    def announce_variant(self, message: messages.VariantReady | messages.VariantGone) -> None:
        """Tell what of a model is compiled, or is not any more."""
        key = (message.name, message.version, message.sizes)
        if isinstance(message, messages.VariantReady):
            self._variants[key] = message
        else:
            self._variants.pop(key, None)
        self._send(message)

    def initial_load_done(self, strict_readiness: bool) -> None:
        """Let ServerReady answer true."""
        self._start, self._load_done = None, messages.InitialLoadDone(strict_readiness)
        self._send(self._load_done)

    def announce_jobs(self, message: messages.JobsUnderWay) -> None:
        """Tell which jobs are under way."""
        self._jobs = message
        self._send(message)

    def announce_start(self, message: messages.StartUnderWay) -> None:
        """Tell how far the start is."""
        self._start = message
        self._send(message)

    def known(self) -> list[messages.FrontEndMessage]:
        """Return all that a front end is told that starts now."""
        start = [each for each in (self._start, self._load_done) if each is not None]
        idle = [messages.ModelIdleness(model_id, True) for model_id in self._idle]
        return [*self._models.values(), *self._absent.values(), *idle, *self._variants.values(), self._jobs, *start]

    def begin_to_retire(self, model_id: int) -> None:
        """Count from now on which front ends say that no request uses a number which clients do not get any more.

        To be called in the turn of the event loop that sends the announcement: an answer may be read before any task
        that is made in this turn begins.
        """
        self._retiring[model_id] = _Retiring(set(self._present()), asyncio.get_running_loop().create_future())

    async def retired(self, model_id: int, timeout_seconds: float) -> bool:
        """Return when no request uses a number that retires; False if that takes too long."""
        retiring = self._retiring[model_id]
        try:
            if retiring.front_ends:  # else none of them knows the number, and successors never hear of it
                await asyncio.wait_for(retiring.done, timeout_seconds)
        except TimeoutError:
            return False
        finally:
            self._retiring.pop(model_id, None)
            self._rows.give_back(model_id)
            self.announce_idle(model_id, False)
        return True

    def front_end_retired(self, front_end: int, model_id: int) -> None:
        """No request of a front end uses a model's number any more."""
        retiring = self._retiring.get(model_id)
        if retiring is not None:
            retiring.front_ends.discard(front_end)
            if not retiring.front_ends and not retiring.done.done():
                retiring.done.set_result(None)

    def front_end_ended(self, front_end: int) -> None:
        """A front end has ended, and its requests with it."""
        for model_id in list(self._retiring):
            self.front_end_retired(front_end, model_id)


class RowAllocator:
    """Gives rows to model numbers, of which there may be any; ensembles have some, too."""

    def __init__(self, table: StatisticsTable) -> None:
        self._table = table
        self._free = list(range(MODELS))
        self._taken: dict[int, int] = {}  # by model number
        self._begin_numbers: dict[int, int] = {}  # by row
        self._numbers = itertools.count()

    def begin_number(self, model_id: int) -> int:
        """Return a number that is another one each time the counters of a model's row begin at zero."""
        return self._begin_numbers[self._taken[model_id]]

    def take(self, model_id: int) -> int:
        """Return the row of a model that is announced, all zeros if it is new; NO_ROW if there is no room."""
        if model_id in self._taken:
            return self._taken[model_id]
        row = self._free[0] if self._free else NO_ROW
        try:
            if row == NO_ROW:
                raise OSError(f"{MODELS} models have counters already")
            self._table.begin(row)
        except OSError as error:
            _log.warning("each front end counts a model for itself, and loses its counts when it ends: %s", error)
            return NO_ROW
        heapq.heappop(self._free)
        self._taken[model_id] = row
        self._begin_numbers[row] = next(self._numbers)
        return row

    def share(self, before: int, model_id: int) -> None:
        """Let a model have the row of the one before it, if that has one."""
        if before in self._taken:
            self._taken[model_id] = self._taken[before]

    def give_back(self, model_id: int) -> None:
        """No request counts for a model any more."""
        row = self._taken.pop(model_id, NO_ROW)
        if row != NO_ROW and row not in self._taken.values():
            self._table.end(row)
            heapq.heappush(self._free, row)
