"""Layers that onnxruntime computes between native ones, in the workers of the real executor."""

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from gangway.artifact.cache import Cache
from gangway.artifact.format import Manifest
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from gangway.executor.frames import needed_bytes, read_frame
from gangway.executor.launch import available_cores
from gangway.executor.leases import LeaseSpec, Member
from gangway.executor.messages import LeftReason
from gangway.executor.slots import SlotOutcome, SlotRequest, SlotStatus
from gangway.measure.model_runner import LocalExecutor
from gangway.python_backend.elements import split_texts
from testing.processes import cpu_ns
from tests.helpers.island_networks import control_flow, ranking
from tests.helpers.tail_networks import labels

HEAP = 1 << 16
WAIT_US = 20_000_000
LONG_STEPS = 300_000  # half a second, so that a rank that waits for its core still meets it
BEGUN_NS = 20_000_000  # of CPU
Array = np.ndarray[Any, Any]
floats = np.random.default_rng(3).standard_normal


@dataclass(frozen=True)
class Model:
    """A compiled model under its number in the workers."""

    number: int
    manifest: Manifest
    path: Path

    def expected(self, feeds: dict[str, Array]) -> dict[str, Array]:
        session = onnxruntime.InferenceSession(str(self.path))
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, feeds), strict=True))


