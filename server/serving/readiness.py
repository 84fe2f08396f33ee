"""What Python models with `is_ready` say of their readiness: instances are asked whenever a client asks."""

import asyncio
from collections.abc import Callable
from typing import Final

from gangway.server import messages
from gangway.server.errors import RequestError
from gangway.server.models.served import ServedModel
from gangway.server.serving.pending import Pending
from gangway.server.serving.supervisor_calls import SupervisorCalls

MOST_MODELS: Final = 1024  # are asked at the same time
SECONDS: Final = 10.0  # every wait ends; the supervisor waits 5 s for the instances


class Readiness:
    """Asks the supervisor. `say` says whether it could be told; None: there is no supervisor."""

    def __init__(self, loop: asyncio.AbstractEventLoop, say: Callable[[messages.FrontEndMessage], bool] | None) -> None:
        self._say = say
        self._waiting: dict[int, list[Pending[bool]]] = {}  # by models of which somebody asks
        self.calls = SupervisorCalls(loop, MOST_MODELS, "too many models are asked whether they are ready")

    async def of(self, model: ServedModel) -> bool:
        """Return whether a model says that it is ready. Who asks meanwhile gets the same answer."""
        say, number = self._say, model.model_id
        if say is None or not model.has_is_ready:
            return True
        if number in self._waiting:
            answer = Pending[bool]()
            self._waiting[number].append(answer)
            return await answer
        self._waiting[number], is_ready = [], False
        why = "instances of the model cannot be asked"
        try:
            await self.calls.ask(lambda call: say(messages.ReadinessAsked(call, number)), SECONDS, why, why)
            is_ready = True
        except RequestError:
            pass
        finally:
            for answer in self._waiting.pop(number):
                answer.settle(is_ready)
        return is_ready
