"""Weights that onnxruntime has: one copy for all workers, and for sessions of any number of threads."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from gangway.artifact.cache import Cache
from gangway.artifact.format import Engine, Manifest
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import TARGETS, detect
from gangway.executor.launch import available_cores
from gangway.executor.leases import LeaseSpec, Member
from gangway.executor.slots import SlotStatus
from gangway.measure.model_runner import LocalExecutor
from testing.frame_requests import read_answer, write_request
from tests.helpers.island_networks import save
from tests.helpers.onnx_networks import FOREIGN, Array, Foreign

HEAP = 1 << 16
WAIT_US = 20_000_000
WEIGHTS_BYTES = 8 << 20  # at least, of each model
SMALL, LARGE = 1, 2  # numbers of models
node = helper.make_node


def floats(*shape: int) -> Array:
    return (np.random.default_rng(len(shape)).standard_normal(shape) / 30).astype(np.float32)


NETWORKS: dict[str, Callable[[], Foreign]] = {
    "packed by kernels": lambda: Foreign(
        [node("MatMul", ["x", "v"], ["h"]), node("MatMul", ["h", "w"], ["y"])],
        {"x": ("float32", ["N", 512])},
        {"y": ("float32", ["N", 512])},
        {"v": floats(512, 2048), "w": floats(2048, 512)},
    ),
    "packed integers": lambda: Foreign(
        [
            node("DynamicQuantizeLinear", ["x"], ["q", "scale", "zero"]),
            node("MatMulInteger", ["q", "w", "zero"], ["sums"]),
            node("Cast", ["sums"], ["numbers"], to=1),
            node("Mul", ["numbers", "scale"], ["y"]),
        ],
        {"x": ("float32", ["N", 2048])},
        {"y": ("float32", ["N", 4096])},
        {"w": (900 * floats(2048, 4096)).astype(np.int8)},
    ),
    "blocked for registers": lambda: Foreign(
        [node("Conv", ["x", "v"], ["h"], pads=[1] * 4), node("Conv", ["h", "w"], ["y"], pads=[1] * 4)],
        {"x": ("float32", ["N", 256, 4, 4])},
        {"y": ("float32", ["N", 256, 4, 4])},
        {"v": floats(512, 256, 3, 3), "w": floats(256, 512, 3, 3)},
    ),
    "as they are": lambda: Foreign(
        [node("Gather", ["table", "x"], ["y"])],
        {"x": ("int64", ["N", 3])},
        {"y": ("float32", ["N", 3, 32])},
        {"table": floats(1 << 16, 32)},
        limit=1 << 16,
    ),
}


class Pair:
    """Two workers, in which onnxruntime is already; models are compiled into their cache."""

    def __init__(self, executor: LocalExecutor, folder: Path) -> None:
        self.executor, self.folder = executor, folder
        self.executor.load(SMALL, self.compile(FOREIGN["topk"](), "small").key)

    def compile(self, network: Foreign, name: str) -> Manifest:
        path = network.save(self.folder / name / "model.onnx")
        return compile_model(path, name, Cache(self.folder / "cache"), detect(), lambda *_: None).manifest

    def private_bytes(self) -> list[int]:
        """Return how much memory each worker has alone."""
        fields = [Path(f"/proc/{worker.pid}/smaps_rollup").read_text().split() for worker in self.executor.workers]
        return [1024 * sum(int(texts[texts.index(name) + 1]) for name in ("Private_Clean:", "Private_Dirty:"))
                for texts in fields]  # fmt: skip

    def answer(self, manifest: Manifest, network: Foreign, ranks: list[int]) -> bytes:
        arrays = [network.feeds(2)[tensor.name] for tensor in manifest.inputs]
        tensors = [(array.shape, array.tobytes()) for array in arrays]
        request = write_request(self.executor.io, HEAP, LARGE, 2, tensors, 1 << 20)
        slot, generation = self.executor.begin(request)
        spec = LeaseSpec(LARGE, (Member(0, slot, generation, rows=2),), 0, 0, 0, 1, wanted=len(ranks))
        self.executor.start(0, spec, ranks)
        assert self.executor.slots.wait(slot, WAIT_US)
        assert self.executor.slots.outcome(slot).status is SlotStatus.OK
        self.executor.slots.release(slot)
        self.executor.left(ranks)
        return read_answer(self.executor.io, request)[0][1]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder, cores = tmp_path_factory.mktemp("pair"), available_cores()
    with LocalExecutor(folder / "cache", [cores[0], cores[-1]]) as executor:
        yield Pair(executor, folder)


@pytest.mark.parametrize("kind", NETWORKS)
def test_no_session_has_a_copy(pair: Pair, kind: str) -> None:
    network = NETWORKS[kind]()
    manifest = pair.compile(network, kind)
    assert manifest.engine is Engine.ONNXRUNTIME
    assert manifest.weights_bytes >= WEIGHTS_BYTES
    assert manifest.session_bytes < WEIGHTS_BYTES / 4
    expected = onnxruntime.InferenceSession(pair.folder / kind / "model.onnx").run(None, network.feeds(2))[0]
    before = pair.private_bytes()
    pair.executor.load(LARGE, manifest.key)
    for ranks in ([0], [1], [0, 1]):
        answer = np.frombuffer(pair.answer(manifest, network, ranks), np.float32)
        np.testing.assert_allclose(answer, expected.ravel(), rtol=1e-4, atol=1e-4)
    grown = [after - earlier for earlier, after in zip(before, pair.private_bytes(), strict=True)]
    assert max(grown) < WEIGHTS_BYTES / 2, "less than one copy, though worker 0 has sessions of one and of two threads"
    pair.executor.unload(LARGE)
    assert not any(manifest.key in Path(f"/proc/{worker.pid}/maps").read_text() for worker in pair.executor.workers)


def test_islands_have_no_copy_either(pair: Pair) -> None:
    nodes = [
        node("ReverseSequence", ["table", "lengths"], ["turned"], time_axis=1, batch_axis=0),
        node("MatMul", ["turned", "m"], ["y"]),
    ]
    constants = {"table": floats(256, 8192), "m": floats(8192, 8)}
    path = save(
        pair.folder / "island" / "model.onnx", nodes, {"lengths": (TensorProto.INT64, [256])}, ["y"], **constants
    )
    manifest = compile_model(path, "island", Cache(pair.folder / "cache"), detect(), lambda *_: None).manifest
    assert [layer.operator for layer in manifest.islands] == ["ReverseSequence"]
    assert manifest.session_bytes < WEIGHTS_BYTES / 4
    before = pair.private_bytes()
    pair.executor.load(LARGE, manifest.key)
    grown = [after - earlier for earlier, after in zip(before, pair.private_bytes(), strict=True)]
    assert max(grown) < WEIGHTS_BYTES / 2
    pair.executor.unload(LARGE)


def test_a_worker_in_place_of_a_killed_one_shares_them(pair: Pair) -> None:
    network = NETWORKS["packed by kernels"]()
    manifest = pair.compile(network, "killed")
    pair.executor.load(LARGE, manifest.key)
    answers = {pair.answer(manifest, network, [rank]) for rank in (0, 1)}
    pair.executor.workers[1].kill()
    pair.executor.restart(1)
    pair.executor.load(SMALL, pair.compile(FOREIGN["topk"](), "small").key, [1])
    before = pair.private_bytes()
    pair.executor.load(LARGE, manifest.key, [1])
    assert answers == {pair.answer(manifest, network, [1])}
    assert pair.private_bytes()[1] - before[1] < WEIGHTS_BYTES / 2
    pair.executor.unload(LARGE)


def test_missing_weights_are_an_error_and_compiled_again(pair: Pair) -> None:
    network = NETWORKS["as they are"]()
    manifest = pair.compile(network, "missing")
    (weights,) = (pair.folder / "cache" / manifest.key / "onnx").glob("*.data")
    content = weights.read_bytes()
    weights.unlink()
    with pytest.raises(RuntimeError, match=r"worker 0: .*No such file"):
        pair.executor.load(LARGE, manifest.key, [0])
    for damaged in (content[:-1], bytes(len(content))):
        weights.write_bytes(damaged)
        assert pair.compile(network, "missing").files == manifest.files
        assert weights.read_bytes() == content


@pytest.mark.skipif("avx512" not in {detect().name}, reason="a machine without AVX-512 has no other layout")
def test_layouts_of_wide_registers_are_saved_for_machines_that_have_them(tmp_path: Path) -> None:
    network = NETWORKS["blocked for registers"]()
    path, cache = network.save(tmp_path / "model.onnx"), Cache(tmp_path / "cache")
    files = {
        name: set(compile_model(path, "conv", cache, TARGETS[name], lambda *_: None).manifest.files)
        for name in ("avx512", "avx2")
    }
    assert files == {
        "avx512": {"onnx/optimised.onnx", "onnx/optimised.onnx.data"},
        "avx2": {"onnx/model.onnx", "onnx/model.onnx.data"},
    }


def test_a_model_that_onnxruntime_writes_wrongly_is_kept_as_it_is(tmp_path: Path) -> None:
    """Of equal constants that are inputs, too, it keeps one, but all inputs."""
    network = NETWORKS["as they are"]()
    for name, given, output in (("first", "y", "a"), ("second", "a", "b")):
        network.nodes.append(node("ConstantOfShape", [name], [f"{name}_zeros"]))
        network.nodes.append(node("Add", [given, f"{name}_zeros"], [output]))
        network.constants[name] = np.array([3, 32])
    network.outputs["b"] = network.outputs["y"]
    path = network.save(tmp_path / "model.onnx")
    model = onnx.load(path)
    model.ir_version = 3
    for name in ("first", "second"):
        model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.INT64, [2]))
    onnx.save(model, path)
    manifest = compile_model(path, "old", Cache(tmp_path / "cache"), detect(), lambda *_: None).manifest
    assert set(manifest.files) == {"onnx/model.onnx"}
    assert manifest.session_bytes > WEIGHTS_BYTES * 0.9, "a copy of its own"
