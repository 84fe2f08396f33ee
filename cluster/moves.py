"""Carry out what was decided: load models, wait until calls go there, take calls away, unload. No call is lost.

A model is loaded where it shall be before it is unloaded where it was. Before it is unloaded the router sends the
server no new call of it, and those under way are answered.
"""

import csv
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from gangway.clients.connection import ServerConnection
from gangway.clients.errors import UnreachableError
from gangway.clients.tls import Tls
from gangway.cluster.haproxy import RouterError, command
from gangway.cluster.haproxy_config import RUNNING, STOPPED, backend_of, socket_of
from gangway.cluster.placement import Move
from gangway.cluster.server_address import ServerAddress

POLL_S = 0.05
SEEN_TIMEOUT_S = 30.0  # until the router has noticed that a model is or is not ready


@dataclass(frozen=True)
class Mover:
    """`route`: the folder of the router, None without one: then a call may still come when a model has gone.

    `load_timeout_s`: of loading, compiling included. `drain_timeout_s`: of calls under way, streams among them.
    """

    servers: Mapping[str, ServerAddress]
    tls: Tls | None
    route: Path | None
    load_timeout_s: float = 1800.0
    drain_timeout_s: float = 30.0
    report: Callable[[str], None] = print

    def check(self) -> None:
        """Raise RouterError if the router does not answer."""
        if self.route is not None:
            self._command("show info")

    def carry_out(self, moves: Sequence[Move]) -> None:
        """Do all moves in order. Raises ClientError at the first that fails; what is done stays."""
        for move in moves:
            begin_s = time.monotonic()
            (self._load if move.load else self._unload)(move.model, self.servers[move.server])
            done = "loaded on" if move.load else "unloaded from"
            self.report(f"{move.model} {done} {move.server} in {time.monotonic() - begin_s:.1f} s")

    def _load(self, model: str, server: ServerAddress) -> None:
        with ServerConnection(server.url, self.load_timeout_s, self.tls) as connection:
            connection.load_model(model)
        if self.route is not None:
            self._set_state(model, server, "ready")  # whoever drained it last may not have come to the end
            self._await_state(model, server, RUNNING)

    def _unload(self, model: str, server: ServerAddress) -> None:
        if self.route is not None:
            self._set_state(model, server, "drain")
            self._await_idle(model, server)
        with ServerConnection(server.url, self.load_timeout_s, self.tls) as connection:
            connection.unload_model(model)
        if self.route is not None:
            self._await_state(model, server, STOPPED)
            self._set_state(model, server, "ready")  # for whoever loads it again; until then the check says no

    def _set_state(self, model: str, server: ServerAddress, state: str) -> None:
        # The backend of HTTP follows that of gRPC.
        if answer := self._command(f"set server {backend_of('grpc', model)}/{server.name} state {state}"):
            raise RouterError(f"the router does not know {model} on {server.name}: {answer}")

    def _await_state(self, model: str, server: ServerAddress, state: int) -> None:
        def is_so() -> bool:
            lines = self._command(f"show servers state {backend_of('grpc', model)}").splitlines()[2:]
            states = {fields[3]: int(fields[5]) for fields in (line.split(" ") for line in lines)}
            return states.get(server.name) == state

        if not _becomes(is_so, SEEN_TIMEOUT_S):
            shown = "ready" if state == RUNNING else "unloaded"
            where = f"{server.name}, {server.bracketed}:{server.http_port}"
            raise UnreachableError(f"{model} was {shown} on {where}, but the router does not see it")

    def _await_idle(self, model: str, server: ServerAddress) -> None:
        backends = {backend_of(protocol, model) for protocol in ("grpc", "http")}

        def is_idle() -> bool:
            rows = csv.DictReader(self._command("show stat -1 4 -1").removeprefix("# ").splitlines())
            return all(row["scur"] == "0" for row in rows if row["svname"] == server.name and row["pxname"] in backends)

        if not _becomes(is_idle, self.drain_timeout_s):
            self.report(f"{model} on {server.name} still has calls after {self.drain_timeout_s:g} s: unloaded anyway")

    def _command(self, text: str) -> str:
        assert self.route is not None
        return command(socket_of(self.route), text)


def _becomes(condition: Callable[[], bool], timeout_s: float) -> bool:
    """Wait for a condition; return whether it came."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until_s:
            return False
        time.sleep(POLL_S)
    return True
