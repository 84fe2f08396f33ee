"""The start of `gangway serve`: what it says, and what may go wrong with it. Every test starts real servers."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from onnx import helper, numpy_helper
from tritonclient.utils import InferenceServerException

from gangway.artifact.reader import verify
from testing.live_server import LiveServer, live_server
from testing.load import RIGHT, Load, run_for
from testing.reference import example_of
from testing.waiting import until
from tests.helpers.whole_server import TIMEOUT_SECONDS, small_repository, started

pytestmark = pytest.mark.long


@pytest.fixture
def repository(tmp_path, compiled_zoo):
    return small_repository(tmp_path / "models", compiled_zoo)


def test_the_start_says_what_is_served(gangway_server):
    until(lambda: "ready: gRPC" in gangway_server.log.read_text())  # clients may know before it is printed
    text = gangway_server.log.read_text()
    for name in ("mlp", "mobilenetv2", "resnet50", "simple"):
        assert re.search(rf"^{name} +1 +[\d.]+ ms +[\d.]+ ms +up to \d+ +ready", text, re.MULTILINE), text
    assert text.count("found in the cache") == 4
    assert gangway_server.url in text and gangway_server.http_url in text
    command = re.search(r"gangway client .*", text)
    assert command
    assert (
        "server"
        in subprocess.run(
            [sys.executable, "-m", "gangway.server.cli", *shlex.split(command[0])[1:]],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
            check=True,
        ).stdout
    )


def test_processes_are_small(gangway_server):
    pids = gangway_server.pids()
    assert len(pids["scheduler"]) == len(pids["front end"]) == 1
    for pid in (*pids["worker"], *pids["scheduler"]):
        # Not pages of weights, which the kernel calls private until another worker has touched them, too.
        own_kilobytes = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        assert own_kilobytes and 1024 * int(own_kilobytes[1]) < 40e6
        # Folders of packages; the cache's folder has versions in its name.
        assert not re.search(r"/(numpy|grpc|onnx|tvm)[^/]*/", Path(f"/proc/{pid}/maps").read_text())


NO_NAME = "Name or service not known|Temporary failure in name resolution"


@pytest.mark.parametrize(
    ("address", "front_ends", "why"),
    [
        ("203.0.113.1", 1, "Cannot assign requested address"),  # of a network for examples
        ("203.0.113.1", 2, "Cannot assign requested address"),
        ("nobody.invalid", 1, NO_NAME),
        ("nobody.invalid", 2, NO_NAME),
        ("unix:/proc/nowhere", 1, "No such file or directory"),
    ],
)
def test_an_address_that_cannot_be_had_is_a_clear_error(repository, compiled_zoo, address, front_ends, why):
    flags = [f"--grpc-address={address}", f"--front-ends={front_ends}"]
    with started(repository, compiled_zoo.cache_dir, *flags) as server:
        output, _ = server.communicate(timeout=TIMEOUT_SECONDS)
    assert server.returncode == 1
    assert re.search(rf"cannot listen on {re.escape(address)}(:\d+)?: ({why})$", output.splitlines()[-1])


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_busy_port_is_a_clear_error(gangway_server, repository, compiled_zoo, protocol):
    url = gangway_server.url if protocol == "grpc" else gangway_server.http_url
    port = url.partition(":")[2]
    flags = ["--grpc-address=127.0.0.1", "--grpc-port=0", f"--{protocol}-port={port}"]
    with started(repository, compiled_zoo.cache_dir, *flags) as second:
        output, _ = second.communicate(timeout=TIMEOUT_SECONDS)
    assert second.returncode == 1
    how = " for HTTP" * (protocol == "http")
    assert f"cannot listen on 127.0.0.1:{port}{how}: Address already in use" in output.splitlines()[-1]
    assert " front end: " not in output, "gRPC says nothing about it itself"
    assert "unfinished" not in output
    assert "Traceback" not in output


@pytest.mark.parametrize("victim", ["worker", "scheduler", "front end"])
def test_a_death_during_the_start_is_mended(repository, compiled_zoo, victim):
    with started(repository, compiled_zoo.cache_dir) as process:
        server = LiveServer("", process, Path(), 0)
        until(lambda: server.pids()[victim])
        os.kill(server.pids()[victim][0], signal.SIGKILL)
        url = next(line for line in process.stdout if "ready: gRPC" in line).split()[-1]
        with triton.InferenceServerClient(url) as client:
            assert client.is_model_ready("mlp") and client.is_model_ready("simple")
        process.terminate()
        process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0


def test_workers_that_die_again_and_again_are_replaced_after_growing_pauses(repository, compiled_zoo):
    with live_server(repository, [f"--cache-dir={compiled_zoo.cache_dir}"]) as server:
        workers, killed = len(server.pids()["worker"]), set()
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while "starting another in" not in server.log.read_text():
            assert time.monotonic() < deadline
            for pid in server.pids()["worker"]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
        assert len(killed) > 20
        until(lambda: len(server.pids()["worker"]) == workers)
        example = example_of("mlp", compiled_zoo.onnx_file("mlp"))
        answers = run_for(Load(server.url, example.request, example.outputs, 1), seconds=0.1)
        assert {outcome.result for outcome in answers.outcomes} == {RIGHT}
    assert server.process.returncode == 0


def test_a_broken_model_hinders_no_other(repository, compiled_zoo, tmp_path):
    broken = repository / "broken" / "1"
    broken.mkdir(parents=True)
    (broken / "model.onnx").write_bytes((repository / "mlp" / "1" / "model.onnx").read_bytes()[:500])
    (repository / "empty").mkdir()
    for name in ("absent", "enormous"):
        external_model(repository / name / "1", None if name == "absent" else 1 << 43)
    contradictory_model(repository / "contradictory" / "1" / "model.onnx")
    (tmp_path / "cache").mkdir()
    cache_dir = compiled_zoo.linked_cache(tmp_path / "cache")
    before = set(os.listdir(cache_dir))
    with started(repository, cache_dir) as process:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if "ready: gRPC" in line:
                break
        with triton.InferenceServerClient(lines[-1].split()[-1]) as client:
            assert client.is_server_live()
            assert client.is_model_ready("mlp") and not client.is_model_ready("broken")
            index = {model.name: model for model in client.get_model_repository_index().models}
            assert index["broken"].state == "UNAVAILABLE" and "model.onnx" in index["broken"].reason
            assert "version" in index["empty"].reason
            assert "data.bin" in index["absent"].reason
            assert re.search(r"has 8388608 MiB, the machine \d+ of memory", index["enormous"].reason)
            assert "Incompatible dimensions" in index["contradictory"].reason
            assert "onnxruntime refuses it" in index["contradictory"].reason
            assert index["mlp"].state == "READY"
            with pytest.raises(InferenceServerException, match="not at ready state"):
                client.infer("broken", [])
        process.terminate()
        output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
    assert process.returncode == 0
    assert "not ready" in "".join(lines)
    assert "Traceback" not in "".join(lines) + output
    assert set(os.listdir(cache_dir)) - {"locks", "uses"} == before


def external_model(folder, size_bytes):
    """A model whose weights should lie beside it, in a file of holes only; None: there is no such file."""
    weights = numpy_helper.from_array(np.ones((256, 4), np.float32), "w")
    save_model(folder / "model.onnx", [helper.make_node("MatMul", ["x", "w"], ["y"])], 256, weights)
    model = onnx.load(folder / "model.onnx")
    (tensor,) = model.graph.initializer
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="data.bin")
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    if size_bytes is not None:
        with (folder / "data.bin").open("wb") as file:
            file.truncate(size_bytes)


def contradictory_model(path):
    """A sum of 3 and 4 numbers."""
    four = numpy_helper.from_array(np.ones((1, 4), np.float32), "w")
    save_model(path, [helper.make_node("Add", ["x", "w"], ["y"])], 3, four)


def save_model(path, nodes, columns, *weights):
    path.parent.mkdir(parents=True)
    kind = onnx.TensorProto.FLOAT
    x = helper.make_tensor_value_info("x", kind, ["N", columns])
    y = helper.make_tensor_value_info("y", kind, None)
    graph = helper.make_graph(nodes, "g", [x], [y], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())


@pytest.mark.long
def test_two_servers_share_a_cache_and_its_damaged_entry(repository, compiled_zoo, tmp_path):
    cache_dir = tmp_path / "cache"
    key = compiled_zoo.artifact("mlp").name
    shutil.copytree(compiled_zoo.artifact("mlp"), cache_dir / key)
    with (cache_dir / key / "weights.bin").open("r+b") as file:
        file.write(b"damaged")
    shutil.rmtree(repository / "simple")
    example = example_of("mlp", compiled_zoo.onnx_file("mlp"))
    with started(repository, cache_dir) as first, started(repository, cache_dir) as second:
        for process in (first, second):
            line = next(line for line in process.stdout if "ready: gRPC" in line or "ERROR" in line)
            assert "ready: gRPC" in line
            answers = run_for(Load(line.split()[-1], example.request, example.outputs, 1), seconds=0.1)
            assert {outcome.result for outcome in answers.outcomes} == {RIGHT}
        for process in (first, second):
            process.terminate()
            process.communicate(timeout=TIMEOUT_SECONDS)
            assert process.returncode == 0
    assert verify(cache_dir / key).key == key
    assert sorted(path.name for path in cache_dir.iterdir()) == sorted([key, "kernels", "locks", "uses"])
