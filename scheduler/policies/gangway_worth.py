"""How much a deadline of a model is worth: more, the more of its deadlines were missed lately.

Whoever gives up the longest query first gives up always those of the same models. A user of such a model sees only
that. So a model that misses its goal becomes dearer, until others take their turn.
"""

from gangway.scheduler.policy import Query
from gangway.scheduler.prediction import Work

GOAL = 0.98  # share of each model's queries in time; somewhat more than what is asked for
MEMORY = 0.02  # weight of the latest query in the share
RISE = 100.0  # worth of a deadline per missing share
MOST = 10.0


class Worth:
    """The share of deadlines that each model met lately."""

    def __init__(self) -> None:
        self._met: dict[int, float] = {}
        self._dear: dict[int, float] = {}  # what deadlines are worth of those models that miss the goal

    def note(self, query: Query, now_us: float) -> None:
        """A query was answered."""
        if query.deadline_us is not None:
            met = self._met.get(query.model_id, 1.0)
            self._met[query.model_id] = met = met + MEMORY * ((now_us <= query.deadline_us) - met)
            if met < GOAL:
                self._dear[query.model_id] = min(MOST, 1.0 + RISE * (GOAL - met))
            else:
                self._dear.pop(query.model_id, None)

    def appraise(self, works: list[Work]) -> None:
        """Set what each one's deadline is worth; 1 if its model reaches its goal."""
        if self._dear:
            for work in works:
                work.worth = self._dear.get(work.query.model_id, 1.0)
