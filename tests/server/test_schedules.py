"""Which schedules a server uses: those that are made for its artifacts and cores, and that gain."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from gangway.artifact.profile import whole_machine_id
from gangway.scheduler.messages import LoadModel, UseSchedule
from gangway.scheduler.stages.ir import StreamSegment
from gangway.scheduler.stages.schedule_file import StoredSchedule, write_schedule
from gangway.server.control.repository.schedules import StoredSchedules

TARGET, CORES = "avx2", 2
KEYS = ("a" * 64, "b" * 64)
STAGES = ((StreamSegment(0, 0, 2, 1), StreamSegment(1, 0, 4, 1)),)
FOUND = StoredSchedule(
    KEYS, ("one", "two"), (2, 4), whole_machine_id(TARGET), CORES, "random", ((), ()), STAGES, 1000.0, 1500.0, 1000.0,
    2, 1.0,
)  # fmt: skip


class Scheduler:
    """Knows two models, and an ensemble of number 9."""

    node_count = 1

    def __init__(self, **changes: object) -> None:
        specs = [
            LoadModel(
                4 + place, name, key, layers, 2, 64, 1, layer_us=(10.0,) * layers, layer_ranks=(1, 2) * (layers // 2)
            )
            for place, (name, key, layers) in enumerate(zip(FOUND.names, KEYS, FOUND.layers, strict=True))
        ]
        self.specs = {4: specs[0], 5: structs.replace(specs[1], **changes)}
        self.told: list[UseSchedule | int] = []

    def spec_of(self, model_id: int) -> LoadModel | None:
        return self.specs.get(model_id)

    def use_schedule(self, schedule: UseSchedule) -> None:
        self.told.append(schedule)

    def drop_schedule(self, number: int) -> None:
        self.told.append(number)


def schedules(cache_dir: Path, scheduler: Scheduler, cores: int = CORES) -> StoredSchedules:
    return StoredSchedules(cache_dir, cores, scheduler, lambda: TARGET)  # type: ignore[arg-type]


def test_a_schedule_is_told_and_dropped(tmp_path: Path) -> None:
    path = write_schedule(tmp_path, FOUND)
    scheduler = Scheduler()
    made = schedules(tmp_path, scheduler)
    used = made.use("ensemble e", [[0, 2, 3]], [4, 9, 5, 9])
    assert [(each.model_ids, each.places, each.time_us) for each in used] == [((4, 5), (0, 2), 1000.0)]
    again = made.use("ensemble f", [[0, 1]], [4, 5])
    assert again[0].number != used[0].number
    made.drop(used)
    assert scheduler.told == [
        UseSchedule(used[0].number, (4, 5), str(path)),
        UseSchedule(again[0].number, (4, 5), str(path)),
        used[0].number,
    ]
    assert made.use("ensemble g", [[0, 1]], [5, 4]) == [], "its steps have another order"


@pytest.mark.parametrize(
    ("found", "changes", "cores", "sentence"),
    [
        (FOUND, {}, 4, "it is made for 2 cores, and this server has 4"),
        (FOUND, {"layers": 5}, 2, "its models have other layers"),
        (FOUND, {"preserve_ordering": True}, 2, "requests to two may have to wait for each other"),
        (FOUND, {"limits": (("model 5", 1, 1),)}, 2, "requests to two may have to wait for each other"),
        (replace(FOUND, sequential_us=1090.0), {}, 2, "one after the other they are as fast"),
    ],
)
def test_a_schedule_that_does_not_fit_is_named_and_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, found: StoredSchedule, changes: dict[str, object], cores: int,
    sentence: str,
) -> None:  # fmt: skip
    write_schedule(tmp_path, found)
    scheduler = Scheduler(**changes)
    with caplog.at_level(logging.INFO):
        assert schedules(tmp_path, scheduler, cores).use("ensemble e", [[0, 1]], [4, 5]) == []
    assert scheduler.told == [] and [sentence in record.getMessage() for record in caplog.records] == [True]


def test_gangs_do_not_cross_nodes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_schedule(tmp_path, FOUND)
    scheduler = Scheduler()
    scheduler.node_count = 2
    caplog.set_level(logging.INFO, "gangway.server.control.repository.schedules")
    assert schedules(tmp_path, scheduler).use("ensemble e", [[0, 1]], [4, 5]) == [] and scheduler.told == []
    assert "several NUMA nodes" in caplog.text


def test_how_many_cores_a_model_keeps_busy(tmp_path: Path) -> None:
    made = schedules(tmp_path, Scheduler(layer_us=()))
    assert made.busy_cores(4) == pytest.approx(20 / (10 + 5) / 2)
    assert made.busy_cores(5) == made.busy_cores(9) == 1.0
