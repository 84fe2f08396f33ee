"""Models with batch kernels: rows of several requests side by side, and rows of one request in several leases.

In one model batch kernels read the requests' input and write an output, in the other layers of one row lie between.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from gangway.artifact.format import Manifest, plan_staging
from gangway.executor.launch import available_cores
from gangway.executor.leases import LeaseSpec, Member
from gangway.executor.messages import LeftReason
from gangway.executor.slots import SlotRequest, SlotStatus
from gangway.measure.model_runner import LocalExecutor
from tests.conftest import CompileKept
from tests.executor.test_dense_batches import save_network
from tests.helpers import onnx_text
from tests.helpers.onnx_networks import Array

ROWS = 13
PLACE_BYTES = 1 << 17
RANKS = len(available_cores()[:2])


class Runner:
    """Runs requests of the model, each with a place of its own in the io segment."""

    def __init__(self, executor: LocalExecutor, manifest: Manifest) -> None:
        self.executor = executor
        self.manifest = manifest
        self.stride = manifest.arena_bytes + plan_staging(manifest).size_bytes
        executor.load(1, manifest.key)

    def begin(self, number: int, x: Array, parts: int = 1) -> tuple[Member, tuple[int, ...]]:
        """Start a request; return it as one member, and where its outputs lie."""
        at, places = (1 + number) * PLACE_BYTES, []
        for tensor in (*self.manifest.inputs, *self.manifest.outputs):
            places.append(at)
            at += -(-tensor.row_bytes * len(x) // 64) * 64
        self.executor.io.view[places[0] : places[0] + x.nbytes] = x.tobytes()
        request = SlotRequest(1, len(x), tuple(places[:1]), tuple(places[1:]))
        return Member(0, *self.executor.begin(request, parts), rows=len(x)), request.output_offsets

    def run(self, members: Sequence[Member]) -> None:
        """Run one lease to its end."""
        workers = range(RANKS)
        spec = LeaseSpec(1, tuple(members), 0, self.stride, 0, len(self.manifest.layers), wanted=RANKS)
        self.executor.start(0, spec, workers)
        assert {left.reason for left in self.executor.left(workers)} == {LeftReason.DONE}

    def end(self, member: Member, rows: int, places: Sequence[int]) -> list[Array]:
        """Return the outputs of a request that is answered."""
        assert self.executor.slots.outcome(member.slot).status is SlotStatus.OK
        self.executor.slots.release(member.slot)
        return [
            np.frombuffer(bytes(self.executor.io.view[at : at + rows * tensor.row_bytes]), np.float32).reshape(rows, -1)
            for tensor, at in zip(self.manifest.outputs, places, strict=True)
        ]

    def together(self, requests: Sequence[Array]) -> list[Array]:
        """Return the outputs of requests that are executed as one lease, one below the other."""
        begun = [self.begin(number, x) for number, x in enumerate(requests)]
        self.run([member for member, _ in begun])
        ends = [self.end(member, len(x), places) for (member, places), x in zip(begun, requests, strict=True)]
        return [np.concatenate(rows) for rows in zip(*ends, strict=True)]


# Dense -> dense with a residual; both results are outputs, and vectors have whole registers.
DENSE = """(float[N, 3, 10, 8] x) => (float[N, 320] y, float[N, 320] z) {
    flat = Flatten(x)
    a = Gemm(flat, w, wb)
    y = Relu(a)
    b = Gemm(y, v, vb)
    z = Add(b, y)
}"""
WEIGHTS = {"w": (240, 320), "v": (320, 320), "wb": (320,), "vb": (320,)}


def save_dense(path: Path) -> Path:
    return onnx_text.write(path, DENSE, **onnx_text.weights_of(7, WEIGHTS))


@pytest.fixture(scope="module", params=[save_network, save_dense])
def runner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, compile_kept: CompileKept
) -> Iterator[Runner]:
    folder = tmp_path_factory.mktemp("network")
    network = request.param(folder / "model.onnx")
    (folder / "cache").mkdir()
    compiled = compile_kept(network, "dense", folder / "cache")
    with LocalExecutor(folder / "cache", available_cores()[:2]) as executor:
        yield Runner(executor, compiled.manifest)


@pytest.fixture
def rows() -> Array:
    return np.random.default_rng(3).standard_normal((ROWS, 3, 10, 8), np.float32)


def test_only_what_batch_kernels_use_is_staged(tmp_path: Path, compile_kept: CompileKept) -> None:
    for save, staged in ((save_network, (0, 0)), (save_dense, (1, 1))):
        compiled = compile_kept(save(tmp_path / "model.onnx"), "dense", tmp_path)
        staging = plan_staging(compiled.manifest)
        assert (len(staging.inputs), len(staging.outputs)) == staged


@pytest.mark.parametrize("sizes", [(1, 3, 2, 7), (1,) * ROWS, (12, 1)], ids=str)
def test_joined_requests_are_computed_as_one_of_as_many_rows(
    runner: Runner, rows: Array, sizes: tuple[int, ...]
) -> None:
    expected = runner.together([rows])
    ends = np.cumsum(sizes)
    requests = [rows[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    for got, wanted in zip(runner.together(requests), expected, strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_alone_and_together_are_close(runner: Runner, rows: Array) -> None:
    together = runner.together(list(rows[:, None]))
    for row in range(ROWS):
        for got, wanted in zip(runner.together([rows[row : row + 1]]), together, strict=True):
            np.testing.assert_allclose(got[0], wanted[row], rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def test_a_split_request_is_computed_as_requests_of_its_parts(runner: Runner, rows: Array) -> None:
    cuts = [(0, 5), (5, 6), (6, ROWS)]
    expected = [runner.together([rows[first:end]]) for first, end in cuts]
    whole, places = runner.begin(0, rows, parts=len(cuts))
    for part, (first, end) in enumerate(cuts):
        assert not runner.executor.slots.is_done(whole.slot)
        runner.run([whole._replace(first_row=first, rows=end - first, part=part)])
    for got, wanted in zip(runner.end(whole, ROWS, places), zip(*expected, strict=True), strict=True):
        np.testing.assert_array_equal(got, np.concatenate(wanted))


def test_parts_of_several_requests_in_one_lease(runner: Runner, rows: Array) -> None:
    """Eight rows of two requests in two leases: [one, first half of two], [second half of two]."""
    expected = runner.together([rows[:5]]), runner.together([rows[5:8]])
    (one, one_places), (two, two_places) = runner.begin(0, rows[:3]), runner.begin(1, rows[3:8], parts=2)
    runner.run([two._replace(first_row=2, rows=3, part=1)])
    runner.run([one, two._replace(rows=2)])
    ends = runner.end(one, 3, one_places), runner.end(two, 5, two_places)
    for got, wanted in zip(zip(*ends, strict=True), zip(*expected, strict=True), strict=True):
        np.testing.assert_array_equal(np.concatenate(got), np.concatenate(wanted))
