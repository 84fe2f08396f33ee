"""When a model's layers are measured: at once, and again while its profile is in doubt and the machine is idle."""

import asyncio
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gangway.artifact.format import Engine, Manifest
from gangway.artifact.profile import (
    MOST_NAMES,
    Profile,
    keep_better,
    other_names,
    profile_path,
    read_profile,
    write_profile,
)
from gangway.server.control.repository import profiles
from gangway.server.control.repository.profiles import BackgroundProfiler, is_quiet, pause_seconds
from gangway.server.control.supervisor.jobs import Jobs
from gangway.server.control.supervisor.processes import Child
from gangway.server.messages import BackgroundJob, JobsUnderWay
from gangway.server.options.server import GeneralOptions
from tests.helpers.profiles import PROFILE

WHOLE = replace(PROFILE, agreeing=1)
DOUBTFUL = replace(WHOLE, cores_whole=0.5)
MANIFEST: Any = SimpleNamespace(engine=Engine.NATIVE, model_name="compiled_first")


@pytest.mark.parametrize("profile", [None, DOUBTFUL], ids=["none", "doubtful"])
def test_what_is_missing_or_in_doubt_is_measured_at_once_then_after_growing_pauses(profile: Profile | None) -> None:
    pauses = [pause_seconds(profile, measurements) for measurements in range(10)]
    assert pauses == [0, 60, 120, 240, 480, 960, 1920, 3600, None, None]


@pytest.mark.parametrize("profile", [WHOLE, replace(DOUBTFUL, agreeing=3)], ids=["whole", "agreed upon"])
def test_what_is_believed_is_not_measured_again(profile: Profile) -> None:
    assert {pause_seconds(profile, measurements) for measurements in range(10)} == {None}


def test_one_busy_core_is_enough_for_a_busy_machine() -> None:
    assert is_quiet((10.0, 20.0), (11.7, 22.0), 2.0)
    assert not is_quiet((10.0, 20.0), (12.0, 21.5), 2.0)
    assert is_quiet(None, (12.0, 21.5), 2.0), "not known"


class Scripted(BackgroundProfiler):
    """Measurements that come out as told, at once; None: that failed."""

    def __init__(self, cache_dir: Path, outcomes: Sequence[Profile | None]) -> None:
        self.used: list[Profile] = []
        self.told: list[tuple[BackgroundJob, ...]] = []

        def tell(message: JobsUnderWay) -> None:
            self.told.append(message.jobs)

        self.outcomes = list(outcomes)
        self.cache_dir = cache_dir
        scheduler: Any = SimpleNamespace(use_profile=lambda _, path: self.used.append(read_profile(path)))
        control: Any = SimpleNamespace(status=lambda _: SimpleNamespace(runs=0, busy=False))
        nothing: Any = SimpleNamespace(busy=False)
        options = GeneralOptions(cores=(0, 1), cache_dir=cache_dir, profile_seconds=1.0)
        super().__init__(options, control, nothing, scheduler, nothing, Jobs(tell))

    def _path(self, manifest: Manifest) -> Path:
        return profile_path(self.cache_dir, WHOLE.key, WHOLE.machine.machine_id)

    def _start(self, manifest: Manifest) -> Child:
        outcome = self.outcomes.pop(0)
        if outcome is not None:
            keep_better(self.cache_dir, outcome)
        command = [sys.executable, "-S", "-c", f"raise SystemExit({int(outcome is None)})"]
        return Child("measurement", subprocess.Popen(command), lambda _: None)

    async def until(self, condition: Callable[[], object]) -> None:
        """Load the model and measure until the condition holds."""
        self.add(7, "loaded", MANIFEST)
        running = asyncio.create_task(self.run())
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0)
        running.cancel()


Script = Callable[[Sequence[Profile | None]], Scripted]


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Script:
    """A server with these outcomes of measurements, without pauses, on a machine with nothing else to do."""
    for name in ("QUIET_SECONDS", "POLL_SECONDS", "BUSY_SECONDS"):
        monkeypatch.setattr(profiles, name, 0.0)
    monkeypatch.setattr(profiles, "AGAIN_SECONDS", (0.0,) * len(profiles.AGAIN_SECONDS))
    monkeypatch.setattr(profiles, "idle_seconds", lambda cores: None)
    return lambda outcomes: Scripted(tmp_path, outcomes)


