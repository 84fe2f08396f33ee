"""What a scheduling policy is. Interpreted, unlike what it sees and answers: anybody may derive from it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from gangway.executor.fast_path import Completed
from gangway.scheduler.policy import Decision, LoneStart, Query, Snapshot
from gangway.scheduler.policy_config import DEFAULT, PolicyConfig
from gangway.scheduler.profiles import ModelProfile


class Policy(ABC):
    """Decides which waiting queries run next, how far, on which cores, and which running ones make room.

    Contract: `decide` is deterministic, though it may remember what it saw. It returns at most one decision for a query
    and at most one Wake; starts and growths use disjoint free cores. It may return nothing. It is called when a query
    arrives, a block ends, cores come free, or the Wake's time has come. What is left is offered again. Decisions
    about queries that have changed meanwhile (ended, cancelled) are ignored by the driver.
    """

    name: str
    config: PolicyConfig = DEFAULT  # what the driver goes by, too
    batches = False  # whether it is shown batches (queries joined and split) instead of single requests

    @abstractmethod
    def decide(self, snapshot: Snapshot) -> Sequence[Decision]:
        """Return what to do now."""

    def lone_start(self, model: ModelProfile, core_count: int, level: float) -> LoneStart | None:
        """Return how a lone query of a model begins, so that a driver need not ask; None: it has to.

        `core_count`, `level`: as in Snapshot.
        """
        return None

    def arrived(self, query: Query) -> None:  # noqa: B027 - most policies learn nothing from it
        """Note that a request has come. It is shown when there is something to decide, perhaps in a batch."""

    def finished(self, query: Query, now_us: float) -> None:  # noqa: B027 - most policies learn nothing from it
        """Note that a query was answered."""

    def answered(self, model_id: int, requests: Sequence[Completed], first_id: int) -> None:
        """Note requests of one row to a model that have come, and were answered one after the other, unseen.

        Their numbers are those from `first_id` on. It is as if `arrived` and `finished` were called for each of them.
        """
        for query_id, request in enumerate(requests, first_id):
            query = Query(query_id, model_id, 1, request.arrival_us, request.deadline_us, request.priority)
            self.arrived(query)
            self.finished(query, request.end_us)
