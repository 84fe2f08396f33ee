"""Which connections give way to a new one."""

from dataclasses import dataclass, field

import pytest

from gangway.server.serving.limits import GRACE_SECONDS, IDLE_GRACE_SECONDS, ConnectionLimit, Phase

MANY = 100


@dataclass(eq=False)
class Connection:
    """One that is in a phase since the beginning, and tells whom it has given way."""

    name: str
    left: list[str] = field(default_factory=list)
    phase: Phase = Phase.SILENT
    since_s: float = 0.0

    def give_way(self) -> None:
        self.left.append(self.name)


def admitted(limit: ConnectionLimit, left: list[str], name: str, phase: Phase, now_s: float = 0.0) -> None:
    connection = Connection(name, left, since_s=now_s)
    limit.admit(connection, now_s)
    limit.enter(connection, phase)


def test_the_client_that_was_waited_for_longest_gives_way() -> None:
    left: list[str] = []
    limit = ConnectionLimit(3)
    for name, phase in (("busy", Phase.ANSWERING), ("idle", Phase.IDLE), ("silent", Phase.SILENT)):
        admitted(limit, left, name, phase)
    admitted(limit, left, "next", Phase.SILENT, now_s=2 * IDLE_GRACE_SECONDS)
    assert left == ["silent"]
    admitted(limit, left, "another", Phase.ANSWERING, now_s=2 * IDLE_GRACE_SECONDS)
    admitted(limit, left, "last", Phase.ANSWERING, now_s=2 * IDLE_GRACE_SECONDS)
    assert left == ["silent", "next", "idle"]


def test_where_descriptors_lack_silent_clients_give_way_and_others_stay() -> None:
    """However many come, and though no descriptor is seen to be free before the next look."""
    left: list[str] = []
    is_short = [False]
    limit = ConnectionLimit(MANY, lambda: is_short[0])
    admitted(limit, left, "idle", Phase.IDLE)
    silent = [f"silent {number}" for number in range(3)]
    for name in silent:
        admitted(limit, left, name, Phase.SILENT)
    is_short[0] = True
    more = [f"more {number}" for number in range(MANY)]
    for name in more:
        admitted(limit, left, name, Phase.SILENT, now_s=2 * IDLE_GRACE_SECONDS)
    assert left == [*silent, *more[:-1]]


@pytest.mark.parametrize("phase", [Phase.IDLE, Phase.RECEIVING])
def test_where_descriptors_lack_and_nobody_is_silent_one_gives_way_at_a_time(phase: Phase) -> None:
    left: list[str] = []
    is_short = [False]
    limit = ConnectionLimit(MANY, lambda: is_short[0])
    for name in ("first", "second", "third"):
        admitted(limit, left, name, phase)
    is_short[0] = True
    admitted(limit, left, "next", Phase.ANSWERING, now_s=2 * GRACE_SECONDS)
    assert left == ["first"]
