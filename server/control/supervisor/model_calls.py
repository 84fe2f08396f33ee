"""What instances of Python models ask for concerning other models: load, unload, and whether one is ready."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gangway.server.control.supervisor.events import InstanceCall
from gangway.server.messages import OK, RepositoryAnswer, RepositoryCall

MOST_SECONDS: Final = 1800.0  # every wait ends; the load goes on


@dataclass(eq=False)
class ModelCalls:
    """Answers instances. `perform` does what a client may ask of the repository.

    `is_ready` tells whether a version of a model is, or any (-1). `settle` returns when all front ends know what they
    have been told. `needs` returns the models of which an ensemble of the repository is made. `most_bytes`: of a
    message for a load.
    """

    perform: Callable[[RepositoryCall], "asyncio.Task[RepositoryAnswer]"]
    is_ready: Callable[[str, int], bool]
    settle: Callable[[], Awaitable[None]]
    needs: Callable[[str], Awaitable[Sequence[str]]]
    most_bytes: int
    _tasks: set[asyncio.Task[None]] = field(default_factory=set, init=False)
    # By models that are being loaded: those that they have loaded.
    _awaited: dict[str, list[str]] = field(default_factory=dict, init=False)

    def take(self, asked: InstanceCall) -> None:
        """Answer a call, beside others."""
        task = asyncio.get_running_loop().create_task(self._answer(asked))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, asked: InstanceCall) -> None:
        try:
            answer = await self._answer_to(asked)
        except Exception as error:  # what it asks for may be anything
            answer = {"error": f"{type(error).__name__}: {error}"}
        asked.answer.set_result(answer)

    async def _answer_to(self, asked: InstanceCall) -> dict[str, Any]:
        """Return the answer. A model that is being loaded cannot wait for itself: that is an error."""
        asker, is_loading, call = asked.asker, asked.is_loading, asked.call
        what, name = str(call["control"]), str(call["name"])
        if what == "check model readiness":
            await self.settle()
            return {"ready": self.is_ready(name, int(call["version"]))}
        path = _path_of(asked.pid, int(call.get("message", -1)))
        if path and os.stat(path).st_size > self.most_bytes:
            return {"error": f"config and files have more than {self.most_bytes} bytes"}
        kind = RepositoryCall(0, "load" if what == "load model" else "unload", name, path, bool(call.get("dependents")))
        awaited = self._awaited.setdefault(asker, [])
        if is_loading:
            awaited.append(name)
        try:
            if is_loading and await self._waits(name, asker):
                return {"error": f"model '{asker}' is being loaded, and '{name}' would wait for it"}
            async with asyncio.timeout(MOST_SECONDS):
                answer = await asyncio.shield(self.perform(kind))
                await self.settle()
        except TimeoutError:
            return {"error": f"no answer from the model repository within {MOST_SECONDS:.0f} seconds"}
        finally:
            if is_loading:
                awaited.remove(name)
            if not awaited:
                self._awaited.pop(asker, None)
        return {} if answer.code == OK else {"error": answer.message}

    async def _waits(self, name: str, asker: str) -> bool:
        """Whether the load of a model waits for that of another one, as one that it has asked for or is made of."""
        seen, ahead = set(), [name]
        while ahead:
            each = ahead.pop()
            if each == asker:
                return True
            if each not in seen:
                seen.add(each)
                ahead += [*self._awaited.get(each, ()), *await self.needs(each)]
        return False


def _path_of(pid: int, descriptor: int) -> str:
    return f"/proc/{pid}/fd/{descriptor}" if descriptor >= 0 else ""
