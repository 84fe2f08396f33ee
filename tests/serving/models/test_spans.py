"""`gangway serve` with lengths that change from request to request: one program computes all of them, native."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import tritonclient.grpc as triton
from onnx import TensorProto, helper, numpy_helper
from tritonclient.utils import np_to_triton_dtype

from gangway.server.control.repository.loaded import SPAN_AFTER, SPAN_SIZES
from testing.decoders import SMALL, decoder_feeds, encoder_feeds, save_decoder, save_encoder
from testing.live_server import LiveServer, live_server

TIMEOUT_S = 100
FIRST = 2 * SPAN_SIZES + 1  # of a span
LAST = SMALL.positions - 1  # beyond, there are no positions


@dataclass
class Served:
    """A server with an encoder and a decoder, and onnxruntime's sessions of both."""

    server: LiveServer
    client: triton.InferenceServerClient
    sessions: dict[str, Any] = field(default_factory=dict)

    def check(self, name: str, feeds: dict[str, Any]) -> None:
        inputs = []
        for key, value in feeds.items():
            inputs.append(triton.InferInput(key, list(value.shape), np_to_triton_dtype(value.dtype)))
            inputs[-1].set_data_from_numpy(value)
        answers = self.client.infer(name, inputs)
        outputs = [output.name for output in self.sessions[name].get_outputs()]
        for key, expected in zip(outputs, self.sessions[name].run(outputs, feeds), strict=True):
            np.testing.assert_allclose(answers.as_numpy(key), expected, rtol=1e-4, atol=1e-4, err_msg=f"{name} {key}")

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while text not in self.server.log.read_text():
            assert time.monotonic() < deadline, self.server.log.read_text()
            time.sleep(0.02)

    def count(self, text: str) -> int:
        return self.server.log.read_text().count(text)


def save_filter(path: Path) -> Path:
    """A convolution over a sequence of any length."""
    path.parent.mkdir(parents=True)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4, "T"]) for name in "xy")
    weights = np.random.default_rng(0).standard_normal((4, 4, 3), np.float32)
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1])
    graph = helper.make_graph([node], "filter", [x], [y], [numpy_helper.from_array(weights, "w")])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@contextmanager
def serving(folder: Path, saved: Mapping[str, Callable[[Path], Path]], *flags: str) -> Iterator[Served]:
    paths = {name: save(folder / "models" / name / "1" / "model.onnx") for name, save in saved.items()}
    sessions = {name: onnxruntime.InferenceSession(path) for name, path in paths.items()}
    flags = (f"--cache-dir={folder}/cache", *flags)
    with live_server(folder / "models", flags) as server, triton.InferenceServerClient(server.url) as client:
        yield Served(server, client, sessions)
    assert server.process.returncode == 0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    models = {"decoder": save_decoder, "encoder": save_encoder}
    with serving(tmp_path_factory.mktemp("served"), models) as made:
        yield made


@pytest.mark.parametrize("name", ["decoder", pytest.param("encoder", marks=pytest.mark.long)])
def test_a_new_length_costs_no_compilation(served: Served, name: str) -> None:
    make, symbol = (decoder_feeds, "past") if name == "decoder" else (encoder_feeds, "length")
    for length in range(FIRST, FIRST + SPAN_AFTER):
        served.check(name, make(length, 1))
        served.wait_for(f"{symbol}={length}: ready, compiled for these sizes")
    served.check(name, make(FIRST + SPAN_AFTER, 1))
    served.wait_for(f"{symbol}={FIRST} to {FIRST + SPAN_SIZES - 1}: ready")
    compiled = served.count("compiled, ")
    for length in np.random.default_rng(0).permutation(range(FIRST, LAST + 1)).tolist():
        served.check(name, make(length, 1 + length % 3))
    assert served.count("compiled, ") == compiled


def test_a_decoder_begins_without_past(served: Served) -> None:
    served.check("decoder", decoder_feeds(0, 1))
    served.wait_for("past=0: ready, compiled for these sizes")
    for rows in (1, 3):
        served.check("decoder", decoder_feeds(0, rows))


@pytest.mark.long
def test_lengths_are_compiled_before_requests_have_them(tmp_path: Path) -> None:
    models = {"encoder": save_encoder, "filter": save_filter}
    with serving(tmp_path, models, f"--compile-ahead={SPAN_SIZES}") as ahead:
        ahead.wait_for("filter, version 1, T=1 to 64: compiled one by one: each size of a convolution needs kernels")
        ahead.wait_for("length=1 to 64: ready")
        ahead.wait_for("length=1: ready")  # whose layers are others
        compiled = ahead.count("compiled, ")
        for length in (1, 2, SPAN_SIZES - 1, SPAN_SIZES):
            ahead.check("encoder", encoder_feeds(length, 1 + length % 3))
        assert ahead.count("compiled, ") == compiled
