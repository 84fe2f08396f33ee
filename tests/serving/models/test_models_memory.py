"""Models that together need more than --models-memory-mib: those that were asked longest ago are idle."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from testing.waiting import until
from tests.conftest import CompileKept
from tests.helpers import onnx_text
from tests.helpers.served import Served, serving
from tests.helpers.ways import WAYS

SIZE = 512  # a model's weights take a MiB and a little
LIMIT_MIB = 3  # of which it takes two models
NAMES = ("a", "b", "c")
WEIGHTS = {
    name: np.random.default_rng(number).standard_normal((SIZE, SIZE)).astype(np.float32)
    for number, name in enumerate((*NAMES, "large"))
}
X = np.random.default_rng(9).standard_normal((2, SIZE)).astype(np.float32)


class Limited(Served):
    def is_right(self, name: str, way: str = "gRPC") -> bool:
        return bool(np.abs(self.over(way, name, x=X)["y"] - X @ WEIGHTS[name]).max() < 1e-3)

    def loaded(self) -> set[str]:
        """The models that are not idle."""
        index = self.client.get_model_repository_index().models
        return {model.name for model in index if (model.state, model.reason) == ("READY", "")}

    def loads(self) -> int:
        """How often a model has come back."""
        return len(self.lines("loaded for a request"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, compile_kept: CompileKept) -> Iterator[Limited]:
    repository, cache = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("cache")
    for name in NAMES:
        graph = f"(float[N, {SIZE}] x) => (float[N, {SIZE}] y) {{ y = MatMul(x, w) }}"
        path = onnx_text.save(repository, name, graph, w=WEIGHTS[name])
        compile_kept(path, name, cache)
    flags = [f"--cache-dir={cache}", f"--models-memory-mib={LIMIT_MIB}", "--model-control-mode=explicit"]
    with serving(repository, *flags, "--load-model=*", kind=Limited) as served:
        yield served


@pytest.mark.parametrize("way", WAYS)
def test_the_model_that_was_asked_longest_ago_is_idle(served: Limited, way: str) -> None:
    for name in (*NAMES, *NAMES):
        assert served.is_right(name, way)
    until(lambda: served.loaded() == {"b", "c"})
    loads = served.loads()
    assert served.is_right("b", way) and served.is_right("c", way)
    assert served.loads() == loads, "models that have room are not loaded anew"
    assert served.is_right("b", way) and served.is_right("a", way)
    until(lambda: served.loaded() == {"a", "b"})
    scrape = served.scrape()
    assert sum(scrape("gangway_weights_bytes", model=name) for name in NAMES) <= LIMIT_MIB << 20
    assert [scrape("gangway_model_idle", model=name) for name in NAMES] == [0, 0, 1]


def test_clients_that_take_turns_get_right_answers(served: Limited) -> None:
    """Also while requests for all models wait or run at once, of which none can be idle."""
    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(served.is_right, NAMES * 40, (way for _ in range(60) for way in ("gRPC", "HTTP"))))
    until(lambda: len(served.loaded()) == 2)
    for name in NAMES:
        statistics = served.statistics(name).inference_stats
        assert statistics.fail.count == 0
    assert not served.lines("ERROR")


@pytest.mark.long
def test_a_model_without_room_is_served_alone(served: Limited) -> None:
    graph = f"(float[N, {SIZE}] x) => (float[N, {SIZE}] y) {{ u = MatMul(x, v)\n y = MatMul(u, w) }}"
    wide = np.ones((SIZE, 4 * SIZE), np.float32)
    onnx_text.save(served.repository, "large", graph, v=wide, w=np.eye(4 * SIZE, SIZE, dtype=np.float32))
    served.client.load_model("large")
    assert served.lines(r"large needs \d+\.\d MiB for weights, more than the 3\.0 MiB of --models-memory-mib")
    expected = X @ np.ones((SIZE, SIZE), np.float32)
    np.testing.assert_allclose(served.infer("large", x=X)["y"], expected, rtol=1e-3, atol=1e-3)
    until(lambda: served.loaded() == {"large"})
    assert served.is_right("a")
    until(lambda: served.loaded() == {"a"})
    served.client.unload_model("large")


@pytest.mark.long
def test_the_limit_outlives_the_scheduler(served: Limited) -> None:
    pid = served.kill("scheduler")
    until(lambda: pid not in served.server.pids()["scheduler"] and served.server.pids()["scheduler"])
    until(lambda: len(served.loaded()) == 2)
    assert all(served.is_right(name) for name in NAMES)
    until(lambda: served.loaded() == {"b", "c"})


def test_idle_models_are_reloaded(served: Limited) -> None:
    for name in NAMES:
        assert served.is_right(name)
    served.client.load_model("a", config=json.dumps({"max_batch_size": 4}))
    assert served.is_right("a")
    until(lambda: len(served.loaded()) == 2)
