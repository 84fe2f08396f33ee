"""The instance's link to the supervisor: what it orders, and what a model asks of it.

Messages have a header only. The supervisor's orders are what to load, `is_ready`, and `finalize`. The instance says
`config`, `ready` or `error` (`__main__.py`), what the model's `is_ready` returns, what of its responses is unlike the
configuration (`differences`, a sentence by kind of difference), and that a front end is to come, as the model makes
requests while it has none (`attends`). Beside that it calls: `call` is a number, and the answer has it as `answer`,
with `error` if what was asked for cannot be. A `release` has no answer.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Mapping
from typing import Any

from gangway.python_backend.messages import Connection

THREAD_NAME = "gangway"  # of threads that are none of the model's


class TritonModelException(Exception):  # noqa: N818 - Triton's name
    """Raised by a model, and by what it calls in `pb_utils`."""


class SupervisorLink:
    """Safe for threads. `values_fd`: the memory of the values of metrics (`custom_metrics.py`)."""

    def __init__(self, control: Connection, values_fd: int) -> None:
        self._control = control
        self.values_fd = values_fd
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[Mapping[str, Any]]] = {}
        self._orders: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._is_over = False
        threading.Thread(target=self._receive, name=THREAD_NAME, daemon=True).start()

    def order(self) -> Mapping[str, Any]:
        """Return the next order; an empty one says that the supervisor has gone. Blocks."""
        return self._orders.get()

    def say(self, header: dict[str, Any]) -> None:
        """Tell something that has no answer. Raises OSError."""
        self._control.send(header)

    def call(self, **what: Any) -> Mapping[str, Any]:
        """Ask for something, and return the answer. Blocks. Raises TritonModelException with the reason for a no."""
        number = next(self._numbers)
        answers: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._answers[number] = answers
        try:
            self._control.send({"call": number, **what})
            if self._is_over:
                raise OSError("the server has ended")
            answer = answers.get()
        except OSError as error:
            raise TritonModelException(str(error)) from None
        finally:
            del self._answers[number]
        if "error" in answer:
            raise TritonModelException(answer["error"])
        return answer

    def _receive(self) -> None:
        try:
            while True:
                header = self._control.receive().header
                if "answer" not in header:
                    self._orders.put(header)
                elif header["answer"] in self._answers:
                    self._answers[header["answer"]].put(header)
        except (EOFError, OSError, ValueError):
            self._is_over = True
            for answers in list(self._answers.values()):
                answers.put({"error": "the server has ended"})
            self._orders.put({})


link: SupervisorLink | None = None  # set by the process of the instance


def linked() -> SupervisorLink:
    """Return the process's link. Raises TritonModelException where there is none."""
    if link is None:
        raise TritonModelException("this needs a server: it is not there outside of an instance")
    return link
