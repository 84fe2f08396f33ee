"""Small networks, compiled and run in the test's own process by a slow stand-in for the executor."""

import ctypes
import itertools
import mmap
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from gangway.artifact.cache import Cache
from gangway.artifact.datatypes import DTYPES
from gangway.artifact.format import Engine, Manifest, MemorySpace, TensorSpec
from gangway.artifact.reader import verify
from gangway.artifact.trim import KERNELS_FOLDER
from gangway.compiler.arguments import CompileOptions
from gangway.compiler.key import compiler_version
from gangway.compiler.pipeline import CompileResult, compile_model
from gangway.compiler.target import detect
from gangway.executor.frames import read_frame
from gangway.executor.island import Island, Tail
from gangway.python_backend.elements import split_texts
from tests.conftest import kept_folder
from tests.helpers.onnx_models import make_model, value_info

Array = npt.NDArray[Any]
GUARD_BYTES = 4096
GUARD = 0xA5


class Region:
    """Memory between two guards that no kernel may touch; `misalignment_bytes` moves it off its natural alignment."""

    def __init__(self, size_bytes: int, fill: int, misalignment_bytes: int = 0) -> None:
        self._whole = np.full(size_bytes + 2 * GUARD_BYTES + 128, GUARD, np.uint8)
        skip = -self._whole.ctypes.data % 64 + misalignment_bytes
        self.bytes = self._whole[GUARD_BYTES + skip : GUARD_BYTES + skip + size_bytes]
        self._outside = [self._whole[: GUARD_BYTES + skip], self._whole[GUARD_BYTES + skip + size_bytes :]]
        self.bytes[:] = fill

    @property
    def address(self) -> int:
        return self.bytes.ctypes.data

    def check(self, what: str) -> None:
        assert all((part == GUARD).all() for part in self._outside), f"a kernel wrote outside of {what}"


class Runner:
    """An artifact, its weights and one arena that is kept from run to run, as the executor keeps it."""

    def __init__(self, folder: Path) -> None:
        self.manifest: Manifest = verify(folder)
        assert self.manifest.engine is Engine.NATIVE, self.manifest.fallback_reason
        self._library = ctypes.CDLL(str(folder / "kernels.so"))
        whole = self.manifest.islands[:-1] if self.manifest.tail else self.manifest.islands
        self._islands = {layer.name: Island(folder / layer.onnx_file, "test", 1) for layer in whole}
        last = self.manifest.layers[-1].onnx_file
        self._tail = Tail(folder / last, self.manifest, 1) if self.manifest.tail else None
        with (folder / "weights.bin").open("rb") as file:
            self._weights = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
        self._arena = Region(self.manifest.arena_bytes, fill=0)
        self.refusals: list[str] = []  # of the last run

    def __call__(self, inputs: dict[str, Array], seed: int = 0) -> dict[str, Array]:
        """Run one row: tasks of each layer in random order, in chunks of random size."""
        random = np.random.default_rng(seed)
        self.refusals = []
        ins = [Region(spec.row_bytes, 0, misalignment_bytes=8) for spec in self.manifest.inputs]
        outs = [Region(spec.row_bytes, 0xFF, misalignment_bytes=8) for spec in self.manifest.outputs]
        for region, spec in zip(ins, self.manifest.inputs, strict=True):
            region.bytes[:] = np.frombuffer(np.ascontiguousarray(inputs[spec.name]).tobytes(), np.uint8)
        bases = {
            MemorySpace.WEIGHTS: [self._weights.ctypes.data],
            MemorySpace.ARENA: [self._arena.address],
            MemorySpace.INPUT: [region.address for region in ins],
            MemorySpace.OUTPUT: [region.address for region in outs],
        }
        for layer in self.manifest.layers:
            places = [bases[a.space][a.index] + a.offset_bytes for a in layer.arguments]
            if self._tail and layer is self.manifest.layers[-1]:
                return self._answer(self._tail, tuple(places))
            if layer.onnx_file:
                failure = self._islands[layer.name](tuple(places), (0,))
                self.refusals += [failure[1]] if failure else []
                continue
            kernel = self._library[layer.versions[0].symbol]
            pointers = [ctypes.c_void_p(place) for place in places]
            refused = np.zeros(2, np.int64)
            if layer.checks:
                pointers.append(ctypes.c_void_p(refused.ctypes.data))
            for begin, end in chunks(layer.versions[0].tasks, random):
                kernel(*pointers, ctypes.c_int32(begin), ctypes.c_int32(end))
            if refused[0]:
                self.refusals.append(layer.checks[refused[0] - 1].replace("{}", str(refused[1]), 1))
        for region in (*ins, *outs):
            region.check("inputs or outputs")
        self._arena.check("the arena")
        return {spec.name: _array(spec, region) for spec, region in zip(self.manifest.outputs, outs, strict=True)}

    def _answer(self, tail: Tail, places: tuple[int, ...]) -> dict[str, Array]:
        frame = memoryview(bytearray(1 << 20))
        failure = tail([places], frame, (0,))
        self.refusals += [failure[1]] if failure else []
        parts = () if failure else read_frame(frame).parts
        answers = {}
        for spec, part in zip(self.manifest.outputs, parts, strict=not failure):
            content = frame[part.offset : part.offset + part.size_bytes]
            if spec.datatype == "BYTES":
                values = np.array(split_texts(content, int(np.prod(part.shape))), object)
            else:
                values = np.frombuffer(content, DTYPES[spec.datatype])
            answers[spec.name] = values.reshape(part.shape)
        return answers


