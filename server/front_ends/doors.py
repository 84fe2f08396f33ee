"""Where clients come in: opened when all is known that they may ask for.

gRPC comes first. What HTTP and metrics import takes as long as the whole rest of a front end's start, so a thread opens
them while gRPC answers already: after a crash every tenth of a second counts.
"""

import os
import threading
import time
from collections.abc import Callable

from gangway.server.front_end_messages import BindFailed, FrontEndMessage, Listening

TELL_AGAIN_SECONDS = 0.01
Open = Callable[[], str]  # returns "host:port", the port as bound; empty: nobody can come in there


class CannotListenError(Exception):
    """An address cannot be had; the message says why."""


class Doors:
    """`grpc`, `http` and `metrics` open a door each; they raise CannotListenError or OSError. `tell`: see FrontEnd."""

    def __init__(self, grpc: Open, http: Open, metrics: Open, tell: Callable[[FrontEndMessage], bool]) -> None:
        self._grpc = grpc
        self._http = http
        self._metrics = metrics
        self._tell = tell
        self.grpc_address = ""  # as soon as there is one

    def open(self) -> bool:
        """Return when gRPC has been opened; the others follow. False if that cannot be, which the supervisor knows."""
        try:
            self.grpc_address = self._grpc()
        except (CannotListenError, OSError) as error:
            self._say(BindFailed(str(error)))
            return False
        threading.Thread(target=self._open_others, name="doors", daemon=True).start()
        return True

    def _open_others(self) -> None:
        try:
            metrics_address = self._metrics()
            http_address = self._http()
        except (CannotListenError, OSError) as error:
            self._say(BindFailed(str(error)))
            os._exit(1)
        self._say(Listening(self.grpc_address, metrics_address, http_address))

    def _say(self, message: FrontEndMessage) -> None:
        while not self._tell(message):
            time.sleep(TELL_AGAIN_SECONDS)
