"""What serves a model until it is compiled: the same model for clients, and never taken for the compiled one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from gangway.artifact.cache import Cache
from gangway.artifact.format import STAND_IN, Engine
from gangway.artifact.onnx_session import open_session
from gangway.artifact.precision import IN_FP32
from gangway.artifact.reader import verify
from gangway.base.files import model_stamp
from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.pipeline import CompileResult, make_stand_in
from gangway.compiler.precision import find_in_precision
from gangway.compiler.target import detect
from tests.helpers.adder_models import adder
from tests.helpers.island_networks import control_flow, ranking
from tests.helpers.onnx_networks import FOREIGN
from tests.helpers.tail_networks import classifier, detector, labels, places

Save = Callable[[Path], Path]


def parsed(graph: str) -> Save:
    def save(folder: Path) -> Path:
        model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {graph}')
        onnx.save(model, folder / "model.onnx")
        return folder / "model.onnx"

    return save


NETWORKS: dict[str, Save] = {
    "any rows": parsed("(float[N, 4] x, int64[N, 4] i) => (float[N, 4] y, int64[N, 4] z) { y = Relu(x) z = Neg(i) }"),
    "fixed": parsed("(float[2, 4] x) => (float[a, b] y) { y = Relu(x) }"),
    "undeclared": parsed("(float[N, 3, 8, 8] x) => (y) { y = GlobalAveragePool(x) }"),
    "scalar": parsed("(float[2, 4] x) => (float y) { y = ReduceMax<keepdims = 0>(x) }"),
    "islands": ranking,
    "control flow": control_flow,
    "tail": detector,
    "tail of any rows": labels,
    "classes": classifier,
    "places": places,
}


@pytest.fixture
def stand_in(tmp_path: Path, compile_file: Any) -> Callable[..., CompileResult]:
    """Return the function that makes one, in the cache of `compile_file`."""

    def make(path: Path, **options: Any) -> CompileResult:
        return make_stand_in(path, "test", Cache(tmp_path / "cache"), detect(), lambda *_: None, **options)

    return make


@pytest.mark.parametrize("name", NETWORKS)
def test_it_is_the_same_for_clients(name: str, tmp_path: Path, compile_file: Any, stand_in: Any) -> None:
    path = NETWORKS[name](tmp_path)
    before, compiled = stand_in(path).manifest, compile_file(path).manifest
    assert before.is_stand_in and before.is_compilable and before.engine is Engine.ONNXRUNTIME
    assert compiled.engine is Engine.NATIVE and compiled.is_compilable and not compiled.is_stand_in
    for side in ("inputs", "outputs", "batched"):
        assert getattr(before, side) == getattr(compiled, side), side


def test_it_is_never_found_in_place_of_the_compiled_one(tmp_path: Path, compile_file: Any, stand_in: Any) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(adder(1))
    first, second = stand_in(path), stand_in(path)
    assert (first.cached, second.cached, first.folder) == (False, True, second.folder)
    assert verify(first.folder).fallback_reason == STAND_IN
    cache = Cache(tmp_path / "cache")
    assert find_in_precision(path, "test", cache, detect(), IN_FP32) is None
    compiled = compile_file(path)
    assert not compiled.cached and compiled.manifest.key != first.manifest.key
    found = find_in_precision(path, "test", cache, detect(), IN_FP32)
    assert found is not None and found.cached and found.folder == compiled.folder
    path.write_bytes(adder(2))
    assert not stand_in(path).cached


@pytest.mark.parametrize("name", ["gather", "lstm"])
def test_what_is_not_compiled_has_none(name: str, tmp_path: Path, compile_file: Any, stand_in: Any) -> None:
    path = FOREIGN[name]().save(tmp_path / "model.onnx")
    made = stand_in(path)
    assert made.manifest.engine is Engine.ONNXRUNTIME and not made.manifest.is_stand_in
    assert compile_file(path).cached


def test_large_weights_stand_beside_the_model(tmp_path: Path, stand_in: Any) -> None:
    path = ranking(tmp_path)
    made = stand_in(path)
    assert set(made.manifest.files) == {"onnx/model.onnx", "onnx/model.onnx.data"}
    assert made.manifest.weights_bytes == 64 * 96 * 4  # and not 10 * 32, which are no mapping's worth
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)}
    wanted, answers = (open_session(each).run(None, feeds) for each in (path, made.folder / made.manifest.whole_file))
    for one, other in zip(wanted, answers, strict=True):
        np.testing.assert_array_equal(one, other)


def test_files_beside_the_model_may_change(tmp_path: Path, stand_in: Any) -> None:
    path = NETWORKS["any rows"](tmp_path)
    before = model_stamp(path)
    (tmp_path / "server.log").write_text("a line")
    assert model_stamp(path) == before and stand_in(path).manifest.is_stand_in
    (tmp_path / "model.onnx.data").write_bytes(bytes(8))
    assert model_stamp(path) != before


def test_what_cannot_be_served_is_said_at_once(tmp_path: Path, stand_in: Any) -> None:
    path = NETWORKS["fixed"](tmp_path)
    with pytest.raises(UnsupportedModelError, match="no symbolic first dimension"):
        stand_in(path, with_batch=True)
    assert not list((tmp_path / "cache").glob(".*"))
