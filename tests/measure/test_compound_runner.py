"""Compound tasks on real workers: numbers against onnxruntime, by any schedule, and schedules that are none."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import onnxruntime
import pytest

from gangway.executor.launch import available_cores
from gangway.measure.compound_runner import CompoundRunner, CompoundTimes
from gangway.scheduler.profiles import ModelProfile
from gangway.scheduler.stages.ir import Schedule, StreamSegment, parallel, schedule, sequential
from tests.conftest import CompileKept
from tests.helpers import onnx_text

LAYERS = (2, 5, 3)  # of the models


@dataclass(frozen=True)
class Running:
    """The runner of three models, and what onnxruntime answers to their inputs."""

    runner: CompoundRunner
    streams: tuple[ModelProfile, ...]
    expected: tuple[np.ndarray, ...]

    def answers(self) -> list[np.ndarray]:
        """What lies in the outputs now; they are zeros from then on."""
        found = []
        for (_, (offset,)), expected in zip(self.runner.places, self.expected, strict=True):
            view = self.runner.io.view[offset : offset + expected.nbytes]
            found.append(np.frombuffer(bytes(view), np.float32).reshape(expected.shape))
            view[:] = bytes(expected.nbytes)
        return found

    def check(self) -> None:
        """Compare the answers with onnxruntime's."""
        for found, expected in zip(self.answers(), self.expected, strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5 * np.abs(expected).max())


def write_model(path: Path, count: int, channels: int) -> Path:
    """A chain of convolutions of 3 x 3, each with a Relu, on images of 20 x 20."""
    nodes = onnx_text.convolutions(count)
    graph = f"(float[N, 3, 20, 20] x) => (float[N, {channels}, 20, 20] t) {{ {nodes} }}"
    shapes = {f"w{number}": (channels, channels if number else 3, 3, 3) for number in range(count)}
    return onnx_text.write(path, graph, **onnx_text.weights_of(channels, shapes, 1 / 8))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, compile_kept: CompileKept) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("compound")
    cache = folder / "cache"
    cache.mkdir(mode=0o755)
    paths = [write_model(folder / f"m{index}.onnx", count, 8 * (index + 1)) for index, count in enumerate(LAYERS)]
    manifests = [compile_kept(path, path.stem, cache).manifest for path in paths]
    with CompoundRunner(cache, manifests, available_cores()[:2]) as runner:
        expected = []
        for path, ((offset,), _) in zip(paths, runner.places, strict=True):
            x = np.frombuffer(runner.io.view, np.float32, 3 * 20 * 20, offset).reshape(1, 3, 20, 20).copy()
            (y,) = onnxruntime.InferenceSession(str(path)).run(None, {"x": x})
            expected.append(y)
        yield Running(runner, runner.streams(), tuple(expected))


def test_models_alone_are_measured_by_layer(running: Running) -> None:
    assert [stream.layers for stream in running.streams] == [len(each.layers) for each in running.runner.manifests]
    for stream in running.streams:
        assert stream.layers > 1 and stream.cores == len(running.runner.workers)
        assert min(min(times[0]) for times in stream.latency_us) > 0


def test_any_pointers_give_the_numbers_of_onnxruntime(running: Running) -> None:
    cores, random = len(running.runner.workers), Random(1)
    drawn = [
        tuple(tuple(sorted(random.randint(0, stream.layers) for _ in range(3))) for stream in running.streams)
        for _ in range(12)
    ]
    running.answers()
    for pointers in (sequential(running.streams), parallel(running.streams), *drawn):
        times = running.runner.run(schedule(running.streams, pointers, cores))
        check_times(times)
        running.check()


def test_versions_and_cores_may_change_at_each_barrier(running: Running) -> None:
    cores = len(running.runner.workers)
    stages: list[tuple[StreamSegment, ...]] = []
    for number, stream in enumerate(running.streams):
        stages += [
            (StreamSegment(number, layer, layer + 1, 1 + layer % cores, (0,)),) for layer in range(stream.layers)
        ]
    times = running.runner.run(tuple(stages))
    running.check()
    assert [span.segment for span in times.spans] == [stage[0] for stage in stages]


def test_models_run_on_a_core_each(running: Running) -> None:
    running.answers()
    times = running.runner.run_freely([1, 2, 0])
    running.check()
    check_times(times)
    assert [span.segment.stream for span in times.spans] == [1, 2, 0]
    assert {span.segment.cores for span in times.spans} == {1}


def test_what_is_no_schedule_is_refused(running: Running) -> None:
    ends = [stream.layers for stream in running.streams]
    whole = tuple((StreamSegment(stream, 0, end, 1),) for stream, end in enumerate(ends))
    cores = len(running.runner.workers)
    wrong: list[Schedule] = [
        (),
        whole[:2],
        (*whole, (StreamSegment(0, 0, ends[0], 1),)),
        ((StreamSegment(0, 1, ends[0], 1),), *whole[1:]),
        ((StreamSegment(0, 0, ends[0] + 1, 1),), *whole[1:]),
        ((StreamSegment(0, 0, ends[0], cores + 1),), *whole[1:]),
        ((StreamSegment(0, 0, ends[0], 0),), *whole[1:]),
        ((StreamSegment(0, 0, ends[0], 1, (0,) * (ends[0] + 1)),), *whole[1:]),
        ((StreamSegment(0, 0, ends[0], 1, (99,) * ends[0]),), *whole[1:]),
        ((StreamSegment(3, 0, 1, 1),), *whole),
        ((), *whole),
    ]
    for stages in wrong:
        with pytest.raises(ValueError, match=r"stage|follow|has not the versions"):
            running.runner.run(stages)
    running.answers()
    running.runner.run(whole)
    running.check()


def check_times(times: CompoundTimes) -> None:
    """Spans lie within the whole, and none is before its stage."""
    assert times.total_us > 0 and times.skew_us >= 0
    assert max(span.end_us for span in times.spans) == times.total_us
    assert min(span.begin_us for span in times.spans) == 0
    assert all(span.begin_us < span.end_us for span in times.spans)
