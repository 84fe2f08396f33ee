"""Model numbers that retire: front ends answer at once, late, or end; each answer counts from the announcement on."""

import asyncio
from collections.abc import Callable

import pytest

from gangway.server.control.supervisor.announcements import Announcements
from gangway.server.messages import FrontEndMessage, ModelUnavailable
from gangway.server.statistics import StatisticsTable

MODEL_ID = 7
FRONT_ENDS = (1, 2)
LEAVING = ModelUnavailable("m", 1, "it is being unloaded", "UNLOADING")


def at_once(known: Announcements) -> None:
    known.front_end_retired(1, MODEL_ID)


def in_the_next_turn(known: Announcements) -> None:
    asyncio.get_running_loop().call_soon(known.front_end_retired, 1, MODEL_ID)


def twice(known: Announcements) -> None:
    known.front_end_retired(1, MODEL_ID)
    known.front_end_retired(1, MODEL_ID)


def by_its_end(known: Announcements) -> None:
    known.front_end_ended(1)


@pytest.mark.parametrize("first", [at_once, in_the_next_turn, twice, by_its_end])
@pytest.mark.parametrize("second_answers", [True, False])
def test_answers_count_from_the_announcement_on(first: Callable[[Announcements], None], second_answers: bool) -> None:
    async def retire() -> bool:
        sent: list[FrontEndMessage] = []
        known = Announcements(StatisticsTable.create(len(FRONT_ENDS)), sent.append, lambda: FRONT_ENDS)
        known.announce(LEAVING)
        known.begin_to_retire(MODEL_ID)
        retired = asyncio.get_running_loop().create_task(known.retired(MODEL_ID, 0.1))
        first(known)
        if second_answers:
            known.front_end_retired(2, MODEL_ID)
        assert sent == [LEAVING]
        return await retired

    assert asyncio.run(retire()) is second_answers
