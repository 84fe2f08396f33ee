"""Profiles of a model whose kernels take a known time: facts about order and lower bounds, which no noise can turn.

The kernels sleep, so they need no core. Two ranks are faster than one even while the host gives one core only.
"""

import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gangway.artifact.format import BufferRef, Layer, Manifest, MemorySpace, TargetSpec, TensorSpec, Version
from gangway.artifact.profile import Profile, read_profile, write_profile
from gangway.artifact.writer import ArtifactWriter
from gangway.base.host_limits import cpu_name
from gangway.executor import _probes
from gangway.executor.launch import available_cores
from gangway.measure.interference import IDLE, Generators, slope_of
from gangway.measure.machine import OtherWork, l3_bytes, measure_machine, touched
from gangway.measure.model_runner import ModelRunner
from gangway.measure.profiler import core_counts, profile_model
from tests.helpers.small_cache import small_cache

pytestmark = pytest.mark.alone  # times of runs are compared

KEY = "5e" * 32
TASKS = 16
TASK_NS = 100_000
TARGET = TargetSpec("baseline", "x86-64", 4, ())
TASK_US = TASK_NS / 1e3


def layer(name: str, tasks: tuple[int, ...], weights_offset: int, flops: int, size_bytes: int) -> Layer:
    arguments = (
        BufferRef(MemorySpace.INPUT, 0),
        BufferRef(MemorySpace.WEIGHTS, weights_offset),
        BufferRef(MemorySpace.OUTPUT, 0),
    )
    versions = tuple(Version("wait_for", count, f"{count} tasks") for count in tasks)
    return Layer(name, "Wait", "", arguments, versions, flops, size_bytes, max_ranks=64)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Manifest]:
    """Four layers: of one length, of half of it, of it in two versions, and of nothing."""
    cache_dir = tmp_path_factory.mktemp("cache")
    with ArtifactWriter(cache_dir / KEY) as writer:
        long, short = (writer.append_weights(struct.pack("<i", time_ns)) for time_ns in (TASK_NS, 0))
        source = Path(__file__).parent / "timed_kernels.c"
        subprocess.run(["gcc", "-O1", "-shared", "-fPIC", str(source), "-o", str(writer.kernels_path)], check=True)
        manifest = Manifest(
            key=KEY,
            model_name="timed",
            batched=True,
            inputs=(TensorSpec("x", "FP32", (-1, 16), 64),),
            outputs=(TensorSpec("y", "INT32", (-1, TASKS), 4 * TASKS),),
            layers=(
                layer("whole", (TASKS,), long, flops=1_000_000, size_bytes=4_000),
                layer("half", (TASKS // 2,), long, flops=500_000, size_bytes=0),
                layer("versions", (TASKS, TASKS // 2), long, flops=0, size_bytes=8_000),
                layer("nothing", (1,), short, flops=0, size_bytes=0),
            ),
            arena_bytes=0,
            target=TARGET,
            files={},
        )
        manifest = writer.commit(manifest)
    return cache_dir, manifest


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Measurements of the machine read little memory."""
    with small_cache():
        yield


@pytest.fixture(scope="module")
def profile(artifact: tuple[Path, Manifest]) -> Profile:
    cores = available_cores()[:2]
    with small_cache():
        return profile_model(*artifact, cores, seconds=2.0)


def test_shape(profile: Profile, tmp_path: Path) -> None:
    assert profile.batches[0] == 1
    assert profile.cores == core_counts(len(available_cores()[:2]))
    assert [one.name for one in profile.layers] == ["whole", "half", "versions", "nothing"]
    assert [len(one.latency_us) for one in profile.layers] == [1, 1, 2, 1]
    assert min(profile.runs) >= 1 and list(profile.runs) == sorted(profile.runs, reverse=True)
    assert 0 < profile.scatter < 0.5
    assert 0 < profile.cores_whole <= 1
    assert profile.agreeing in {0, 1}
    assert read_profile(write_profile(tmp_path, profile)) == profile


def test_times_are_those_of_the_kernels(profile: Profile) -> None:
    whole, half, versions, nothing = profile.layers
    for index, rows in enumerate(profile.batches):
        assert whole.latency_us[0][0][index] >= rows * TASKS * TASK_US
        assert half.latency_us[0][0][index] >= rows * TASKS / 2 * TASK_US
        assert versions.latency_us[1][0][index] < versions.latency_us[0][0][index]
        assert half.latency_us[0][0][index] < whole.latency_us[0][0][index]
        assert nothing.latency_us[0][0][index] < half.latency_us[0][0][index]
        assert profile.isolated_us[0][index] >= rows * 2.5 * TASKS * TASK_US
    assert list(whole.latency_us[0][0]) == sorted(whole.latency_us[0][0])


@pytest.mark.skipif(len(available_cores()) < 2, reason="needs two cores")
def test_two_cores_are_faster(profile: Profile) -> None:
    whole = profile.layers[0].latency_us[0]
    assert whole[1][0] < whole[0][0]
    assert whole[1][0] >= TASKS / 2 * TASK_US
    assert profile.isolated_us[1][0] < profile.isolated_us[0][0]
    assert profile.interference_cores == 1
    assert len({(point.kind, point.share) for point in profile.interference}) == 6


@pytest.mark.skipif(len(available_cores()) < 2, reason="needs two cores")
def test_gangs_beside_each_other_are_measured(profile: Profile) -> None:
    alone, together = profile.isolated_us, profile.together_us
    assert together[1] == alone[1], "two cores are all that there are"
    for rows, time_us in zip(profile.batches, together[0], strict=True):
        assert time_us >= rows * 2.5 * TASKS * TASK_US
    assert together[0] != alone[0]


@pytest.mark.skipif(len(available_cores()) < 2, reason="needs two cores")
def test_gangs_run_at_the_same_time_and_each_on_its_own(artifact: tuple[Path, Manifest]) -> None:
    rows = 32
    with ModelRunner(*artifact, available_cores()[:2], max_rows=rows, gangs=2) as runner:
        runs = runner.run_gangs(rows, 1, gangs=2)
        starts_ns = [runner.lease(gang).start_ns() for gang in (0, 1)]
        ends_ns = [runner.lease(gang).layer_end_ns(0, 4)[-1] for gang in (0, 1)]
        for first_row in (0, rows):
            _, (place,) = runner._places(first_row)
            assert bytes(runner.io.view[place : place + 4 * TASKS * rows]) == struct.pack("<i", 1) * TASKS * rows
        assert runner.run(1, 2).total_us < min(run.total_us for run in runs)
        with pytest.raises(ValueError, match="room for 64 rows, not for 128"):
            runner.run_gangs(2 * rows, 1, gangs=2)
    assert len(runs) == 2
    assert max(starts_ns) < min(ends_ns)
    assert min(run.total_us for run in runs) >= rows * 2.5 * TASKS * TASK_US


def test_memory_and_compute_time(profile: Profile) -> None:
    machine = profile.machine
    whole, half, versions, nothing = profile.layers
    assert whole.compute_us == 1_000_000 / machine.peak_flops_per_us
    assert half.compute_us == 500_000 / machine.peak_flops_per_us
    assert versions.memory_us == 8_000 / machine.bandwidth_bytes_per_us
    assert (nothing.memory_us, nothing.compute_us) == (0, 0)


@pytest.mark.usefixtures("little_memory")
def test_one_core_has_no_slope(artifact: tuple[Path, Manifest]) -> None:
    profile = profile_model(*artifact, available_cores()[:1], seconds=0.1)
    assert (profile.cores, profile.interference, profile.interference_cores) == ((1,), (), 0)
    assert all(one.slope == one.slowdown == () for one in profile.layers)


@pytest.mark.usefixtures("little_memory")
def test_a_measurement_beside_other_processes_is_in_doubt(
    artifact: tuple[Path, Manifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(OtherWork, "share", lambda self: 0.3)
    profile = profile_model(*artifact, available_cores()[:1], seconds=0.1)
    assert (profile.cores_whole, profile.agreeing, profile.doubtful) == (0.7, 0, True)
    monkeypatch.setattr(OtherWork, "share", lambda self: 1.0)
    assert profile_model(*artifact, available_cores()[:1], seconds=0.1).cores_whole > 0
    monkeypatch.setattr(OtherWork, "share", lambda self: 0.1)
    profile = profile_model(*artifact, available_cores()[:1], seconds=0.1)
    assert (profile.cores_whole, profile.agreeing, profile.doubtful) == (0.9, 1, False)


@pytest.mark.usefixtures("little_memory")
def test_progress_tells_what_and_how_far(artifact: tuple[Path, Manifest]) -> None:
    seen: list[tuple[str, float]] = []
    profile_model(*artifact, available_cores()[:1], 0.2, lambda phase, share: seen.append((phase, share)))
    shares = [share for _, share in seen]
    assert shares == sorted(shares)
    assert {phase for phase, _ in seen} == {"machine", "latency"}
    assert shares[0] == 0.0
    assert shares[-1] == 1.0


def test_slope() -> None:
    assert slope_of([0.0, 0.5, 1.0], [0.0, 1.0, 2.0]) == 2.0
    assert slope_of([0.5, 0.5], [0.5, 1.0]) == 1.5
    assert slope_of([0.0, 0.01], [0.0, 5.0]) == 0.0  # noise


def test_machine_is_measured() -> None:
    core = available_cores()[0]
    narrow = measure_machine(core, 1, TARGET)
    assert narrow.cpu == cpu_name()
    assert narrow.peak_flops_per_us > 1_000
    assert narrow.bandwidth_bytes_per_us > 100
    with pytest.raises(ValueError, match="no vectors of 5 numbers"):
        measure_machine(core, 1, TargetSpec("odd", "", 5, ()))


def test_memory_sets_the_pace_of_reading() -> None:
    near, far = touched(1 << 17), touched(4 * l3_bytes())
    near_ns = min(_probes.read_memory(near) for _ in range(50)) / len(near)
    far_ns = min(_probes.read_memory(far) for _ in range(3)) / len(far)
    assert near_ns < far_ns / 1.5, "what lies in a cache is not held up by the loop itself"


def test_cpu_and_cache_that_the_system_does_not_name(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\n\nprocessor\t: 1\nmodel name\t: other\n")
    assert cpu_name(tmp_path / "cpuinfo") == "unknown CPU (?/?/?)"
    assert l3_bytes(tmp_path) > 0


def test_generators_obey_and_end() -> None:
    with Generators([available_cores()[-1]], l3_bytes()) as generators:
        (process,) = generators.processes
        for load in (("stream", 100), ("thrash", 25), IDLE):
            generators.set(*load)
        process.kill()
        process.wait(10)
        with pytest.raises(TimeoutError):
            generators.set("stream", 100)
    assert process.returncode is not None


@pytest.mark.skipif(len(available_cores()) < 2, reason="needs two cores")
def test_a_run_on_two_cores_is_one_of_two_workers(artifact: tuple[Path, Manifest]) -> None:
    with ModelRunner(*artifact, available_cores()[:2], max_rows=1) as runner:
        for ranks, runs in ((1, [1, 0]), (2, [2, 1])):
            runner.run(1, ranks)
            assert [runner.control.status(worker).runs for worker in (0, 1)] == runs