def chunks(tasks: int, random: np.random.Generator) -> list[tuple[int, int]]:
    """Cut [0, tasks) at random places, in random order."""
    inner = range(1, tasks)
    cuts = sorted(random.choice(inner, size=min(len(inner), 5), replace=False).tolist()) if tasks > 1 else []
    edges = [0, *cuts, tasks]
    parts = list(itertools.pairwise(edges))
    return [parts[index] for index in random.permutation(len(parts))]


def _array(spec: TensorSpec, region: Region) -> Array:
    shape = tuple(1 if n == -1 else n for n in spec.shape)
    return np.frombuffer(region.bytes.tobytes(), DTYPES[spec.datatype]).reshape(shape)


@pytest.fixture(scope="session")
def load_artifact() -> Callable[[Path], Runner]:
    """Return the function that makes a runnable model of an artifact's folder."""
    return Runner


@dataclass(frozen=True)
class Network:
    """A small ONNX model under test."""

    nodes: list[Any]
    inputs: dict[str, list[int | str]]
    outputs: dict[str, list[int | str] | None]
    constants: dict[str, Array] = field(default_factory=dict)
    datatype: int = TensorProto.FLOAT
    output_datatype: int | None = None  # if it differs
    opset: int = 17
    ir_version: int = 8

    def save(self, path: Path, **options: Any) -> Path:
        """Write the model, unchecked: tests also want wrong ones."""
        result = self.datatype if self.output_datatype is None else self.output_datatype
        kinds = (
            {name: (kind, dims) for name, dims in side.items()}
            for kind, side in ((self.datatype, self.inputs), (result, self.outputs))
        )
        domains = {item.domain: 1 for item in self.nodes if item.domain}
        model = make_model(
            self.nodes, *kinds, constants=self.constants, opset=self.opset, ir_version=self.ir_version, domains=domains
        )
        onnx.save(model, path, **options)
        return path


def compile_into(
    folder: Path, path: Path, target: str | None = None, dimensions: dict[str, int] | None = None
) -> CompileResult:
    """Compile an ONNX file into the cache of a folder."""
    cache = Cache(folder / "cache")
    options = CompileOptions(dimensions or {})
    return compile_model(path, "test", cache, detect(target), lambda phase, done, total: None, options)


