"""What is expected of the rest of a start, and what is told of it."""

import asyncio

import pytest

from gangway.server.control.repository.start_progress import Compilation, StartProgress, expected_left_s
from gangway.server.messages import BackgroundJob, JobsUnderWay, StartUnderWay

NOW_S = 1000.0


def running(age_s: float, kernels_s: float, done: int, kernels: int) -> Compilation:
    return Compilation(NOW_S - age_s, NOW_S - kernels_s, done, kernels)


@pytest.mark.parametrize(
    ("compilations", "taken_s", "waiting", "at_once", "left_s"),
    [
        ([], [], 3, 2, None),  # nothing is known
        ([running(5, 0, 0, 9)], [], 3, 2, None),
        ([running(10, 5, 10, 40)], [], 0, 2, 15),  # its kernels' pace, whatever came before
        ([running(10, 5, 10, 40), running(4, 2, 1, 2)], [], 0, 2, 15),  # the longest
        ([running(10, 5, 10, 40)], [], 3, 1, 15 + 3 * 25),  # others as long as this one
        ([running(10, 5, 10, 40)], [5], 4, 2, (15 + 4 * 15) / 2),  # or as the mean
        ([running(4, 0, 0, 0)], [6], 0, 2, 2),  # as long as what has ended
        ([running(9, 0, 0, 0)], [6], 0, 2, 0),
        ([], [6, 8], 2, 1, 14),
    ],
)
def test_the_rest_of_a_start(
    compilations: list[Compilation], taken_s: list[float], waiting: int, at_once: int, left_s: float | None
) -> None:
    assert expected_left_s(NOW_S, compilations, taken_s, waiting, at_once) == (
        None if left_s is None else pytest.approx(left_s)
    )


def test_kernels_of_models_that_are_compiled_are_counted() -> None:
    told: list[StartUnderWay] = []

    async def start() -> None:
        progress = StartProgress(2, told.append)
        progress.take_jobs(JobsUnderWay((BackgroundJob("compile", "early", 1.0, "kernels", 1, 2),)))
        assert not told, "no start"
        progress.begin(3)
        progress.take_jobs(
            JobsUnderWay(
                (
                    BackgroundJob("compile", "a", 1.0, "kernels", 3, 8),
                    BackgroundJob("compile", "b", 1.0, "import", 0, 1),
                    BackgroundJob("profile", "c", 1.0, "kernels", 5, 5),
                )
            )
        )
        progress.take_jobs(JobsUnderWay((BackgroundJob("compile", "a", 1.0, "weights", 0, 1),)))
        progress.take_jobs(JobsUnderWay(()))
        tasks = [asyncio.ensure_future(asyncio.sleep(seconds)) for seconds in (0.0, 0.0, 60.0)]
        for task in tasks:
            task.add_done_callback(progress.tried)
        await asyncio.gather(*tasks[:2])
        tasks[2].cancel()
        await asyncio.wait(tasks)

    asyncio.run(start())
    assert [message.text for message in told] == [
        "0 of 3 models",
        "0 of 3 models; kernels 3 of 8",
        "0 of 3 models; kernels 8 of 8",
        "0 of 3 models",
        "1 of 3 models",
        "2 of 3 models",
    ]
