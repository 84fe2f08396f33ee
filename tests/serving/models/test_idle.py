"""Models that nobody asks for give their memory back, and are there again with the next request."""

import json
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from testing.live_server import is_ready
from testing.repository import GANGWAY
from testing.waiting import until
from tests.conftest import CompileKept
from tests.helpers import onnx_text
from tests.helpers.http_requests import ask_http
from tests.helpers.served import Served, serving
from tests.helpers.ways import WAYS, RefusedError

IDLE_S = 0.4
SIZE = 512
WIDE = np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(np.float32)
X = np.random.default_rng(1).standard_normal((2, SIZE)).astype(np.float32)
STAYS = 'parameters { key: "idle_unload_s" value { string_value: "0" } }'
BOTH = """platform: "ensemble" max_batch_size: 4
input { name: "x" data_type: TYPE_FP32 dims: %d } output { name: "y" data_type: TYPE_FP32 dims: %d }
ensemble_scheduling { step { model_name: "wide" model_version: -1
    input_map { key: "x" value: "x" } output_map { key: "y" value: "y" } } }"""


class Idle(Served):
    def mapped(self) -> int:
        """How many models' weights workers have in memory."""
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in self.server.pids()["worker"]]
        return len({key for text in maps for key in re.findall(r"/(\w{64})/weights", text)})

    def state(self, name: str) -> tuple[str, str]:
        models = self.client.get_model_repository_index().models
        return next((model.state, model.reason) for model in models if model.name == name)

    def rests(self, name: str) -> bool:
        return self.state(name) == ("READY", "idle")

    def is_right(self, name: str, way: str = "gRPC") -> bool:
        return bool(np.abs(self.over(way, name, x=X)["y"] - X @ WIDE).max() < 1e-3)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, compile_kept: CompileKept) -> Iterator[Idle]:
    repository, cache = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("cache")
    for name, config, weights in (("wide", "", WIDE), ("stays", STAYS, -WIDE)):
        path = onnx_text.save(
            repository, name, f"(float[N, {SIZE}] x) => (float[N, {SIZE}] y) {{ y = MatMul(x, w) }}", config, w=weights
        )
        compile_kept(path, name, cache)
    (repository / "both" / "1").mkdir(parents=True)
    (repository / "both" / "config.pbtxt").write_text(BOTH % (SIZE, SIZE))
    flags = [f"--cache-dir={cache}", f"--idle-unload-s={IDLE_S}", "--model-control-mode=explicit", "--load-model=*"]
    with serving(repository, *flags, kind=Idle) as served:
        yield served


@pytest.mark.parametrize("way", WAYS)
def test_an_idle_model_answers(served: Idle, way: str) -> None:
    until(lambda: served.rests("wide"))
    until(lambda: served.mapped() == 1)
    assert served.client.is_model_ready("wide") and served.client.is_server_ready()
    assert served.is_right("wide", way)
    assert served.mapped() == 2
    until(lambda: served.state("wide") == ("READY", ""))


def test_who_watches_sees_which_models_are_idle(served: Idle) -> None:
    """In the metrics, the statistics, the state that the page reads, and `gangway top`."""
    until(lambda: served.rests("wide"))
    state = ask_http(served.server.http_url, "GET", "/v2/gangway/state").content
    assert {model["name"]: model["idle"] for model in state["models"]} == {"both": False, "stays": False, "wide": True}
    command = [*GANGWAY, "top", served.server.http_url, "--once"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert [line.split()[1] for line in shown.splitlines() if line.endswith(" idle")] == ["wide"]
    scrape = served.scrape()
    for model, is_idle in (("wide", True), ("stays", False)):
        assert scrape("gangway_model_idle", model=model) == is_idle
        weights_bytes, arena_bytes = (scrape(f"gangway_{kind}_bytes", model=model) for kind in ("weights", "arena"))
        assert weights_bytes == 0 if is_idle else weights_bytes >= WIDE.nbytes
        (usage,) = served.statistics(model).memory_usage
        assert usage.byte_size == weights_bytes + arena_bytes


def test_a_step_of_an_ensemble_comes_back(served: Idle) -> None:
    until(lambda: served.rests("wide"))
    assert served.is_right("both")


def test_a_model_that_is_asked_does_not_rest(served: Idle) -> None:
    assert served.is_right("wide")
    before = len(served.lines("model wide, version 1: idle"))
    for _ in range(200):
        assert served.is_right("wide")
    assert len(served.lines("model wide, version 1: idle")) <= before + 1  # a busy machine may take so long for one
    assert not served.lines("model stays, version 1: idle")


@pytest.mark.parametrize("role", ["worker", "scheduler", "front end"])
def test_an_idle_model_outlives_processes(served: Idle, role: str) -> None:
    until(lambda: served.rests("wide"))
    pid = served.kill(role)
    until(lambda: pid not in served.server.pids()[role] and served.server.pids()[role])
    until(lambda: is_ready(served.server.url))
    assert served.is_right("wide")
    until(lambda: served.rests("wide"))


def test_requests_that_come_together_share_a_return(served: Idle) -> None:
    until(lambda: served.rests("wide"))
    count = len(served.lines("model wide, version 1: loaded for a request"))
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(served.is_right, ["wide"] * 8, ["HTTP"] * 8))
    assert len(served.lines("model wide, version 1: loaded for a request")) == count + 1


def test_an_idle_model_is_unloaded_and_loaded_again(served: Idle) -> None:
    until(lambda: served.rests("wide"))
    served.client.unload_model("wide")
    until(lambda: served.state("wide") == ("UNAVAILABLE", "unloaded"))
    with pytest.raises(RefusedError, match="no available versions"):
        served.is_right("wide")
    served.client.load_model("wide")
    assert served.state("wide") == ("READY", ""), "its number may be the one that an idle model had"
    assert served.is_right("wide")


def test_a_queue_timeout_does_not_count_the_return(served: Idle) -> None:
    """Or a model that is asked seldom would never answer."""
    policy = {"timeout_action": "REJECT", "default_timeout_microseconds": 100}
    batching = {"max_batch_size": 4, "dynamic_batching": {"default_queue_policy": policy}}
    served.client.load_model("wide", config=json.dumps(batching))
    for _ in range(3):
        until(lambda: served.rests("wide"))
        assert served.is_right("wide")
    served.client.load_model("wide")


@pytest.mark.parametrize("text", ["soon", "-1", "inf"])
def test_wrong_times_are_refused(served: Idle, text: str) -> None:
    config = {"parameters": {"idle_unload_s": {"string_value": text}}}
    with pytest.raises(InferenceServerException, match="parameter idle_unload_s: expected seconds"):
        served.client.load_model("stays", config=json.dumps(config))
