"""What people bring from elsewhere: configurations of other machines, odd names and places, an output that is full."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from gangway.server.messages import MAX_VERSION
from testing.live_server import stop
from testing.processes import command_of, descendants_of
from testing.repository import GANGWAY
from testing.waiting import until

TIMEOUT_SECONDS = 60
ADMIN = {"triton-grpc-protocol-admin": "s3cret"}
GPU = """instance_group [ { kind: KIND_GPU gpus: [ 0 ] host_policy: "h" } ]
optimization { execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } } }"""
# By name: the version's folder and config.pbtxt.
MODELS: dict[str, tuple[str, str | bytes]] = {
    "gpu": ("1", GPU),
    "openvino": ("1", 'backend: "openvino" max_batch_size: 8'),
    "typing": ("1", 'parameters { key: "qos-ms" value: { string_value: "5" } }'),
    "first": ("0", ""),
    "last": (str(MAX_VERSION), "version_policy { all {} }"),
    "umlaut": ("1", "# f\xfcr alle\nmax_batch_size: 8".encode("latin-1")),
    "markup": ("1", 'input [ { name: "INPUT0" dims: [/* columns */ 7 ] } ]'),
    "lost+found": ("1", ""),
}
# The step's version is 0, or not said at all: version 0, where there is one. Version 1 of it has other tensors.
ENSEMBLE = """platform: "ensemble" max_batch_size: 4
input [ { name: "a" data_type: TYPE_INT32 dims: [ 16 ] }, { name: "b" data_type: TYPE_INT32 dims: [ 16 ] } ]
output [ { name: "sum" data_type: TYPE_INT32 dims: [ 16 ] } ]
ensemble_scheduling { step { model_name: "both"
  input_map [ { key: "INPUT0" value: "a" }, { key: "INPUT1" value: "b" } ]
  output_map { key: "OUTPUT0" value: "sum" } } }"""
SERVED = sorted(MODELS.keys() - {"markup", "lost+found"})


@dataclass(frozen=True)
class Brought:
    process: "subprocess.Popen[bytes]"
    log: Path
    client: triton.InferenceServerClient


@pytest.fixture(scope="module")
def brought(compiled_zoo: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brought]:
    folder = tmp_path_factory.mktemp("brought")
    repository, log, keys = folder / "models", folder / "log", folder / "keys"
    for name, (version, config) in MODELS.items():
        shutil.copytree(compiled_zoo.repository / "simple" / "1", repository / name / version)
        content = config if isinstance(config, bytes) else config.encode()
        (repository / name / "config.pbtxt").write_bytes(content)
    for version, source in (("0", "simple"), ("1", "mlp")):
        shutil.copytree(compiled_zoo.repository / source / "1", repository / "both" / version)
    (repository / "both" / "config.pbtxt").write_text("version_policy { all {} }")
    (repository / "ensemble" / "1").mkdir(parents=True)
    (repository / "ensemble" / "config.pbtxt").write_text(ENSEMBLE)
    shutil.copy(repository / "gpu" / "1" / "model.onnx", repository / "loose.onnx")
    os.rename(shutil.copytree(repository / "gpu", repository / "copy"), os.fsencode(repository) + b"/caf\xe9")
    keys.write_text("model-repository:admin=s3cret\n")
    command = [*GANGWAY, "serve", f"--model-repository={repository}", f"--cache-dir={compiled_zoo.cache_dir}"]
    command += ["--no-profile", "--grpc-address=127.0.0.1", "--grpc-port=0", "--allow-http=false"]
    command += ["--allow-metrics=false", f"--grpc-restricted-protocol=@{keys}"]
    with log.open("wb") as stderr, open("/dev/full", "wb") as stdout:
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr)
    try:
        until(lambda: process.poll() is not None or "ready: gRPC on" in log.read_text(), log.read_text)
        ready = re.search(r"ready: gRPC on (\S+)", log.read_text())
        assert ready, log.read_text()
        with triton.InferenceServerClient(ready[1]) as client:
            yield Brought(process, log, client)
    finally:
        status = stop(process)
    assert status == 0


def test_what_can_be_served_is(brought: Brought) -> None:
    numbers = np.arange(16, dtype=np.int32).reshape(1, 16)
    inputs = [triton.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
    for tensor in inputs:
        tensor.set_data_from_numpy(numbers)
    for name in SERVED:
        version = MODELS[name][0]
        for asked in ("", version):
            answer = brought.client.infer(name, inputs, model_version=asked)
            np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), 2 * numbers)
            assert answer.get_response().model_version == version
        (statistics,) = brought.client.get_inference_statistics(name, version).model_stats
        assert (statistics.version, statistics.inference_count) == (version, 2)


def test_a_step_that_names_no_version_gets_version_0(brought: Brought) -> None:
    inputs = [triton.InferInput(name, [2, 16], "INT32") for name in ("a", "b")]
    for tensor in inputs:
        tensor.set_data_from_numpy(np.full((2, 16), 3, np.int32))
    assert (brought.client.infer("ensemble", inputs).as_numpy("sum") == 6).all()
    assert brought.client.get_model_metadata("both").versions == ["0", "1"]


def test_the_index_has_no_more_and_no_less(brought: Brought) -> None:
    index = {model.name: model for model in brought.client.get_model_repository_index(headers=ADMIN).models}
    assert sorted(index) == sorted([*SERVED, "both", "ensemble", "markup"])
    assert index["first"].version == "0" and index["last"].version == str(MAX_VERSION)
    assert index["markup"].reason.startswith("config.pbtxt: line 1, column 33: ")
    assert index["markup"].reason.endswith("; a comment begins with #")


def test_each_model_has_one_warning_of_what_is_in_vain(brought: Brought) -> None:
    lines = [line for line in brought.log.read_text().splitlines() if "have no effect: " in line]
    said = {line.split("model ")[1].partition(":")[0]: line for line in lines}
    assert sorted(said) == ["gpu", "openvino", "typing"] and len(lines) == 3
    assert all(word in said["gpu"] for word in ("kind KIND_GPU (", ".gpus (", ".host_policy (", "_accelerators ("))
    assert "backend 'openvino' (" in said["openvino"]
    assert "parameter 'qos-ms' (unknown, did you mean 'qos_ms'?)" in said["typing"]


def test_one_sentence_says_what_serves_a_model(brought: Brought) -> None:
    text = brought.log.read_text()
    ready = re.findall(
        r"INFO supervisor: model (\w+), version \d+: ready after [\d.]+ s, compiled$", text, re.MULTILINE
    )
    assert sorted(ready) == sorted([*SERVED, "both", "both"])
    (error,) = [line for line in text.splitlines() if " ERROR " in line]
    assert "model markup: " in error


def test_warnings_name_what_lies_wrongly(brought: Brought) -> None:
    text = brought.log.read_text()
    assert re.search(r"WARNING supervisor: \S+/loose.onnx is not served: .* as \S+/models/loose/1/model.onnx", text)
    assert re.search(r"WARNING supervisor: \S+/caf.* is not served: .* must be UTF-8", text)
    assert "the summary cannot be written to standard output: [Errno 28]" in text


def test_no_process_has_a_secret_on_its_command_line(brought: Brought) -> None:
    pids = [brought.process.pid, *descendants_of(brought.process.pid)]
    assert len(pids) > 3
    assert [command for pid in pids if "s3cret" in (command := command_of(pid))] == []
    assert "every user of this machine can read the key" not in brought.log.read_text()