def run(profiler: Scripted, condition: Callable[[], object] | None = None) -> None:
    asyncio.run(profiler.until(condition or (lambda: not profiler._wanted)))


def shares(profiler: Scripted) -> list[float]:
    return [profile.cores_whole for profile in profiler.used]


def test_a_doubtful_profile_is_used_until_there_is_a_better_one(scripted: Script) -> None:
    outcomes = [replace(WHOLE, cores_whole=share) for share in (0.5, 0.13, 0.95)]
    profiler = scripted([*outcomes, WHOLE])
    run(profiler)
    assert shares(profiler) == [0.5, 0.5, 0.95]
    assert profiler.outcomes == [WHOLE], "a whole one is not measured again"
    jobs = [[(job.kind, job.model) for job in jobs] for jobs in profiler.told]
    assert jobs == [[("profile", "loaded")], []] * 3, (
        "each measurement is told, by the name of what is loaded, and its end"
    )
    again = scripted([])
    run(again)
    assert shares(again) == [0.95]


def test_what_three_measurements_agree_on_is_believed_by_the_next_server_too(scripted: Script) -> None:
    profiler = scripted([DOUBTFUL] * 4)
    run(profiler)
    assert shares(profiler) == [0.5] * 3
    assert len(profiler.outcomes) == 1
    run(scripted([]))


def test_measurements_beside_others_never_agree_and_have_an_end(scripted: Script) -> None:
    profiler = scripted([replace(DOUBTFUL, agreeing=0)] * 9)
    run(profiler)
    assert len(profiler.outcomes) == 1
    next_server = scripted([WHOLE])
    run(next_server)
    assert shares(next_server) == [0.5, 1.0]


def test_a_measurement_that_failed_is_tried_again(scripted: Script) -> None:
    profiler = scripted([None, WHOLE])
    run(profiler)
    assert shares(profiler) == [1.0]


def test_a_busy_machine_is_measured_once_and_again_when_it_is_idle(
    scripted: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0

    def never_idle(cores: Sequence[int]) -> tuple[float, ...]:
        nonlocal looks
        looks += 1
        return (0.0, 0.0)

    monkeypatch.setattr(profiles, "idle_seconds", never_idle)
    monkeypatch.setattr(profiles, "QUIET_SECONDS", 1e-6)
    profiler = scripted([DOUBTFUL, WHOLE])
    run(profiler, lambda: looks > 20)
    assert shares(profiler) == [0.5]
    monkeypatch.setattr(profiles, "idle_seconds", lambda cores: None)
    run(profiler)
    assert shares(profiler)[-1] == 1.0


async def load(profiler: Scripted, *names: str) -> None:
    for number, name in enumerate(names):
        profiler.add(number, name, MANIFEST, f"{name}, version 1, of some size")


def test_a_profile_in_doubt_is_told_once_however_often_it_is_loaded(
    scripted: Script, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    profiler = scripted([])
    for share in (0.25, 0.5):
        write_profile(tmp_path, replace(DOUBTFUL, cores_whole=share))
        asyncio.run(load(profiler, "one", "one", "other"))
    assert [record.getMessage().partition(" %")[0] for record in caplog.records] == [
        f"one, version 1, of some size: cores slowed each other down while it was measured ({percent}"
        for percent in (25, 50)
    ]


def test_names_under_which_an_artifact_is_loaded_are_noted_beside_its_profile(scripted: Script, tmp_path: Path) -> None:
    path = write_profile(tmp_path, WHOLE)
    profiler = scripted([])
    asyncio.run(load(profiler, "one", WHOLE.model_name, "two words", "one"))
    assert other_names(path) == ("one", "two words")
    asyncio.run(load(profiler, *map(str, range(MOST_NAMES))))
    assert other_names(path) == tuple(map(str, range(MOST_NAMES)))
    assert read_profile(path) == WHOLE
