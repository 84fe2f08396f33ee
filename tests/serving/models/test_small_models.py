"""A model of microseconds with the usual target, `3x`, where late requests are refused, and beside a long one."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from gangway.clients.perf.command import main as perf
from testing.live_server import LiveServer, live_server
from testing.waiting import until
from tests.conftest import CompiledZoo

pytestmark = [pytest.mark.long, pytest.mark.alone]  # latencies are measured and compared

QOS = 'parameters { key: "qos_ms" value { string_value: "3x" } }'
REJECT = 'parameters { key: "late" value { string_value: "reject" } }'
MODELS = {"strict": ("mlp", QOS + REJECT), "small": ("mlp", QOS), "long": ("resnet50", QOS)}
SHAPES = {"mlp": (1, 16), "resnet50": (1, 3, 224, 224)}


@dataclass(frozen=True)
class Served:
    server: LiveServer
    client: triton.InferenceServerClient

    def answers(self, model: str, count: int) -> int:
        """Ask so often, one request at a time; return how many are answered and not refused as late."""
        answered = 0
        for _ in range(count):
            try:
                answered += self.client.infer(model, inputs(model)) is not None
            except InferenceServerException as error:
                assert error.message() == f"Request timeout expired for model '{model}'"
        return answered

    def send(self, model: str) -> "Future[Any]":
        answer: Future[Any] = Future()
        self.client.async_infer(model, inputs(model), callback=lambda result, error: answer.set_result(error))
        return answer

    def milliseconds(self, model: str) -> tuple[float, float]:
        """Latency alone and target, as the summary has them."""
        found = re.search(rf"^{model} +1 +([\d.]+) ms +([\d.]+) ms", self.server.log.read_text(), re.MULTILINE)
        assert found
        return float(found[1]), float(found[2])


def inputs(model: str) -> list[triton.InferInput]:
    shape = SHAPES[MODELS[model][0]]
    tensor = triton.InferInput("input", shape, "FP32")
    tensor.set_data_from_numpy(np.zeros(shape, np.float32))
    return [tensor]


@pytest.fixture(scope="module")
def served(compiled_zoo: CompiledZoo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("small")
    for name, (model, config) in MODELS.items():
        compiled_zoo.link(repository, name, model, config)
    with (
        live_server(repository, [f"--cache-dir={compiled_zoo.cache_dir}"]) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        until(lambda: "ready: gRPC" in server.log.read_text())  # after the summary
        yield Served(server, client)


def test_nothing_is_refused_before_a_request_has_met_the_target(served: Served) -> None:
    answered = served.answers("strict", 20)
    stats = served.client.get_inference_statistics("strict").model_stats[0].response_stats
    assert answered > 0
    assert answered == 20 or stats["gangway_qos_met"].success.count > 0


def test_they_overtake_long_ones(served: Served) -> None:
    queue = [served.send("long") for _ in range(10)]
    assert served.answers("small", 30) == 30
    assert not all(answer.done() for answer in queue), "30 times a microsecond waits for half a second of others"
    assert [answer.result(60) for answer in queue] == [None] * 10


def test_perf_and_server_mean_the_same(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By target, exactly; by latency alone, roughly, where computing is most of it: a request counts as a constant."""
    result = tmp_path / "result.json"
    load = ["--mix", "small=1,long=1", "--rate", "10", "--queries", "10", "--warmup", "0"]
    assert perf([served.server.url, *load, "--qos", "config", f"--json={result}"]) == 0
    model, long = json.loads(result.read_text())["models"]
    alone_ms, target_ms = served.milliseconds("small")
    long_alone_ms, _ = served.milliseconds("long")
    assert 0.2 < long_alone_ms / (long["isolated_us"] / 1e3) < 5
    assert model["targets_us"]["qos"] / 1e3 == pytest.approx(target_ms, rel=0.01)
    config = served.client.get_model_config("small", as_json=True)["config"]
    least_ms = float(config["parameters"]["gangway_least_target_ms"]["string_value"])
    assert target_ms == pytest.approx(max(3 * alone_ms, least_ms), rel=0.02)
    assert f"target     a multiple of that, but at least {least_ms:.2f} ms" in served.server.log.read_text()
