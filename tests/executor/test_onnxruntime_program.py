"""Models that cannot be compiled, served by onnxruntime in the workers of the real executor and server."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from onnx import helper

from gangway.artifact.cache import Cache
from gangway.artifact.format import Engine, Manifest
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from gangway.executor.frames import needed_bytes, plan_frame
from gangway.executor.launch import available_cores
from gangway.executor.leases import LeaseControl, LeaseSpec, Member
from gangway.executor.messages import LeftReason
from gangway.executor.onnxruntime_program import Team
from gangway.executor.slots import SlotOutcome, SlotRequest, SlotStatus
from gangway.measure.model_runner import LocalExecutor
from gangway.zoo import write_model
from testing.frame_requests import read_answer, write_request
from testing.processes import cpu_ns
from testing.waiting import until
from tests.helpers.onnx_networks import FOREIGN, Array, Foreign, wide

HEAP = 1 << 16
WAIT_US = 20_000_000
LONG_STEPS = 180_000  # some tenths of a second, so that a rank that waits for its core still meets it
BEGUN_NS = 20_000_000  # of CPU; from joining to calling is a microsecond
Outputs = Callable[[], dict[str, bytes]]


def compiled(path: Path, name: str, cache_dir: Path) -> Manifest:
    return compile_model(path, name, Cache(cache_dir), detect(), lambda phase, done, total: None).manifest


class Runner:
    """Runs models alone on an executor with one worker; each model under its own number."""

    def __init__(self, executor: LocalExecutor, cache_dir: Path) -> None:
        self.executor = executor
        self.cache_dir = cache_dir
        self.models: list[Manifest] = []
        self.answer_bytes = 1 << 16

    def load(self, path: Path, name: str) -> int:
        self.models.append(compiled(path, name, self.cache_dir))
        model_id = len(self.models)
        self.executor.load(model_id, self.models[-1].key)
        return model_id

    def begin(self, model_id: int, feeds: dict[str, Array], rows: int) -> tuple[int, LeaseSpec, Outputs]:
        """Fill a slot; return it, the lease for it, and what reads the outputs."""
        manifest = self.models[model_id - 1]
        place = self._frames if manifest.engine is Engine.ONNXRUNTIME else self._tensors
        request, outputs = place(model_id, manifest, feeds, rows)
        slot, generation = self.executor.begin(request)
        members = (Member(0, slot, generation, rows=rows),)
        spec = LeaseSpec(model_id, members, 0, manifest.arena_bytes, 0, len(manifest.layers))
        return slot, spec, outputs

    def _tensors(
        self, model_id: int, manifest: Manifest, feeds: dict[str, Array], rows: int
    ) -> tuple[SlotRequest, Outputs]:
        offset, offsets, outputs = HEAP, [], {}
        for tensor in (*manifest.inputs, *manifest.outputs):
            size = tensor.row_bytes * rows
            view = self.executor.io.view[offset : offset + size]
            if len(offsets) < len(manifest.inputs):
                view[:] = np.ascontiguousarray(feeds[tensor.name]).tobytes()
            else:
                outputs[tensor.name] = view
            offsets.append(offset)
            offset += -(-size // 64) * 64
        count = len(manifest.inputs)
        request = SlotRequest(model_id, rows, tuple(offsets[:count]), tuple(offsets[count:]))
        return request, lambda: {name: bytes(view) for name, view in outputs.items()}

    def _frames(
        self, model_id: int, manifest: Manifest, feeds: dict[str, Array], rows: int
    ) -> tuple[SlotRequest, Outputs]:
        arrays = [feeds[tensor.name] for tensor in manifest.inputs]
        tensors = [(array.shape, np.ascontiguousarray(array).tobytes()) for array in arrays]
        request = write_request(self.executor.io, HEAP, model_id, rows, tensors, self.answer_bytes)

        def outputs() -> dict[str, bytes]:
            contents = [content for _, content in read_answer(self.executor.io, request)]
            return dict(zip([tensor.name for tensor in manifest.outputs], contents, strict=False))

        return request, outputs

    def end(self, slot: int) -> SlotOutcome:
        assert self.executor.slots.wait(slot, WAIT_US)
        outcome = self.executor.slots.outcome(slot)
        self.executor.slots.release(slot)
        return outcome

    def run(self, model_id: int, feeds: dict[str, Array], rows: int) -> tuple[SlotOutcome, dict[str, bytes]]:
        slot, spec, outputs = self.begin(model_id, feeds, rows)
        self.executor.start(0, spec, [0])
        outcome = self.end(slot)
        assert [left.reason for left in self.executor.left([0])] == [LeftReason.DONE]
        return outcome, outputs() if outcome.status is SlotStatus.OK else {}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """A worker for most tests, so that onnxruntime is imported once: that takes longer than what they do."""
    cache_dir = tmp_path_factory.mktemp("cache")
    with LocalExecutor(cache_dir, available_cores()[:1]) as executor:
        yield Runner(executor, cache_dir)


@pytest.fixture
def runner(shared: Runner) -> Iterator[Runner]:
    """The shared worker; it has no model yet, and memory for requests is empty."""
    runner = Runner(shared.executor, shared.cache_dir)
    shared.executor.io.punch(HEAP, shared.executor.io.size_bytes - HEAP)
    yield runner
    for number in range(len(runner.models)):
        shared.executor.unload(1 + number)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Runner]:
    """A worker that no other test has."""
    with LocalExecutor(tmp_path / "cache", available_cores()[:1]) as executor:
        yield Runner(executor, tmp_path / "cache")


def answers_of(path: Path, feeds: dict[str, Array]) -> dict[str, Array]:
    session = onnxruntime.InferenceSession(str(path))
    return dict(zip([output.name for output in session.get_outputs()], session.run(None, feeds), strict=True))


@pytest.mark.parametrize("name", FOREIGN)
def test_the_executor_answers_like_onnxruntime(runner: Runner, tmp_path: Path, name: str) -> None:
    network = FOREIGN[name]()
    path = network.save(tmp_path / "model.onnx")
    model_id = runner.load(path, name)
    manifest = runner.models[0]
    assert (manifest.engine, manifest.batched) == (Engine.ONNXRUNTIME, network.batched)
    assert manifest.fallback_reason
    for rows in (1, 3, 2) if network.batched else (1, 1):
        feeds = network.feeds(rows, seed=rows)
        outcome, outputs = runner.run(model_id, feeds, rows)
        assert (outcome.status, outcome.ranks) == (SlotStatus.OK, 1)
        assert outcome.compute_us > 0
        for key, expected in answers_of(path, feeds).items():
            np.testing.assert_array_equal(np.frombuffer(outputs[key], expected.dtype), expected.ravel())


def test_a_failure_concerns_one_request(own: Runner, tmp_path: Path) -> None:
    network = FOREIGN["gather"]()
    model_id = own.load(network.save(tmp_path / "model.onnx"), "picker")
    worker = own.executor.workers[0].pid
    failed = SlotStatus.INVALID
    for index, status in ((3, SlotStatus.OK), (10, failed), (-11, failed), (9, SlotStatus.OK)):
        outcome, outputs = own.run(model_id, {"index": np.array([[index, 1]])}, 1)
        assert outcome.status is status
        if status is SlotStatus.OK:
            assert np.frombuffer(outputs["y"], np.float32)[0] == 4 * index
        else:
            reason = (
                f"Gather: indices element out of data bounds, idx={index} must be within the inclusive range [-10,9]"
            )
            assert outcome.reason == reason
    assert own.executor.workers[0].poll() is None and own.executor.control.status(0).pid == worker


def test_requests_in_one_memory_get_their_own_answers(runner: Runner, tmp_path: Path) -> None:
    """What onnxruntime was told of the memory is not used for other shapes, and no failure stays."""
    nodes = [helper.make_node("NonZero", ["x"], ["y"]), helper.make_node("Gather", ["t", "i"], ["z"])]
    network = Foreign(
        nodes,
        {"x": ("float32", ["S"]), "i": ("int64", ["T"])},
        {"y": ("int64", [1, "count"]), "z": ("float32", ["T"]), "x": ("float32", ["S"])},
        {"t": np.arange(10, dtype=np.float32)},
    )
    path = network.save(tmp_path / "model.onnx")
    model_id = runner.load(path, "places")
    for found, index in ((2, 1), (2, 2), (2, 3), (2, 10), (2, 4), (5, 4), (5, 5), (5, 6), (0, 7), (3, 8), (3, 9)):
        x = (np.arange(8) < found).astype(np.float32) * index
        outcome, outputs = runner.run(model_id, {"x": x, "i": np.array([index])}, 1)
        if index == 10:
            assert outcome.status is SlotStatus.INVALID and "idx=10 must be within" in outcome.reason
            continue
        assert outcome.status is SlotStatus.OK
        for key, expected in answers_of(path, {"x": x, "i": np.array([index])}).items():
            np.testing.assert_array_equal(np.frombuffer(outputs[key], expected.dtype), expected.ravel())


def test_an_answer_without_room_says_how_much_it_needs(runner: Runner, tmp_path: Path) -> None:
    network = FOREIGN["lstm"]()
    model_id = runner.load(network.save(tmp_path / "model.onnx"), "lstm")
    feeds = network.feeds(4)
    sizes = [array.nbytes for array in answers_of(tmp_path / "model.onnx", feeds).values()]
    for room in (64, sum(sizes)):
        runner.answer_bytes = room
        slot, spec, _ = runner.begin(model_id, feeds, 4)
        runner.executor.start(0, spec, [0])
        assert runner.end(slot).status is SlotStatus.OK
        runner.executor.left([0])
        offset = HEAP + plan_frame([((4, 7, 6), 4 * 7 * 6 * 4)]).size_bytes
        answer = runner.executor.io.view[offset : offset + room]
        assert needed_bytes(answer) == plan_frame([((0,) * 3, size) for size in sizes]).size_bytes > room
        assert not any(answer[8:])
        answer[:] = bytes(room)


def test_a_frame_that_lies_harms_nobody(runner: Runner, tmp_path: Path) -> None:
    network = FOREIGN["topk"]()
    model_id = runner.load(network.save(tmp_path / "model.onnx"), "topk")
    feeds = network.feeds(2)
    for word, value in ((0, 1 << 40), (0, 0), (1, 2), (1, 1 << 60), (2, 65), (3, 3), (4, 1 << 62), (5, 161)):
        slot, spec, _ = runner.begin(model_id, feeds, 2)
        runner.executor.io.view[HEAP + 8 * word : HEAP + 8 * word + 8] = value.to_bytes(8, "little")
        runner.executor.start(0, spec, [0])
        assert runner.end(slot).status is SlotStatus.INTERNAL
        runner.executor.left([0])
    outcome, outputs = runner.run(model_id, feeds, 2)
    assert outcome.status is SlotStatus.OK and len(outputs["values"]) == 24
    for frames in ((1 << 40, 64), (64, 1 << 62), ((1 << 64) - 64, 64)):
        request = SlotRequest(model_id, 1, (HEAP,), (HEAP,), frame_bytes=frames)
        slot, generation = runner.executor.begin(request)
        runner.executor.start(0, LeaseSpec(model_id, (Member(0, slot, generation),), 0, 0, 0, 1), [0])
        assert [left.reason for left in runner.executor.left([0])] == [LeftReason.INVALID]
        runner.executor.slots.finish(slot, generation, SlotStatus.INTERNAL)
        runner.executor.slots.release(slot)


def test_native_models_beside_it(runner: Runner, tmp_path: Path) -> None:
    network = FOREIGN["topk"]()
    foreign = runner.load(network.save(tmp_path / "model.onnx"), "topk")
    native = runner.load(write_model(tmp_path / "zoo", "simple") / "1" / "model.onnx", "simple")
    assert [model.engine for model in runner.models] == [Engine.ONNXRUNTIME, Engine.NATIVE]
    numbers = np.arange(16, dtype=np.int32)
    for seed in range(3):
        outcome, outputs = runner.run(native, {"INPUT0": numbers, "INPUT1": numbers * seed}, 1)
        assert outcome.status is SlotStatus.OK
        np.testing.assert_array_equal(np.frombuffer(outputs["OUTPUT0"], np.int32), numbers * (1 + seed))
        feeds = network.feeds(2, seed)
        _, outputs = runner.run(foreign, feeds, 2)
        expected = np.sort(feeds["x"])[:, :-4:-1]
        np.testing.assert_array_equal(np.frombuffer(outputs["values"], np.float32), expected.ravel())


def open_files(pid: int) -> set[str]:
    return {os.readlink(path) for path in Path(f"/proc/{pid}/fd").iterdir()}


def is_mapped(pid: int) -> bool:
    return "onnxruntime" in Path(f"/proc/{pid}/maps").read_text()


def test_only_such_a_model_brings_onnxruntime_in(own: Runner, tmp_path: Path) -> None:
    pid = own.executor.workers[0].pid
    own.load(write_model(tmp_path / "zoo", "simple") / "1" / "model.onnx", "simple")
    assert not is_mapped(pid)
    before = open_files(pid)
    own.load(FOREIGN["topk"]().save(tmp_path / "model.onnx"), "topk")
    assert is_mapped(pid)
    assert len(list(Path(f"/proc/{pid}/task").iterdir())) <= 2, "one computes, one may not have ended after loading"
    assert open_files(pid) == before, "onnxruntime collects nothing to be sent anywhere"


def private_kb(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


def test_unloading_gives_the_memory_back(own: Runner, tmp_path: Path) -> None:
    weights = np.random.default_rng(0).standard_normal((1 << 21, 4)).astype(np.float32)  # 32 MiB
    network = FOREIGN["gather"]()
    network.constants["table"] = weights
    model_id = own.load(network.save(tmp_path / "model.onnx"), "large")
    key, pid = own.models[0].key, own.executor.workers[0].pid
    assert key in Path(f"/proc/{pid}/maps").read_text()
    own.executor.unload(model_id)
    unloaded_kb = private_kb(pid)
    assert key not in Path(f"/proc/{pid}/maps").read_text()
    for _ in range(8):
        own.executor.load(model_id, key)
        assert own.run(model_id, network.feeds(1), 1)[0].status is SlotStatus.OK
        own.executor.unload(model_id)
    assert private_kb(pid) - unloaded_kb < 8 * 1024


@pytest.mark.parametrize("control", [LeaseControl.STOP, LeaseControl.STOP_NOW])
def test_a_stop_before_the_run_keeps_it_from_beginning(runner: Runner, tmp_path: Path, control: LeaseControl) -> None:
    network = FOREIGN["topk"]()
    model_id = runner.load(network.save(tmp_path / "model.onnx"), "topk")
    slot, spec, outputs = runner.begin(model_id, network.feeds(1), 1)
    lease = runner.executor.lease(0)
    runner.executor.start(0, spec, [])
    lease.set_control(control)
    runner.executor.join(0, 0, 0)
    assert [left.reason for left in runner.executor.left([0])] == [LeftReason.STOPPED]
    assert not outputs()
    lease.resume(1, 1)
    runner.executor.join(0, 0, 0)
    assert runner.end(slot).status is SlotStatus.OK
    assert any(outputs()["values"])
    assert [left.reason for left in runner.executor.left([0])] == [LeftReason.DONE]


def test_an_abort_before_the_run_keeps_it_from_beginning(runner: Runner, tmp_path: Path) -> None:
    network = FOREIGN["topk"]()
    model_id = runner.load(network.save(tmp_path / "model.onnx"), "topk")
    slot, spec, outputs = runner.begin(model_id, network.feeds(1), 1)
    runner.executor.start(0, spec, [])
    runner.executor.lease(0).abort()
    runner.executor.join(0, 0, 0)
    assert [left.reason for left in runner.executor.left([0])] == [LeftReason.ABORTED]
    assert not outputs()
    assert runner.executor.slots.requeue(slot, spec.members[0].generation)


def test_a_run_in_progress_ends_and_answers(runner: Runner, tmp_path: Path) -> None:
    model_id = runner.load(FOREIGN["loop"]().save(tmp_path / "model.onnx"), "loop")
    slot, spec, _ = runner.begin(model_id, {"count": np.array([LONG_STEPS])}, 1)
    lease, pid = runner.executor.lease(0), runner.executor.workers[0].pid
    idle_ns = cpu_ns(pid)
    runner.executor.start(0, spec, [0])
    until(lambda: lease.progress().present and cpu_ns(pid) - idle_ns >= BEGUN_NS)
    lease.set_control(LeaseControl.STOP_NOW)
    lease.abort()
    assert runner.end(slot).status is SlotStatus.OK
    assert [left.reason for left in runner.executor.left([0])] == [LeftReason.DONE]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Runner]:
    """Two workers, for a gang of two."""
    cores = available_cores()
    with LocalExecutor(tmp_path / "cache", [cores[0], cores[-1]]) as executor:
        yield Runner(executor, tmp_path / "cache")


def begin_long_run(runner: Runner, tmp_path: Path) -> int:
    """Start a gang of both workers; return the slot when rank 0 computes, and both are in."""
    model_id = runner.load(FOREIGN["loop"]().save(tmp_path / "model.onnx"), "loop")
    slot, spec, _ = runner.begin(model_id, {"count": np.array([LONG_STEPS])}, 1)
    lease, pid = runner.executor.lease(0), runner.executor.workers[0].pid
    idle_ns = cpu_ns(pid)
    runner.executor.start(0, spec._replace(wanted=2, timeout_us=1000), [0, 1])
    until(lambda: lease.progress().present == 0b11 and cpu_ns(pid) - idle_ns >= BEGUN_NS)
    return slot


def test_a_gang_computes_on_all_its_cores(pair: Runner, tmp_path: Path) -> None:
    network = wide()
    pair.answer_bytes = 1 << 18
    path = network.save(tmp_path / "model.onnx")
    model_id = pair.load(path, "wide")
    feeds = network.feeds(1)
    expected = answers_of(path, feeds)
    worker = pair.executor.workers[0].pid
    for ranks in (2, 1, 2):
        slot, spec, outputs = pair.begin(model_id, feeds, 1)
        pair.executor.lease(0).initialise(spec._replace(wanted=ranks))
        for rank in reversed(range(ranks)):  # those who lend their cores wait longer than the one that computes
            pair.executor.join(0, rank, rank)
            while rank and not pair.executor.lease(0).progress().present:
                pass
        outcome = pair.end(slot)
        assert (outcome.status, outcome.ranks) == (SlotStatus.OK, ranks)
        assert {left.reason for left in pair.executor.left(range(ranks))} == {LeftReason.DONE}
        for key, value in outputs().items():
            np.testing.assert_allclose(np.frombuffer(value, expected[key].dtype), expected[key].ravel(), rtol=1e-5)
    helpers = [
        int(task.name)
        for task in Path(f"/proc/{worker}/task").iterdir()
        if int(task.name) != worker and int((task / "schedstat").read_text().split()[0]) > BEGUN_NS / 10
    ]
    assert available_cores()[-1:] in [sorted(os.sched_getaffinity(thread)) for thread in helpers]


def test_ranks_that_lend_their_cores_sleep(pair: Runner, tmp_path: Path) -> None:
    slot = begin_long_run(pair, tmp_path)
    pids = [worker.pid for worker in pair.executor.workers]
    begin_ns = [cpu_ns(pid) for pid in pids]
    assert pair.end(slot).status is SlotStatus.OK
    assert [left.reason for left in pair.executor.left([0, 1])] == [LeftReason.DONE] * 2
    computed_ns, slept_ns = (cpu_ns(pid) - begin for pid, begin in zip(pids, begin_ns, strict=True))
    assert slept_ns < computed_ns / 2


def test_a_run_goes_on_without_a_rank_that_was_killed(pair: Runner, tmp_path: Path) -> None:
    slot = begin_long_run(pair, tmp_path)
    pair.executor.workers[1].kill()
    pair.executor.lease(0).abort()
    assert pair.end(slot).status is SlotStatus.OK
    assert [left.reason for left in pair.executor.left([0])] == [LeftReason.DONE]


def test_the_others_leave_when_the_calling_rank_was_killed(pair: Runner, tmp_path: Path) -> None:
    begin_long_run(pair, tmp_path)
    pair.executor.workers[0].kill()
    pair.executor.lease(0).abort()
    assert [left.reason for left in pair.executor.left([1])] == [LeftReason.ABORTED]


@pytest.mark.parametrize("ranks", [(0,), (1,)])
def test_nobody_waits_for_a_rank_that_does_not_come(pair: Runner, tmp_path: Path, ranks: tuple[int, ...]) -> None:
    network = FOREIGN["topk"]()
    model_id = pair.load(network.save(tmp_path / "model.onnx"), "topk")
    slot, spec, _ = pair.begin(model_id, network.feeds(1), 1)
    pair.executor.start(0, spec._replace(wanted=2), [])
    for rank in ranks:
        pair.executor.join(0, rank, rank)
    reason = LeftReason.SHRUNK if ranks[0] else LeftReason.DONE
    assert [left.reason for left in pair.executor.left(ranks)] == [reason]
    assert ranks[0] or pair.end(slot).status is SlotStatus.OK


def test_a_killed_worker_is_replaced(runner: Runner, tmp_path: Path) -> None:
    network = FOREIGN["loop"]()
    model_id = runner.load(network.save(tmp_path / "model.onnx"), "loop")
    slot, spec, outputs = runner.begin(model_id, {"count": np.array([LONG_STEPS])}, 1)
    runner.executor.start(0, spec, [0])
    until(lambda: runner.executor.lease(0).progress().present)
    runner.executor.restart(0)
    runner.executor.load(model_id, runner.models[0].key)
    generation = spec.members[0].generation
    assert runner.executor.slots.requeue(slot, generation)
    assert runner.executor.slots.start(slot, generation)
    runner.executor.start(0, spec, [0])
    assert runner.end(slot).status is SlotStatus.OK
    assert [left.reason for left in runner.executor.left([0])] == [LeftReason.DONE]
    np.testing.assert_array_equal(np.frombuffer(outputs()["y"], np.float32), np.eye(32).ravel())


def test_a_damaged_copy_is_refused_by_the_worker(own: Runner, tmp_path: Path) -> None:
    path = FOREIGN["topk"]().save(tmp_path / "model.onnx")
    manifest = compiled(path, "topk", own.cache_dir)
    copy = own.cache_dir / manifest.key / "onnx" / "model.onnx"
    copy.write_bytes(copy.read_bytes()[:50])
    with pytest.raises(RuntimeError, match="worker 0: onnxruntime: "):
        own.executor.load(1, manifest.key)
    assert Cache(own.cache_dir).lookup(manifest.key) is None
    compiled(path, "topk", own.cache_dir)
    own.executor.load(1, manifest.key)


def test_a_core_that_has_been_taken_away_stops_no_run(tmp_path: Path) -> None:
    path = wide(8).save(tmp_path / "model.onnx")
    team = Team(path, 2)
    team.pin((available_cores()[0], 1 << 20))  # no machine has it
    assert team.session.get_outputs()