@pytest.fixture(scope="session")
def kernels(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of kernels that caches of tests share, as models share that of one cache."""
    return kept_folder(pytestconfig, tmp_path_factory, "kernels", compiler_version())


@pytest.fixture
def compile_file(tmp_path: Path, kernels: Path) -> Callable[..., CompileResult]:
    """Return the function that compiles an ONNX file into this test's own cache, in which only kernels are shared."""
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o755)
    (cache / KERNELS_FOLDER).symlink_to(kernels)
    return partial(compile_into, tmp_path)


def _poison(value: Array) -> Array:
    if value.dtype != np.float32:
        return value
    return np.where(np.arange(value.size).reshape(value.shape) % 2, np.float32(np.nan), np.float32(np.inf))


@pytest.fixture
def check(tmp_path: Path, compile_file: Callable[..., CompileResult]) -> Callable[..., list[str]]:
    """Return the function that compares a network, compiled, with onnxruntime; it returns the layers' operators."""

    def check(network: Network, target: str | None = None) -> list[str]:
        path = network.save(tmp_path / "model.onnx")
        runner = Runner(compile_file(path, target).folder)
        session = onnxruntime.InferenceSession(str(path))
        random = np.random.default_rng(11)
        for seed in range(2):
            feeds = {}
            for name, dims in network.inputs.items():
                shape = [1 if isinstance(n, str) else n for n in dims]
                feeds[name] = (random.standard_normal(shape) * 4).astype(
                    helper.tensor_dtype_to_np_dtype(network.datatype)
                )
            # A query whose numbers are all infinite or NaN must leave nothing behind for the next one.
            runner({name: _poison(value) for name, value in feeds.items()})
            answers = runner(feeds, seed)
            for spec, expected in zip(session.get_outputs(), session.run(None, feeds), strict=True):
                np.testing.assert_allclose(answers[spec.name], expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())
        return [layer.operator for layer in runner.manifest.layers]

    return check


@pytest.fixture(scope="session")
def network() -> type[Network]:
    """Return the class that describes a small ONNX model."""
    return Network


@pytest.fixture
def same(tmp_path: Path, compile_file: Any, load_artifact: Any) -> Callable[..., list[str]]:
    """Return the function that compares a model of these nodes, all of whose unread results are outputs."""

    def same(
        nodes: list[Any],
        feeds: dict[str, Array],
        constants: dict[str, Array] | None = None,
        tolerance: float = 2e-6,
        opset: int = 20,
    ) -> list[str]:
        read = {name for item in nodes for name in item.input}
        outputs = [name for item in nodes for name in item.output if name not in read]
        model = make_model(nodes, feeds, dict.fromkeys(outputs, ...), constants, opset, ir_version=10)
        with np.errstate(all="ignore"):
            found: Any = ReferenceEvaluator(model).run(None, feeds)
        wanted = [np.asarray(value) for value in found]
        for output, value in zip(model.graph.output, wanted, strict=True):
            output.CopyFrom(value_info(output.name, value))
        path = tmp_path / "model.onnx"
        onnx.save(model, path)
        compiled = compile_file(path)
        assert not compiled.manifest.fallback_reason
        answers = load_artifact(compiled.folder)(feeds)
        for name, expected in zip(outputs, wanted, strict=True):
            got = answers[name]
            assert (got.dtype, got.shape) == (expected.dtype, expected.shape), name
            exact = {"rtol": tolerance, "atol": tolerance} if expected.dtype.kind == "f" else {"rtol": 0, "atol": 0}
            loose = {"rtol": 5e-3, "atol": 5e-3} if expected.dtype == np.float16 else exact
            np.testing.assert_allclose(got.astype("f8"), expected.astype("f8"), err_msg=name, **loose)
        return [layer.operator for layer in compiled.manifest.layers]

    return same
