"""Coroutines that go on where they are told, and what they wait for."""

import threading

import pytest

from gangway.server.serving.loop import ServingLoop
from gangway.server.serving.pending import Offload, Pending, drive, result_of


def test_a_coroutine_begins_at_once_and_goes_on_when_it_is_told() -> None:
    first, second, seen = Pending[int](), Pending[str](), []

    async def work() -> None:
        seen.append("begun")
        seen.append(f"{await first} {await second}")

    second.settle("there already")
    drive(work())
    assert seen == ["begun"]
    first.settle(5)
    first.settle(6)  # which changes nothing
    assert seen == ["begun", "5 there already"]


def test_an_error_comes_where_a_value_is_awaited() -> None:
    pending, seen = Pending[int](), []

    async def work() -> None:
        try:
            await pending
        except ValueError as error:
            seen.append(str(error))

    drive(work())
    pending.settle(None, ValueError("none"))
    assert seen == ["none"]


def test_work_aside_is_awaited(serving: ServingLoop) -> None:
    offload = Offload(serving.aside, serving.call)

    async def work(divisor: int) -> tuple[float, bool]:
        here = threading.get_ident()
        there = await offload.run(threading.get_ident)
        return await offload.run(lambda: 6 / divisor), here == threading.get_ident() != there

    assert result_of(serving, work(2)) == (3.0, True)
    with pytest.raises(ZeroDivisionError):
        result_of(serving, work(0))
