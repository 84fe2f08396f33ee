"""`gangway serve` says once that a compiled model answers otherwise than onnxruntime."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton

from gangway.artifact.cache import Cache
from gangway.compiler.arguments import CompileOptions
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from testing.live_server import LiveServer, live_server
from testing.waiting import until
from tests.helpers.rounded_products import DEPTH, save_rounded

pytestmark = pytest.mark.long

TIMEOUT_S = 60
MODELS = {"plain": (False, ["N"]), "fixed": (True, ["N"]), "declared": (True, ["N", "T"]), "later": (True, ["N", "T"])}


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, model_cache: Path
) -> Iterator[tuple[LiveServer, triton.InferenceServerClient]]:
    repository = tmp_path_factory.mktemp("repository")
    for name, (rounds, sizes) in MODELS.items():
        path = save_rounded(repository / name / "1" / "model.onnx", sizes, rounds)
        each = [{}, {"T": 3}, {"T": 5}] if name in ("declared", "later") else [{}]
        for dimensions in each:  # in this process: one import of TVM for all
            compile_model(path, name, Cache(model_cache), detect(), lambda *_: None, CompileOptions(dimensions))
    (repository / "declared" / "config.pbtxt").write_text(
        'parameters { key: "gangway_buckets" value { string_value: "T=3" } }\n'
    )
    flags = [f"--cache-dir={model_cache}"]
    with live_server(repository, flags) as server, triton.InferenceServerClient(server.url) as client:
        yield server, client


def told(client: triton.InferenceServerClient, name: str) -> str:
    parameters = client.get_model_config(name).config.parameters
    return parameters["gangway_difference"].string_value if "gangway_difference" in parameters else ""


def warnings(server: LiveServer, name: str) -> list[str]:
    return re.findall(rf"{name}, version 1\S* ?(.*): compiled, it answers random numbers otherwise", _log(server))


def _log(server: LiveServer) -> str:
    return server.log.read_text()


def test_it_is_told_when_the_model_is_loaded(served: tuple[LiveServer, triton.InferenceServerClient]) -> None:
    server, client = served
    assert (told(client, "plain"), warnings(server, "plain")) == ("", [])
    assert told(client, "fixed").startswith("output 'y' differs by up to 0.")
    assert len(warnings(server, "fixed")) == 1
    assert told(client, "declared").startswith("with T=3, output 'y' differs")
    assert warnings(server, "declared") == ["T=3"]


def test_it_is_told_once_when_a_size_is_compiled_later(
    served: tuple[LiveServer, triton.InferenceServerClient],
) -> None:
    server, client = served
    assert told(client, "later") == ""
    for size in (5, 3):
        x = triton.InferInput("x", [1, size, DEPTH], "FP32")
        x.set_data_from_numpy(np.ones((1, size, DEPTH), np.float32))
        client.infer("later", [x])
        said = f"later, version 1, T={size}: ready, compiled for these sizes"
        until(lambda said=said: said in _log(server), server.log.read_text)  # type: ignore[misc]
    assert warnings(server, "later") == ["T=5"]
    assert told(client, "later").startswith("with T=5, output 'y' differs")
