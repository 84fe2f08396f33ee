"""Jobs under way are told whenever what is to do is another, however short their phases are."""

from gangway.server.control.supervisor.jobs import Jobs
from gangway.server.messages import JobsUnderWay


def test_how_much_is_to_do_is_told_at_once() -> None:
    told: list[JobsUnderWay] = []
    jobs = Jobs(told.append)
    number = jobs.begin("compile", "m")
    for phase, total in (("graph", 1), ("kernels", 1), ("kernels", 10), ("write", 1)):
        jobs.advance(number, phase, 0, total)
        (job,) = told[-1].jobs
        assert (job.phase, job.done, job.total) == (phase, 0, total)
    jobs.end(number)
    assert told[-1].jobs == ()
