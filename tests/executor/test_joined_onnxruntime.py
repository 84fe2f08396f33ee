"""Requests to models for onnxruntime that are computed in one run: each gets its own rows, or its own failure."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from gangway.artifact.cache import Cache
from gangway.artifact.format import ONNX_FILE
from gangway.artifact.onnx_session import run_session
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from gangway.executor import onnxruntime_program
from gangway.executor.frames import join_strings, needed_bytes, plan_frame, read_frame, write_header
from gangway.executor.launch import available_cores
from gangway.executor.leases import LeaseSpec, Member
from gangway.executor.messages import LeftReason
from gangway.executor.onnxruntime_program import OnnxRuntimeModel
from gangway.executor.slots import SlotStatus
from gangway.measure.model_runner import LocalExecutor
from gangway.python_backend.elements import split_texts
from testing.frame_requests import read_answer, write_request
from tests.helpers.onnx_networks import FOREIGN, SYMBOLIC, Array, Foreign

ANSWER_BYTES = 1 << 14
Feeds = dict[str, Array]
OpenModel = Callable[[Foreign], OnnxRuntimeModel]
STRINGS = Foreign(
    [helper.make_node("Identity", ["x"], ["y"])], {"x": ("object", ["N", 2])}, {"y": ("object", ["N", 2])}, {}
)


@pytest.fixture
def open_model(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> OpenModel:
    def open_model(network: Foreign) -> OnnxRuntimeModel:
        compiled = compile_model(
            network.save(tmp_path / "model.onnx"), "joined", Cache(tmp_path / "cache"), detect(), lambda *_: None
        )
        capfd.readouterr()  # what TVM says of operators that it does not know
        return OnnxRuntimeModel(compiled.folder, compiled.manifest)

    return open_model


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each run of onnxruntime, the rows of its first input."""
    rows: list[int] = []

    def run(session: Any, outputs: Sequence[str], feeds: Feeds, bfloat16: Collection[str]) -> list[Any]:
        rows.append(len(next(iter(feeds.values()))))
        return run_session(session, outputs, feeds, bfloat16)

    monkeypatch.setattr(onnxruntime_program, "run_session", run)
    return rows


def contents_of(array: Array) -> bytes:
    return join_strings(array.ravel().tolist()) if array.dtype == object else np.ascontiguousarray(array).tobytes()


def frames_of(feeds: Feeds, room: int = ANSWER_BYTES) -> tuple[memoryview, memoryview]:
    """Return a request's frame, and the block for its answer."""
    contents = [contents_of(array) for array in feeds.values()]
    shapes = [array.shape for array in feeds.values()]
    frame = plan_frame([(shape, len(content)) for shape, content in zip(shapes, contents, strict=True)])
    view = memoryview(bytearray(frame.size_bytes))
    write_header(view, frame)
    for part, content in zip(frame.parts, contents, strict=True):
        view[part.offset : part.offset + part.size_bytes] = content
    return view, memoryview(bytearray(room))


def answers_of(answer: memoryview) -> list[tuple[tuple[int, ...], bytes]]:
    parts = read_frame(answer).parts
    return [(part.shape, bytes(answer[part.offset : part.offset + part.size_bytes])) for part in parts]


@pytest.mark.parametrize("name", ["lstm", "attention", "topk", "einsum", "type_float16", "type_bool"])
def test_each_request_gets_its_own_rows(open_model: OpenModel, runs: list[int], name: str) -> None:
    network = FOREIGN[name]()
    model = open_model(network)
    requests = [network.feeds(rows, seed=rows) for rows in (2, 1, 5)]
    alone = [frames_of(feeds) for feeds in requests]
    assert all(model([each]) == [None] for each in alone)
    runs.clear()
    together = [frames_of(feeds) for feeds in requests]
    assert model(together) == [None] * 3
    assert runs == [8]
    for (_, one), (_, other) in zip(alone, together, strict=True):
        for (shape, content), (same_shape, same_content) in zip(answers_of(one), answers_of(other), strict=True):
            assert shape == same_shape
            if name in ("lstm", "attention", "einsum"):
                numbers = [np.frombuffer(raw, np.float32) for raw in (content, same_content)]
                np.testing.assert_allclose(*numbers, rtol=1e-5, atol=1e-6)
            else:
                assert content == same_content


def test_strings_are_joined(open_model: OpenModel, runs: list[int]) -> None:
    model = open_model(STRINGS)
    words = [np.array([["a", "longer"]], object), np.array([["", "ü"], ["x" * 300, "y"]], object)]
    frames = [frames_of({"x": array}) for array in words]
    assert model(frames) == [None, None]
    assert runs == [3]
    for (_, answer), array in zip(frames, words, strict=True):
        ((shape, content),) = answers_of(answer)
        assert (shape, split_texts(content, array.size)) == (array.shape, array.ravel().tolist())


def test_what_is_no_text_is_left_out_of_the_run(open_model: OpenModel, runs: list[int]) -> None:
    model = open_model(STRINGS)
    words = [np.array([[b"a", last]], object) for last in (b"b", b"\xff", "\u00fc".encode(), b"\xc3")]
    frames = [frames_of({"x": array}) for array in words]
    found = model(frames)
    assert (found[0], found[2], runs) == (None, None, [2])
    reasons = ["invalid start byte", "unexpected end of data"]
    assert [found[1], found[3]] == [(True, f"input 'x': element 1 is not UTF-8: {reason}") for reason in reasons]
    assert model(frames[1:2]) == [found[1]]


