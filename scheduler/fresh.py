"""How many requests have not begun: by front end, and by model and priority, as full queues are judged."""

from collections import Counter

from gangway.scheduler.units import Request


class FreshCounts:
    """Requests that were added and not removed."""

    def __init__(self) -> None:
        self._like: Counter[tuple[int, int]] = Counter()
        self._of: Counter[int] = Counter()

    def like(self, request: Request) -> int:
        """Return how many there are of its model and priority."""
        return self._like[request.query.model_id, request.query.priority]

    def of_front_end(self, front_end: int) -> int:
        """Return how many there are of a front end."""
        return self._of[front_end]

    def add(self, request: Request, count: int = 1) -> None:
        """A request waits that has not begun."""
        self._like[request.query.model_id, request.query.priority] += count
        self._of[request.front_end] += count

    def remove(self, request: Request) -> None:
        """It begins, or is forgotten."""
        self.add(request, -1)
