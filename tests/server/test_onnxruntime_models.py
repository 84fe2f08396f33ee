"""`gangway serve` with models that only onnxruntime can execute, beside compiled ones."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tritonclient.grpc as triton
from gangway.artifact.cache import Cache
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from gangway.zoo import write_model
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from benchmarks.live_server import LiveServer, live_server
from benchmarks.repository import GANGWAY
from tests.onnx_networks import FOREIGN, Array, Foreign

TIMEOUT_SECONDS = 30
LONG_STEPS = 300_000  # half a second


@dataclass(frozen=True)
class Served:
    server: LiveServer
    client: triton.InferenceServerClient
    repository: Path
    networks: dict[str, Foreign]

    def infer(self, name: str, feeds: dict[str, Array], **options: Any) -> dict[str, Array]:
        inputs = []
        for key, value in feeds.items():
            inputs.append(triton.InferInput(key, list(value.shape), np_to_triton_dtype(value.dtype)))
            inputs[-1].set_data_from_numpy(value)
        result = self.client.infer(name, inputs, **options)
        return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    write_model(folder, "simple")
    for name, make in FOREIGN.items():
        make().save(folder / name / "1" / "model.onnx")
    return folder


@pytest.fixture(scope="module")
def served(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    networks = {name: make() for name, make in FOREIGN.items()}
    cache_dir = tmp_path_factory.mktemp("cache")
    for path in repository.glob("*/1/model.onnx"):  # in this process: one import of TVM for all
        compile_model(path, path.parts[-3], Cache(cache_dir), detect(), lambda phase, done, total: None)
    flags = [f"--cache-dir={cache_dir}"]
    with live_server(repository, flags) as server, triton.InferenceServerClient(server.url) as client:
        yield Served(server, client, repository, networks)
    assert server.process.returncode == 0


@pytest.mark.parametrize("name", FOREIGN)
def test_the_server_answers_like_onnxruntime(served: Served, name: str) -> None:
    network = served.networks[name]
    session = onnxruntime.InferenceSession(str(served.repository / name / "1" / "model.onnx"))
    names = [output.name for output in session.get_outputs()]
    for rows in (1, 4) if network.batched else (1,):
        feeds = network.feeds(rows, seed=rows)
        answers = served.infer(name, feeds)
        assert list(answers) == names
        for key, expected in zip(names, session.run(names, feeds), strict=True):
            assert (answers[key].shape, answers[key].dtype) == (expected.shape, expected.dtype)
            np.testing.assert_array_equal(answers[key], expected)


def test_native_models_beside_them(served: Served) -> None:
    numbers = np.arange(16, dtype=np.int32).reshape(1, 16)
    for _ in range(3):
        answers = served.infer("simple", {"INPUT0": numbers, "INPUT1": numbers})
        np.testing.assert_array_equal(answers["OUTPUT0"], 2 * numbers)
        served.infer("gru", served.networks["gru"].feeds(2))


def test_log_summary_and_configuration_say_so(served: Served) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while "ready: gRPC" not in (text := served.server.log.read_text()):
        assert time.monotonic() < deadline, text
    assert "WARNING lstm: cannot be compiled, so onnxruntime serves it: " in text.replace("supervisor: ", "")
    lines = {line.split()[0]: line for line in text.splitlines() if " ready" in line}
    assert lines["lstm"].endswith("ready, served by onnxruntime")
    assert lines["simple"].rstrip().endswith("ready")
    parameters = {name: served.client.get_model_config(name).config.parameters for name in ("lstm", "simple")}
    assert parameters["lstm"]["gangway_engine"].string_value == "onnxruntime"
    assert "If" in parameters["lstm"]["gangway_fallback_reason"].string_value
    assert parameters["simple"]["gangway_engine"].string_value == "native"
    assert "gangway_fallback_reason" not in parameters["simple"]


def test_a_failure_concerns_one_request(served: Served) -> None:
    before = served.server.pids()["worker"]
    for index in (10, 3, -11, 4):
        if -10 <= index < 10:
            assert served.infer("gather", {"index": np.array([[index, 0]])})["y"][0, 0, 0] == 4 * index
        else:
            with pytest.raises(InferenceServerException, match="execution of model 'gather' failed") as caught:
                served.infer("gather", {"index": np.array([[index, 0]])})
            assert "INTERNAL" in caught.value.status()
    assert served.server.pids()["worker"] == before


def test_a_request_that_is_given_up_disturbs_nobody(served: Served) -> None:
    steps = {"count": np.array([LONG_STEPS])}
    with pytest.raises(InferenceServerException) as caught:
        served.infer("loop", steps, client_timeout=0.2)
    assert "DEADLINE_EXCEEDED" in caught.value.status()
    begin = time.monotonic()
    np.testing.assert_array_equal(served.infer("loop", {"count": np.array([3])})["y"], np.eye(32))
    assert time.monotonic() - begin < 10
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while served.server.busy_slots():  # the next requests give back what the abandoned one left
        assert time.monotonic() < deadline
        served.infer("loop", {"count": np.array([3])})


def test_a_killed_worker_costs_no_request(served: Served) -> None:
    answers: list[Array] = []
    request = threading.Thread(
        target=lambda: answers.append(served.infer("loop", {"count": np.array([LONG_STEPS])})["y"])
    )
    before = served.server.pids()["worker"]
    request.start()
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not served.server.busy_slots():
        assert time.monotonic() < deadline
    time.sleep(0.2)  # it runs; nobody can see how far it is
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    request.join(TIMEOUT_SECONDS)
    np.testing.assert_array_equal(answers[0], np.eye(32))
    assert not set(before) & set(served.server.pids()["worker"])


def test_what_nobody_can_serve_is_refused(tmp_path: Path) -> None:
    path = FOREIGN["lstm"]().save(tmp_path / "models" / "broken" / "1" / "model.onnx")
    path.write_bytes(path.read_bytes()[:-30])
    command = [*GANGWAY, "serve", f"--model-repository={tmp_path / 'models'}", f"--cache-dir={tmp_path / 'cache'}"]
    command += ["--grpc-address=127.0.0.1", "--grpc-port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if "ready: gRPC" in line:
                    break
            assert any("ERROR" in line and "it is truncated" in line for line in lines), lines
            assert any("not ready: " in line for line in lines)
            process.terminate()
            process.communicate(timeout=TIMEOUT_SECONDS)
        finally:
            process.kill()
    assert process.returncode == 0