class Pair:
    """Two workers, and requests to them; each in memory of its own, 1 MiB from the one before."""

    def __init__(self, executor: LocalExecutor) -> None:
        self.executor = executor

    def place(self, model: Model, feeds: dict[str, Array], rows: int, index: int = 0) -> tuple[SlotRequest, Any]:
        """Write inputs; return the request and what reads its answer."""
        offset, offsets, views = HEAP + (index << 20), [], {}
        for tensor in (*model.manifest.inputs, *model.manifest.outputs):
            view = self.executor.io.view[offset : offset + tensor.row_bytes * rows]
            if tensor.name in feeds:
                view[:] = np.ascontiguousarray(feeds[tensor.name]).tobytes()
            else:
                views[tensor.name] = view
            offsets.append(offset)
            offset += -(-len(view) // 64) * 64
        count = len(model.manifest.inputs)
        request = SlotRequest(model.number, rows, tuple(offsets[:count]), tuple(offsets[count:]))
        return request, lambda: {name: np.frombuffer(bytes(view), np.float32) for name, view in views.items()}

    def begin(self, model: Model, requests: list[SlotRequest], ranks: int, **changes: Any) -> list[tuple[int, int]]:
        """Start a gang that computes the requests together; return their slots and generations."""
        started = [self.executor.begin(request) for request in requests]
        members = tuple(
            Member(0, slot, generation, rows=request.rows)
            for (slot, generation), request in zip(started, requests, strict=True)
        )
        stride = model.manifest.arena_bytes + (1 << 12)
        spec = LeaseSpec(model.number, members, 0, stride, 0, len(model.manifest.layers), wanted=ranks)
        self.executor.start(0, spec._replace(**changes), range(ranks))
        return started

    def end(self, slot: int) -> SlotOutcome:
        assert self.executor.slots.wait(slot, WAIT_US)
        outcome = self.executor.slots.outcome(slot)
        self.executor.slots.release(slot)
        return outcome

    def run(self, model: Model, feeds: dict[str, Array], ranks: int) -> tuple[SlotOutcome, dict[str, Array]]:
        request, answer = self.place(model, feeds, 1)
        ((slot, _),) = self.begin(model, [request], ranks)
        outcome = self.end(slot)
        assert [left.reason for left in self.executor.left(range(ranks))] == [LeftReason.DONE] * ranks
        return outcome, answer()


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def executor(cache_dir: Path) -> Iterator[LocalExecutor]:
    """Workers on the first and the last core, which are the same on a machine of one."""
    cores = available_cores()
    with LocalExecutor(cache_dir, [cores[0], cores[-1]]) as executor:
        yield executor


def load(executor: LocalExecutor, cache_dir: Path, path: Path, number: int) -> Model:
    compiled = compile_model(path, path.parent.name, Cache(cache_dir), detect(), lambda *_: None)
    assert not compiled.manifest.fallback_reason
    executor.load(number, compiled.manifest.key)
    return Model(number, compiled.manifest, path)


@pytest.fixture(scope="module")
def flow(executor: LocalExecutor, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(executor, cache_dir, control_flow(tmp_path_factory.mktemp("flow")), 1)


@pytest.fixture(scope="module")
def ranks(executor: LocalExecutor, cache_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(executor, cache_dir, ranking(tmp_path_factory.mktemp("ranks")), 2)


@pytest.fixture
def pair(executor: LocalExecutor) -> Pair:
    return Pair(executor)


def feeds_of(seed: int = 0, count: int = 2, length: int = 7) -> dict[str, Array]:
    x = np.random.default_rng(seed).standard_normal((128, 64)).astype("f")
    return {"x": x, "lengths": np.full(128, length), "count": np.array(count)}


def test_gangs_answer_like_onnxruntime(pair: Pair, flow: Model) -> None:
    assert {layer.operator for layer in flow.manifest.islands} == {"Loop", "ReverseSequence, If"}
    for count, (seed, size) in enumerate([(0, 1), (1, 2), (2, 2), (0, 1)]):
        feeds = feeds_of(seed, count)
        outcome, answer = pair.run(flow, feeds, size)
        assert outcome.status is SlotStatus.OK
        np.testing.assert_allclose(answer["y"], flow.expected(feeds)["y"].ravel(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2])
def test_each_row_of_each_request_has_its_own_answer(pair: Pair, ranks: Model, size: int) -> None:
    requests = [{"x": floats((rows, 64)).astype("f")} for rows in (1, 3, 2)]
    placed = [pair.place(ranks, feeds, len(feeds["x"]), index) for index, feeds in enumerate(requests)]
    slots = pair.begin(ranks, [request for request, _ in placed], size)
    assert [pair.end(slot).status for slot, _ in slots] == [SlotStatus.OK] * 3
    assert [left.reason for left in pair.executor.left(range(size))] == [LeftReason.DONE] * size
    for feeds, (_, answer) in zip(requests, placed, strict=True):
        for name, expected in ranks.expected(feeds).items():
            np.testing.assert_allclose(answer()[name], expected.ravel(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", [1, 2])
def test_requests_that_are_stopped_before_their_tail(
    pair: Pair, executor: LocalExecutor, cache_dir: Path, tmp_path: Path, size: int
) -> None:
    """Rows of several requests; each has one frame. The second one has too little room."""
    model = load(executor, cache_dir, labels(tmp_path / "labels"), 3 + size)
    requests, frames = [], []
    for index, rows in enumerate((1, 3, 2)):
        x = np.random.default_rng(rows).standard_normal((rows, 3, 6, 6)).astype("f")
        begin, room = HEAP + (index << 20), 64 if index == 1 else 4096
        executor.io.view[begin : begin + x.nbytes] = x.tobytes()
        frames.append((x, executor.io.view[begin + (1 << 19) : begin + (1 << 19) + room]))
        requests.append(SlotRequest(model.number, rows, (begin,), (begin + (1 << 19),), frame_bytes=(0, room)))
    last = len(model.manifest.layers) - 1
    slots = pair.begin(model, requests, size, end_layer=last)
    assert [left.reason for left in executor.left(range(size))] == [LeftReason.STOPPED] * size
    members = tuple(
        Member(0, slot, generation, rows=request.rows)
        for (slot, generation), request in zip(slots, requests, strict=True)
    )
    stride = model.manifest.arena_bytes + (1 << 12)
    executor.start(0, LeaseSpec(model.number, members, 0, stride, last, last + 1, wanted=size), range(size))
    assert [pair.end(slot).status for slot, _ in slots] == [SlotStatus.OK] * 3
    assert [left.reason for left in executor.left(range(size))] == [LeftReason.DONE] * size
    assert needed_bytes(frames[1][1]) > 64
    for x, view in (frames[0], frames[2]):
        parts = read_frame(view).parts
        texts, scores = (view[part.offset : part.offset + part.size_bytes] for part in parts)
        expected = model.expected({"x": x})
        assert split_texts(texts, len(x)) == expected["label"].tolist()
        found = np.frombuffer(bytes(scores), np.float32).reshape(parts[1].shape)
        np.testing.assert_allclose(found, expected["scores"], rtol=1e-4, atol=1e-5)


def test_a_failure_concerns_one_request(pair: Pair, flow: Model) -> None:
    pids = [worker.pid for worker in pair.executor.workers]
    for length, status in ((7, SlotStatus.OK), (513, SlotStatus.INVALID), (-1, SlotStatus.INVALID), (0, SlotStatus.OK)):
        outcome, answer = pair.run(flow, feeds_of(length=length), ranks=2)
        assert outcome.status is status
        if status is SlotStatus.OK:
            expected = flow.expected(feeds_of(length=length))["y"]
            np.testing.assert_allclose(answer["y"], expected.ravel(), rtol=1e-4, atol=1e-4)
        else:
            range_text = "Value must be in range [0,512]"
            assert outcome.reason == f"ReverseSequence: Invalid sequence length: {length}. {range_text}"
    assert [worker.poll() for worker in pair.executor.workers] == [None, None]
    assert [pair.executor.control.status(rank).pid for rank in range(2)] == pids


def begin_long_run(pair: Pair, flow: Model, **changes: Any) -> tuple[int, int, int]:
    """Start a gang of both workers; return slot, generation, and the rank that computes the loop, when it does."""
    request, _ = pair.place(flow, feeds_of(count=LONG_STEPS), 1)
    idle_ns = [cpu_ns(worker.pid) for worker in pair.executor.workers]
    ((slot, generation),) = pair.begin(flow, [request], 2, **changes)
    deadline = time.monotonic() + 10
    while True:
        used_ns = [cpu_ns(worker.pid) - idle for worker, idle in zip(pair.executor.workers, idle_ns, strict=True)]
        if max(used_ns) > BEGUN_NS and pair.executor.lease(0).progress().present == 0b11:
            return slot, generation, used_ns.index(max(used_ns))
        assert time.monotonic() < deadline


def test_other_ranks_sleep_without_a_limit_or_lend_their_cores(pair: Pair, flow: Model) -> None:
    slot, _, rank = begin_long_run(pair, flow, timeout_us=150_000)
    pids = [pair.executor.workers[which].pid for which in (rank, 1 - rank)]
    begin_ns = [cpu_ns(pid) for pid in pids]
    assert pair.end(slot).status is SlotStatus.OK
    assert [left.reason for left in pair.executor.left([0, 1])] == [LeftReason.DONE] * 2
    computed_ns, slept_ns = (cpu_ns(pid) - begin for pid, begin in zip(pids, begin_ns, strict=True))
    assert slept_ns < computed_ns / 2, "it has little to do before and after the loop"
    cores = (available_cores()[0], available_cores()[-1])
    threads = {
        (core, *os.sched_getaffinity(int(thread.name)))
        for core, worker in zip(cores, pair.executor.workers, strict=True)
        for thread in Path(f"/proc/{worker.pid}/task").iterdir()
        if int(thread.name) != worker.pid
    }
    assert threads & {cores, cores[::-1]}, "the island after the loop is worth two threads"


def test_a_killed_worker_costs_no_request(pair: Pair, flow: Model) -> None:
    slot, generation, rank = begin_long_run(pair, flow)
    executor = pair.executor
    executor.workers[rank].kill()
    executor.lease(0).abort()
    assert [left.reason for left in executor.left([1 - rank])] == [LeftReason.ABORTED]
    executor.restart(rank)
    executor.load(1, flow.manifest.key, [rank])
    assert executor.slots.requeue(slot, generation)
    assert executor.slots.start(slot, generation)
    _, answer = pair.place(flow, feeds_of(count=3), 1)
    member = (Member(0, slot, generation),)
    layers = len(flow.manifest.layers)
    executor.start(0, LeaseSpec(1, member, 0, flow.manifest.arena_bytes, 0, layers, wanted=2), [0, 1])
    assert pair.end(slot).status is SlotStatus.OK
    assert [left.reason for left in executor.left([0, 1])] == [LeftReason.DONE] * 2
    np.testing.assert_allclose(answer()["y"], flow.expected(feeds_of(count=3))["y"].ravel(), rtol=1e-4, atol=1e-4)


def test_a_damaged_file_is_refused_by_the_worker(pair: Pair, cache_dir: Path, tmp_path: Path) -> None:
    path = ranking(tmp_path / "damaged")
    compiled = compile_model(path, "damaged", Cache(cache_dir), detect(), lambda *_: None)
    island = compiled.folder / compiled.manifest.islands[0].onnx_file
    island.write_bytes(island.read_bytes()[:50])
    with pytest.raises(RuntimeError, match="worker 0: onnxruntime: "):
        pair.executor.load(3, compiled.manifest.key, [0])
