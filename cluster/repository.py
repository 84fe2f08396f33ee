"""The repositories of several servers, asked at the same time: which models there are, and where they are ready."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from gangway.clients.connection import ServerConnection
from gangway.clients.errors import ClientError
from gangway.clients.tls import Tls
from gangway.cluster.server_address import ServerAddress

READY = "READY"
MOST_AT_ONCE = 32

Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Repositories:
    """`models`: all names, sorted. `ready`: models that are, by server; without the servers that did not answer.

    `errors`: why a server did not answer, by its name.
    """

    models: tuple[str, ...]
    ready: Mapping[str, frozenset[str]]
    errors: Mapping[str, str]


def read_repositories(servers: Sequence[ServerAddress], tls: Tls | None, timeout_s: float) -> Repositories:
    """Ask RepositoryIndex of all servers."""

    def ask(server: ServerAddress) -> dict[str, bool]:
        with ServerConnection(server.url, timeout_s, tls) as connection:
            ready: dict[str, bool] = {}
            for model in connection.repository_index().models:
                ready[model.name] = ready.get(model.name, False) or model.state == READY
            return ready

    answers = ask_all(servers, ask)
    known = {server.name: answer for server, answer in answers.items() if not isinstance(answer, ClientError)}
    return Repositories(
        models=tuple(sorted({name for index in known.values() for name in index})),
        ready={server: frozenset(name for name, ready in index.items() if ready) for server, index in known.items()},
        errors={server.name: str(answer) for server, answer in answers.items() if isinstance(answer, ClientError)},
    )


def ask_all(
    servers: Sequence[ServerAddress], ask: Callable[[ServerAddress], Answer]
) -> dict[ServerAddress, Answer | ClientError]:
    """Return the answer of each server, or the error that asking it raised."""
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - takes long, and `--help` needs none

    def attempt(server: ServerAddress) -> Answer | ClientError:
        try:
            return ask(server)
        except ClientError as error:
            return error

    with ThreadPoolExecutor(min(MOST_AT_ONCE, len(servers))) as pool:
        return dict(zip(servers, pool.map(attempt, servers), strict=True))
