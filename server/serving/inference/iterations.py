"""How often the steps of an ensemble run, and in which order there are answers.

A decoupled step has any number of responses. Whatever follows it runs for each of them: that is an iteration. One may
have a decoupled step of its own, and so on. Answers keep the order of the responses that they follow from.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from gangway.server.errors import RequestError
from gangway.server.requests.ensemble_graphs import EnsembleGraph
from gangway.server.serving.inference.ensemble_tensors import EnsembleTensors

MOST_OPEN: Final = 16  # iterations of one decoupled step at a time; of one that follows another a quarter


class ReadyStep(NamedTuple):
    """A step that can begin: all its tensors are there. `place`: of the step in the graph."""

    iteration: "Iteration"
    place: int


class Iteration:
    """What follows from one response; the outermost one follows from the request.

    `waits`: for each of its steps, how many tensors it waits for. `unfinished`: how many of them go on, but for the
    decoupled one, which `is_streaming` until its last response. `inner`: what follows from its responses, in their
    order, until that is answered. `error`: why there is no answer; `last_error`: the same, but after the inner ones.
    """

    def __init__(
        self, graph: EnsembleGraph, tensors: EnsembleTensors, outer: "Iteration | None" = None, is_marked: bool = True
    ) -> None:
        """Make it. `is_marked`: the response that it follows from says that it is the last one."""
        self.tensors, self.outer = tensors, outer
        self._is_marked = is_marked
        self.inner: deque[Iteration] = deque()
        self.error: RequestError | None = None
        self.last_error: RequestError | None = None
        self.parameters: dict[int, Mapping[str, Any]] = {}  # of responses, by step
        self._graph = graph
        self._level: int = 0 if outer is None else outer._level + 1
        self._ended: set[int] = set()
        streams = graph.streams
        self.stream = streams[self._level] if self._level < len(streams) else None
        self.is_streaming = self.stream is not None
        own = graph.by_level[self._level]
        self.unfinished = len(own) - self.is_streaming
        self.waits = {index: graph.waits[index] if outer is None else self._waits_of(index) for index in own}

    @property
    def most_open(self) -> int:
        """How many inner iterations there may be at a time."""
        return max(1, MOST_OPEN >> 2 * self._level)

    @property
    def all_parameters(self) -> Mapping[str, Any]:
        """The parameters of the responses that an answer follows from; of several values the last step's counts."""
        by_step = {index: found for each in self._way for index, found in each.parameters.items()}
        return {key: value for index in sorted(by_step) for key, value in by_step[index].items()}

    @property
    def is_last(self) -> bool:
        """Whether no other answer is known to follow this one.

        A response of a decoupled step that is itself the answer is the last one if it says so, as without an ensemble.
        """
        if not (self.waits or self._is_marked):
            return False
        return not any(each.is_streaming or each.last_error or len(each.inner) > 1 for each in self._way)

    def follow(self, is_marked: bool) -> "Iteration":
        """Return what follows from a further response of the decoupled step. `is_marked`: that says it is the last."""
        inner = Iteration(self._graph, self.tensors.after_response(), self, is_marked)
        self.inner.append(inner)
        return inner

    def ready(self) -> Iterator[ReadyStep]:
        """Yield the steps that wait for nothing; for an iteration of which none has begun."""
        return (ReadyStep(self, index) for index, waits in self.waits.items() if not waits)

    def end(self, index: int) -> Iterator[ReadyStep]:
        """A step has ended, but for a decoupled one; yield the steps that have waited for this one alone."""
        self._ended.add(index)
        self.unfinished -= 1
        for tensor in set(self._graph.steps[index].outputs.values()):
            for reader in self._graph.readers.get(tensor, ()):
                for iteration in self._at(self._graph.levels[reader]):
                    iteration.waits[reader] -= 1
                    if not iteration.waits[reader]:
                        yield ReadyStep(iteration, reader)

    def fail(self, index: int, error: RequestError) -> None:
        """A step has failed. What precedes it is still answered."""
        if index != self.stream:
            self.error = self.error or error
        elif self.is_streaming:
            self.is_streaming, self.last_error = False, error

    def answered(self) -> None:
        """It has been answered, and lets go of its tensors; so does each outer one of which nothing is to come."""
        self.tensors.clear()
        if self.outer is not None:
            self.outer.inner.remove(self)

    def clear(self) -> None:
        """Let go of all tensors."""
        for each in self.inner:
            each.clear()
        self.tensors.clear()

    def next_answer(self) -> "Iteration | None":
        """Return what is to be answered next, of the outermost iteration; None: it is not there yet, or never will be.

        Raises RequestError for an error whose turn has come.
        """
        while True:
            if self.error is not None:
                raise self.error
            if self.inner:
                found = self.inner[0].next_answer()
                if found is not None or not self.inner[0].is_over:
                    return found
                self.inner[0].answered()
            elif self.stream is None:
                return self if all(not each.unfinished for each in self._way) else None
            elif not self.is_streaming and self.last_error is not None:
                raise self.last_error
            else:
                return None

    @property
    def is_over(self) -> bool:
        """Whether nothing more of it is to be answered, and nothing of it goes on."""
        return self.stream is not None and not (self.is_streaming or self.inner or self.unfinished)

    @property
    def _way(self) -> Iterable["Iteration"]:
        """This one and those around it."""
        each: Iteration | None = self
        while each is not None:
            yield each
            each = each.outer

    def _at(self, level: int) -> Iterator["Iteration"]:
        """Yield those of a level that are within this one."""
        if level == self._level:
            yield self
        else:
            for each in self.inner:
                yield from each._at(level)

    def _waits_of(self, index: int) -> int:
        writers = self._graph.writers
        tensors = set(self._graph.steps[index].inputs.values())
        return sum(tensor in writers and self._is_awaited(writers[tensor]) for tensor in tensors)

    def _is_awaited(self, writer: int) -> bool:
        """Whether what a step writes is not there yet."""
        level = self._graph.levels[writer]
        around = next(each for each in self._way if each._level == level)
        return writer not in around._ended and (around is self or writer != around.stream)