def test_a_wrong_request_costs_only_itself(open_model: OpenModel, capfd: pytest.CaptureFixture[str]) -> None:
    model = open_model(FOREIGN["gather"]())
    frames = [frames_of({"index": np.array([[index, 1]])}) for index in (3, 10, 9)]
    reason = "Gather: indices element out of data bounds, idx=10 must be within the inclusive range [-10,9]"
    assert model(frames) == [None, (True, reason), None]
    assert [np.frombuffer(answers_of(frames[i][1])[0][1], np.float32)[0] for i in (0, 2)] == [12, 36]
    assert not capfd.readouterr().err, "it is the client's fault, not the server's"


def test_a_frame_that_lies_costs_only_itself(open_model: OpenModel, capfd: pytest.CaptureFixture[str]) -> None:
    network = FOREIGN["topk"]()
    model = open_model(network)
    frames = [frames_of(network.feeds(2, seed)) for seed in range(3)]
    frames[1][0][0:8] = (1 << 40).to_bytes(8, "little")
    first, second, third = model(frames)
    assert (first, third) == (None, None)
    assert second and not second[0] and "a frame of" in second[1]
    lines = capfd.readouterr().err.splitlines()
    assert "joined: onnxruntime could not execute 3 requests in a batch: " in lines[0]
    assert len(lines) == 1, "for the run of all; who has sent the request that fails is told why"


def test_an_answer_without_room_is_no_failure(open_model: OpenModel, runs: list[int]) -> None:
    network = FOREIGN["lstm"]()
    model = open_model(network)
    frames = [frames_of(network.feeds(2, seed), room) for seed, room in enumerate((ANSWER_BYTES, 64, ANSWER_BYTES))]
    assert model(frames) == [None] * 3
    assert runs == [6]
    needed = needed_bytes(frames[1][1])
    assert needed == read_frame(frames[0][1]).size_bytes > 64
    assert not any(frames[1][1][8:])


def test_requests_of_other_shapes_are_computed_one_by_one(open_model: OpenModel, runs: list[int]) -> None:
    model = open_model(SYMBOLIC["running_sum"]())
    shapes = [(2, 4, 3), (1, 4, 3), (2, 5, 3)]
    requests = [{"x": np.ones(shape, np.float32), "z": np.zeros((*shape[:2], 1), np.float32)} for shape in shapes]
    for chosen, rows in ((requests[:2], [3]), (requests, [2, 1, 2])):
        frames = [frames_of(feeds) for feeds in chosen]
        runs.clear()
        assert model(frames) == [None] * len(chosen)
        assert runs == rows
        for (_, answer), feeds in zip(frames, chosen, strict=True):
            ((shape, content),) = answers_of(answer)
            assert shape == feeds["x"].shape
            expected = np.cumsum(feeds["x"], axis=1)
            np.testing.assert_array_equal(np.frombuffer(content, np.float32), expected.ravel())


def test_a_model_without_a_batch_is_never_joined(open_model: OpenModel, runs: list[int]) -> None:
    network = FOREIGN["topk_unbatched"]()
    model = open_model(network)
    assert model([frames_of(network.feeds(1, seed)) for seed in range(2)]) == [None, None]
    assert runs == [4, 4]


def test_a_worker_answers_each_slot_of_a_lease(tmp_path: Path) -> None:
    network = FOREIGN["gather"]()
    compiled = compile_model(
        network.save(tmp_path / "model.onnx"), "picker", Cache(tmp_path / "cache"), detect(), lambda *_: None
    )
    assert (tmp_path / "cache" / compiled.manifest.key / ONNX_FILE).exists()
    with LocalExecutor(tmp_path / "cache", available_cores()[:1]) as executor:
        executor.load(1, compiled.manifest.key)
        for indices, leader in (((3, 4, 5), 0), ((3, 10, 5), 0), ((10, 10, 5), 2)):
            requests, members = [], []
            for number, index in enumerate(indices):
                tensors = [((1 + number, 2), np.array([[index, 1]] * (1 + number)).tobytes())]
                requests.append(write_request(executor.io, (1 + number) << 16, 1, 1 + number, tensors, ANSWER_BYTES))
                members.append(Member(0, *executor.begin(requests[-1]), rows=1 + number))
                executor.slots.lead(members[-1].slot, members[-1].generation, number == 0)
            executor.start(0, LeaseSpec(1, tuple(members), 0, 0, 0, 1), [0])
            assert [left.reason for left in executor.left([0])] == [LeftReason.DONE]
            for request, member, index in zip(requests, members, indices, strict=True):
                outcome = executor.slots.outcome(member.slot)
                assert outcome.status is (SlotStatus.OK if index < 10 else SlotStatus.INVALID)
                if index < 10:
                    assert outcome.leads == (request is requests[leader]), "the first that does not fail"
                    ((shape, content),) = read_answer(executor.io, request)
                    assert shape == (member.rows, 2, 4)
                    assert np.frombuffer(content, np.float32)[0] == 4 * index
                executor.slots.release(member.slot)
