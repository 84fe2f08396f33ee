"""Events within the supervisor: each is handled once, in order, in a turn of its own."""

import asyncio

import pytest

from gangway.scheduler.messages import ModelUnloaded, WorkerStuck
from gangway.server.control.supervisor.events import Event, EventQueue


def test_events_are_handled_in_their_order_and_one_that_fails_hinders_no_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def handled() -> list[Event]:
        seen: list[Event] = []

        def handle(event: Event) -> None:
            seen.append(event)
            if event == WorkerStuck(0, 1):
                events.put(ModelUnloaded(9))  # after those that wait already
                raise ValueError("no such worker")

        events = EventQueue(handle)
        for event in (ModelUnloaded(7), WorkerStuck(0, 1), ModelUnloaded(8)):
            events.put(event)
        assert not seen, "who says something goes on first"
        await asyncio.sleep(0)
        assert len(seen) == 3
        await asyncio.sleep(0)
        return seen

    assert asyncio.run(handled()) == [ModelUnloaded(7), WorkerStuck(0, 1), ModelUnloaded(8), ModelUnloaded(9)]
    assert "WorkerStuck" in caplog.text and "no such worker" in caplog.text
