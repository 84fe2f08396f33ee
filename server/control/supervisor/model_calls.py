"""What instances of Python models ask for concerning other models: load, unload, and whether one is ready."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

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
    # By models that are being loaded: those that they have loaded.
    _awaited: dict[str, list[str]] = field(default_factory=dict, init=False)

    async def answer(self, asker: str, is_loading: bool, pid: int, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to an instance of model `asker`, in process `pid`, which `is_loading` itself or not.

        A model that is being loaded cannot wait for itself: that is an error. Raises KeyError, TypeError, ValueError
        for what is no call.
        """
        what, name = str(call["control"]), str(call["name"])
        if what == "check model readiness":
            await self.settle()
            return {"ready": self.is_ready(name, int(call["version"]))}
        path = _path_of(pid, int(call.get("message", -1)))
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
