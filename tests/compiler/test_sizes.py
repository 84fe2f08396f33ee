"""One model compiled for several sizes: kernels and weights are shared, and answers are onnxruntime's."""

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import helper

from gangway.artifact.cache import Cache
from gangway.artifact.reader import ArtifactError, verify
from gangway.compiler.arguments import CompileOptions
from gangway.compiler.pipeline import CompileResult, compile_model
from gangway.compiler.target import detect
from tests.compiler.conftest import Array, Network, Runner

pytestmark = pytest.mark.long

TIMEOUT_S = 60
node = helper.make_node


def network() -> Network:
    """Convolutions, a softmax along the open axis, a product over it, and means."""
    random = np.random.default_rng(0)
    weights = {
        "w": random.standard_normal((16, 3, 3, 3)) / 8,
        "d": random.standard_normal((16, 1, 3, 3)) / 8,
        "p": random.standard_normal((20, 16, 1, 1)) / 4,
        "k": random.standard_normal((20, 1, 1)),
    }
    nodes = [
        node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1]),
        node("Relu", ["c"], ["r"]),
        node("Conv", ["r", "d"], ["e"], pads=[1, 1, 1, 1], group=16),
        node("Conv", ["e", "p"], ["f"]),
        node("Mul", ["f", "k"], ["g"]),
        node("GlobalAveragePool", ["g"], ["mean"]),
        node("Softmax", ["g"], ["s"], axis=-1),
        node("Transpose", ["s"], ["t"], perm=[0, 1, 3, 2]),
        node("MatMul", ["g", "t"], ["product"]),
        node("ReduceMean", ["s"], ["m"], axes=[1], keepdims=1),
        node("Mul", ["m", "m"], ["square"]),
    ]
    outputs: dict[str, Any] = {"mean": None, "product": None, "square": None}
    constants = {name: value.astype(np.float32) for name, value in weights.items()}
    return Network(nodes, {"x": ["N", 3, 6, "W"]}, outputs, constants)


@dataclass
class Model:
    """The network in a cache of its own; `compiled`: how many kernels each compilation had to compile."""

    path: Path
    cache: Cache
    compiled: list[int] = field(default_factory=list)

    def compile(self, width: int) -> CompileResult:
        totals = [0]

        def progress(phase: str, done: int, total: int) -> None:
            totals.extend([total] * (phase == "kernels" and done == total))

        found = compile_model(self.path, "sized", self.cache, detect(), progress, CompileOptions({"W": width}))
        self.compiled.append(totals[-1])
        return found

    def check(self, folder: Path, width: int) -> None:
        x: Array = np.random.default_rng(width).standard_normal((1, 3, 6, width)).astype(np.float32)
        session = onnxruntime.InferenceSession(self.path, providers=["CPUExecutionProvider"])
        answers = Runner(folder)({"x": x})
        for name, expected in zip(answers, session.run(list(answers), {"x": x}), strict=True):
            np.testing.assert_allclose(answers[name], expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("sized")
    return Model(network().save(folder / "model.onnx"), Cache(folder / "cache"))


def test_a_further_size_needs_few_kernels_and_no_weights(model: Model) -> None:
    sizes = (40, 44, 41, 87, 63)
    found = [model.compile(width) for width in sizes]
    first, *others = model.compiled
    assert first >= 8 and sum(others) <= first // 2, model.compiled
    for width, compiled in zip(sizes, found, strict=True):
        model.check(compiled.folder, width)
    assert len({(item.folder / "weights.bin").stat().st_ino for item in found}) == 1
    assert all(verify(item.folder).key == item.manifest.key for item in found)


def test_a_size_that_needs_new_kernels_links_these_only(model: Model) -> None:
    first = model.compile(40).folder
    small = model.compile(9)
    assert model.compiled[-1] >= 3
    model.check(small.folder, 9)
    libraries = {path.name: path.stat() for path in small.folder.glob("*.so")}
    assert len(libraries) >= 2 and first.joinpath("kernels.so").stat().st_ino in {
        status.st_ino for status in libraries.values()
    }
    assert set(libraries) <= set(small.manifest.files)
    next(path for path in small.folder.glob("kernels_*.so")).unlink()
    with pytest.raises(ArtifactError, match="No such file"):
        verify(small.folder)


def test_the_same_size_again_compiles_no_kernel(model: Model) -> None:
    folder = model.compile(40).folder
    folder.rename(folder.with_name("away"))
    compiled = model.compile(40)
    assert not compiled.cached and model.compiled[-1] == 0
    model.check(compiled.folder, 40)


def test_damaged_objects_are_compiled_again(model: Model) -> None:
    model.compile(40)
    objects = list((model.cache.root / "kernels").glob("*/*.o"))
    for path in objects:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.unlink()  # artifacts and libraries may be links to it
        path.write_bytes(content)
    compiled = model.compile(42)
    assert model.compiled[-1] >= 8
    model.check(compiled.folder, 42)


def test_damaged_weights_are_written_again(model: Model) -> None:
    old = model.compile(44).folder
    with (old / "weights.bin").open("r+b") as file:
        file.write(b"damage")
    compiled = model.compile(45)
    model.check(compiled.folder, 45)
    with pytest.raises(ArtifactError, match="checksum"):
        verify(old)


def test_a_cache_that_keeps_no_kernels_is_no_error(model: Model, tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("no folder")
    other = Model(model.path, Cache(tmp_path))
    other.check(other.compile(40).folder, 40)


def test_sizes_that_are_compiled_at_once(model: Model, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gangway.compiler", str(model.path), "--cache-dir", str(tmp_path)]
    started = [subprocess.Popen([*command, f"--dimension=W={width}"]) for width in (40, 41)]
    assert [process.wait(TIMEOUT_S) for process in started] == [0, 0]
    other = Model(model.path, Cache(tmp_path))
    for width in (40, 41):
        compiled = other.compile(width)
        assert compiled.cached
        other.check(compiled.folder, width)
