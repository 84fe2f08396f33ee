"""A thread pool that knows how many of its tasks have begun or wait, and not ended."""

import itertools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class CountingPool(ThreadPoolExecutor):
    """For any threads."""

    _submitted = 0
    _ended = 0

    def __init__(self, max_workers: int, thread_name_prefix: str) -> None:
        super().__init__(max_workers, thread_name_prefix=thread_name_prefix)
        self._submits, self._ends = itertools.count(1), itertools.count(1)  # count atomically, where += does not

    @property
    def busy(self) -> int:
        """How many tasks have not ended. Off by a few for moments."""
        return self._submitted - self._ended

    def submit(
        self, task: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> "Future[Result]":
        """Have a thread run the task."""
        self._submitted = next(self._submits)
        return super().submit(self._run, task, *args, **kwargs)

    def _run(self, task: Callable[Arguments, Result], /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        try:
            return task(*args, **kwargs)
        finally:
            self._ended = next(self._ends)
