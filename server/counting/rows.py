"""Which model has which row of the counters: the supervisor's to say."""

import heapq
import logging

from gangway.server.counting import layout
from gangway.server.counting.table import StatisticsTable

NO_ROW = -1  # front ends count in memory of their own
_log = logging.getLogger(__name__)


class RowKeeper:
    """Gives rows to model numbers, of which there may be any; ensembles have some, too."""

    def __init__(self, table: StatisticsTable) -> None:
        self._table = table
        self._free = list(range(layout.MODELS))
        self._taken: dict[int, int] = {}  # by model number

    def take(self, model_id: int) -> int:
        """Return the row of a model that is announced, all zeros if it is new; NO_ROW if there is no room."""
        if model_id in self._taken:
            return self._taken[model_id]
        row = self._free[0] if self._free else NO_ROW
        try:
            if row == NO_ROW:
                raise OSError(f"{layout.MODELS} models have counters already")
            self._table.begin(row)
        except OSError as error:
            _log.warning("statistics of a model begin anew with every front end: %s", error)
            return NO_ROW
        heapq.heappop(self._free)
        self._taken[model_id] = row
        return row

    def give_back(self, model_id: int) -> None:
        """No request counts for a model any more."""
        row = self._taken.pop(model_id, NO_ROW)
        if row != NO_ROW:
            self._table.end(row)
            heapq.heappush(self._free, row)
