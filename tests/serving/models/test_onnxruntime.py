"""`gangway serve` with models that only onnxruntime can execute, beside compiled ones."""

import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from gangway.artifact.cache import Cache
from gangway.artifact.profile import Profile, write_profile
from gangway.base.process import LOWERED_WORKER_NICE
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from gangway.executor.frames import join_strings
from gangway.executor.launch import available_cores
from gangway.measure.profiler import profile_model
from gangway.protos import grpc_service_pb2 as pb
from gangway.protos.model_config_pb2 import DataType
from gangway.zoo import write_model
from testing.live_server import live_server
from testing.processes import cpu_ns
from testing.repository import GANGWAY
from testing.waiting import until
from tests.conftest import CompileKept
from tests.helpers.island_networks import control_flow
from tests.helpers.nice_values import WITHOUT_PRIVILEGE
from tests.helpers.onnx_networks import FOREIGN, SYMBOLIC, Array
from tests.helpers.served import Served, serving
from tests.helpers.ways import WAYS, RefusedError, by_grpc, request_of

TIMEOUT_SECONDS = 30
LONG_STEPS = 300_000  # half a second
BEGUN_NS = 100_000_000  # of CPU: a request computes
ONE = join_strings([b"1"])
NETWORKS = {**FOREIGN, **SYMBOLIC}


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    for name in ("simple", "simple_string"):
        write_model(folder, name)
    for name, make in NETWORKS.items():
        make().save(folder / name / "1" / "model.onnx")
    control_flow(folder / "islands" / "1")
    return folder


@pytest.fixture(scope="module")
def served(repository: Path, tmp_path_factory: pytest.TempPathFactory, compile_kept: CompileKept) -> Iterator[Served]:
    cache_dir = tmp_path_factory.mktemp("cache")
    for path in repository.glob("*/1/model.onnx"):
        compile_kept(path, path.parts[-3], cache_dir)
    with serving(repository, f"--cache-dir={cache_dir}") as served:
        yield served


@pytest.mark.parametrize("name", FOREIGN)
def test_the_server_answers_like_onnxruntime(served: Served, name: str) -> None:
    network = NETWORKS[name]()
    session = onnxruntime.InferenceSession(str(served.repository / name / "1" / "model.onnx"))
    names = [output.name for output in session.get_outputs()]
    for rows in (1, 4) if network.batched else (1,):
        feeds = network.feeds(rows, seed=rows)
        answers = served.ask(name, feeds)
        assert list(answers) == names
        for key, expected in zip(names, session.run(names, feeds), strict=True):
            assert (answers[key].shape, answers[key].dtype) == (expected.shape, expected.dtype)
            np.testing.assert_array_equal(answers[key], expected)


def floats(*shape: int) -> Array:
    return np.random.default_rng(math.prod(shape)).standard_normal(shape).astype(np.float32)


def test_a_symbolic_length(served: Served) -> None:
    metadata = served.client.get_model_metadata("running_sum")
    assert [list(tensor.shape) for tensor in (*metadata.inputs, *metadata.outputs)] == [
        [-1, -1, 3],
        [-1, -1, 1],
        [-1, -1, 3],
    ]
    config = served.client.get_model_config("running_sum").config
    assert (config.max_batch_size, list(config.input[0].dims)) == (4, [-1, 3])
    for rows, length in ((1, 1), (2, 5), (3, 0), (4, 700), (2, 5)):
        x, z = floats(rows, length, 3), floats(rows, length, 1)
        answer = served.ask("running_sum", {"x": x, "z": z})["y"]
        np.testing.assert_allclose(answer, np.cumsum(x, axis=1) + z, rtol=1e-5, atol=1e-5)
        assert answer.shape == x.shape


@pytest.mark.parametrize(
    ("x", "z", "reason"),
    [
        (floats(1, 4, 3), floats(1, 5, 1), "'S', of which the request has two sizes, 4 and 5"),
        (floats(1, 4, 3), floats(2, 4, 1), "batch size does not match"),
        (floats(5, 4, 3), floats(5, 4, 1), "batch-size must be <= 4"),
        (floats(0, 4, 3), floats(0, 4, 1), "unexpected shape"),
        (floats(1, 4, 2), floats(1, 4, 1), "unexpected shape"),
        (floats(4, 3), floats(1, 4, 1), "unexpected shape"),
    ],
)
def test_wrong_shapes_are_refused(served: Served, x: Array, z: Array, reason: str) -> None:
    with pytest.raises(InferenceServerException, match=reason) as caught:
        served.ask("running_sum", {"x": x, "z": z})
    assert "INVALID_ARGUMENT" in caught.value.status()


def test_outputs_as_large_as_they_become(served: Served) -> None:
    for value in (np.zeros((3, 5)), np.eye(40), np.ones((300, 7))):
        feeds = {"x": value.astype(np.float32)}
        np.testing.assert_array_equal(served.ask("nonzero", feeds)["y"], np.array(np.nonzero(value)))
    for shape in ([1], [1000, 1000], [2, 3, 4, 5, 6, 7, 8], [3]):
        answer = served.ask("expand", {"x": np.array([2.5], np.float32), "shape": np.array(shape)})["y"]
        assert answer.shape == tuple(shape) and (answer == 2.5).all()


def test_an_answer_too_large_to_be_sent(served: Served) -> None:
    with pytest.raises(InferenceServerException, match=r"has 33554\d+ bytes, 268435456 are possible") as caught:
        served.ask("expand", {"x": np.ones(1, np.float32), "shape": np.array([80 << 20])})
    assert "RESOURCE_EXHAUSTED" in caught.value.status()
    assert served.ask("expand", {"x": np.ones(1, np.float32), "shape": np.array([2])})["y"].shape == (2,)


def test_strings_in_shared_memory(served: Served) -> None:
    """Their sizes are in their contents; what the model answers is known only when it has."""
    values = np.array([[str(number) for number in range(16)]], dtype=object)
    content = join_strings([text.encode() for text in values.flat])
    key = f"/strings-test-{os.getpid()}"
    handle = shm.create_shared_memory_region("strings", key, 4096)
    try:
        served.client.register_system_shared_memory("strings", key, 4096)
        inputs = [triton.InferInput(name, [1, 16], "BYTES") for name in ("INPUT0", "INPUT1")]
        for number, tensor in enumerate(inputs):
            shm.set_shared_memory_region(handle, [np.array(content, dtype=object)], offset=1024 * number)
            tensor.set_shared_memory("strings", len(content), offset=1024 * number)
        total = triton.InferRequestedOutput("OUTPUT0")
        total.set_shared_memory("strings", 1024, offset=2048)
        result = served.client.infer("simple_string", inputs, outputs=[total, triton.InferRequestedOutput("OUTPUT1")])
        texts = shm.get_contents_as_numpy(handle, np.object_, [1, 16], 2048)
        assert [int(text) for text in texts.flat] == [2 * number for number in range(16)]
        assert [int(text) for text in result.as_numpy("OUTPUT1").flat] == [0] * 16
        assert result.get_output("OUTPUT0").parameters["shared_memory_byte_size"].int64_param < 1024
        total.set_shared_memory("strings", 64)
        with pytest.raises(InferenceServerException, match=r"'OUTPUT0' \(64 bytes\) should be at least"):
            served.client.infer("simple_string", inputs, outputs=[total])
        inputs[0].set_shared_memory("strings", len(content) - 1)
        with pytest.raises(InferenceServerException, match="bytes, but only"):
            served.client.infer("simple_string", inputs)
    finally:
        served.client.unregister_system_shared_memory()
        shm.destroy_shared_memory_region(handle)


def test_strings(served: Served) -> None:
    metadata = served.client.get_model_metadata("simple_string")
    assert {tensor.datatype for tensor in (*metadata.inputs, *metadata.outputs)} == {"BYTES"}
    assert served.client.get_model_config("simple_string").config.input[0].data_type == DataType.TYPE_STRING
    for rows in (1, 5):
        numbers = np.arange(16 * rows).reshape(rows, 16) * 12345
        a, b = numbers.astype(str).astype(object), np.full((rows, 16), "-7", object)
        answers = served.ask("simple_string", {"INPUT0": a, "INPUT1": b})
        assert answers["OUTPUT0"].astype(str).astype(int).tolist() == (numbers - 7).tolist()
        assert answers["OUTPUT1"].astype(str).astype(int).tolist() == (numbers + 7).tolist()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (ONE, "the contents end before element 1 of 16"),
        (bytes([255] * 4) + b"1", "element 0 has 4294967295 bytes, but only 1 follow"),
        (ONE[:4] + bytes([255]) + ONE * 15, "element 0 is not UTF-8"),
        (ONE * 17, "5 bytes follow after element 15"),
    ],
)
def test_wrong_strings_are_refused(served: Served, content: bytes, reason: str) -> None:
    request = pb.ModelInferRequest(model_name="simple_string", raw_input_contents=[ONE * 16, content])
    for name in ("INPUT0", "INPUT1"):
        request.inputs.add(name=name, datatype="BYTES", shape=[1, 16])
    with pytest.raises(RefusedError) as caught:
        by_grpc(served.server, request)
    assert (caught.value.status, reason in caught.value.message) == ("INVALID_ARGUMENT", True)


@pytest.mark.parametrize("way", WAYS)
def test_strings_in_each_way(served: Served, way: str) -> None:
    texts = np.full((1, 16), b"21", object)
    answer = WAYS[way](served.server, request_of("simple_string", {"INPUT0": texts, "INPUT1": texts}))
    assert answer.raw_output_contents[0] == join_strings([b"42"]) * 16


def test_native_models_beside_them(served: Served) -> None:
    numbers = np.arange(16, dtype=np.int32).reshape(1, 16)
    for _ in range(3):
        answers = served.ask("simple", {"INPUT0": numbers, "INPUT1": numbers})
        np.testing.assert_array_equal(answers["OUTPUT0"], 2 * numbers)
        served.ask("gru", NETWORKS["gru"]().feeds(2))


def test_log_summary_and_configuration_say_so(served: Served) -> None:
    until(lambda: "ready: gRPC" in served.server.log.read_text())
    text = served.server.log.read_text()
    assert "WARNING model lstm, version 1: ready after " in text.replace("supervisor: ", "")
    assert " ERROR " not in text
    lines = {line.split()[0]: line for line in text.splitlines() if " ready" in line}
    assert lines["lstm"].endswith("ready, served by onnxruntime")
    assert lines["simple"].rstrip().endswith("ready")
    parameters = {name: served.client.get_model_config(name).config.parameters for name in ("lstm", "simple")}
    assert parameters["lstm"]["gangway_engine"].string_value == "onnxruntime"
    assert "RandomUniform" in parameters["lstm"]["gangway_fallback_reason"].string_value
    assert parameters["simple"]["gangway_engine"].string_value == "native"
    assert "gangway_fallback_reason" not in parameters["simple"]


def test_a_failure_concerns_one_request(served: Served) -> None:
    before = served.server.pids()["worker"]
    for index in (10, 3, -11, 4):
        if -10 <= index < 10:
            assert served.ask("gather", {"index": np.array([[index, 0]])})["y"][0, 0, 0] == 4 * index
        else:
            with pytest.raises(
                InferenceServerException, match=f"model 'gather': Gather: .* idx={index} must"
            ) as caught:
                served.ask("gather", {"index": np.array([[index, 0]])})
            assert "INVALID_ARGUMENT" in caught.value.status()
    assert served.server.pids()["worker"] == before


def island_feeds(count: int = 2, length: int = 7) -> dict[str, Array]:
    return {"x": floats(128, 64), "lengths": np.full(128, length), "count": np.array(count)}


def test_layers_of_a_compiled_model(served: Served) -> None:
    """One of them refuses a request, which harms no other."""
    assert served.client.get_model_config("islands").config.parameters["gangway_engine"].string_value == "native"
    log = served.server.log.read_text()
    assert re.search(
        r"INFO .*islands, version 1: .* compiled, onnxruntime computes 2 of \d+ layers: Loop, ReverseSequence, If", log
    )
    session = onnxruntime.InferenceSession(str(served.repository / "islands" / "1" / "model.onnx"))
    for length in (7, 513, 0):
        feeds = island_feeds(length=length)
        if length <= 512:
            expected = session.run(None, feeds)[0]
            np.testing.assert_allclose(served.ask("islands", feeds)["y"], expected, rtol=1e-4, atol=1e-4)
        else:
            with pytest.raises(InferenceServerException, match=r"'islands': ReverseSequence: .*: 513") as caught:
                served.ask("islands", feeds)
            assert "INVALID_ARGUMENT" in caught.value.status()


def test_a_request_that_is_given_up_disturbs_nobody(served: Served) -> None:
    steps = {"count": np.array([LONG_STEPS])}
    with pytest.raises(InferenceServerException) as caught:
        served.ask("loop", steps, client_timeout=0.2)
    assert "DEADLINE_EXCEEDED" in caught.value.status()
    begin = time.monotonic()
    np.testing.assert_array_equal(served.ask("loop", {"count": np.array([3])})["y"], np.eye(32))
    assert time.monotonic() - begin < 10
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while served.server.busy_slots():  # the next requests give back what the abandoned one left
        assert time.monotonic() < deadline
        served.ask("loop", {"count": np.array([3])})


@pytest.mark.parametrize("name", ["loop", "islands"])
def test_a_killed_worker_costs_no_request(served: Served, name: str) -> None:
    feeds = {"count": np.array([LONG_STEPS])} if name == "loop" else island_feeds(LONG_STEPS)
    expected = np.eye(32) if name == "loop" else served.ask(name, island_feeds(2))["y"]
    before = served.server.pids()["worker"]
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(served.ask, name, feeds)
        until(served.server.busy_slots)
        time.sleep(0.2)  # it runs; nobody can see how far it is
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        np.testing.assert_array_equal(request.result(TIMEOUT_SECONDS)["y"], expected)
    assert not set(before) & set(served.server.pids()["worker"])


@pytest.mark.long
@pytest.mark.skipif(len(available_cores()) < 2, reason="a gang needs two cores")
def test_a_gang_that_loses_a_worker_answers(tmp_path: Path) -> None:
    """The profile says that two cores are twice as fast. Workers are killed one after the other while both compute."""
    cache, network = Cache(tmp_path / "cache"), FOREIGN["loop"]()
    path = network.save(tmp_path / "models" / "loop" / "1" / "model.onnx")
    manifest = compile_model(path, "loop", cache, detect(), lambda phase, done, total: None).manifest
    write_profile(tmp_path / "cache", scaling(profile_model(tmp_path / "cache", manifest, available_cores(), 0.1)))
    flags = [f"--cache-dir={tmp_path / 'cache'}", "--no-profile"]
    with live_server(tmp_path / "models", flags) as server, triton.InferenceServerClient(server.url) as client:
        tensor = triton.InferInput("count", [1], "INT64")
        tensor.set_data_from_numpy(np.array([LONG_STEPS]))
        for rank in range(2):
            until(lambda: gang_of(client) == 2)  # which a killed worker's successor is in
            pids = sorted(server.pids()["worker"], key=lambda pid: min(os.sched_getaffinity(pid)))  # by core
            idle_ns = sum(map(cpu_ns, pids))  # either of them may be the one that calls
            with ThreadPoolExecutor(1) as pool:
                answering = pool.submit(client.infer, "loop", [tensor])
                while sum(map(cpu_ns, pids)) - idle_ns < BEGUN_NS:
                    assert not answering.done()
                os.kill(pids[rank], signal.SIGKILL)
                answer = answering.result(TIMEOUT_SECONDS)
            np.testing.assert_array_equal(answer.as_numpy("y"), np.eye(32))


def gang_of(client: triton.InferenceServerClient) -> int:
    """How many cores compute a short request."""
    tensor = triton.InferInput("count", [1], "INT64")
    tensor.set_data_from_numpy(np.array([3]))
    answer = client.infer("loop", [tensor], parameters={"gangway_stats": True}).get_response()
    return int(answer.parameters["ranks"].int64_param)


def test_without_privilege_its_threads_have_a_workers_priority(tmp_path: Path, compile_kept: CompileKept) -> None:
    path = FOREIGN["loop"]().save(tmp_path / "models" / "loop" / "1" / "model.onnx")
    compile_kept(path, "loop", tmp_path / "cache")
    flags = [f"--cache-dir={tmp_path / 'cache'}"]
    with live_server(tmp_path / "models", flags, prefix=WITHOUT_PRIVILEGE) as server:
        threads = [int(name) for pid in server.pids()["worker"] for name in os.listdir(f"/proc/{pid}/task")]
        assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_OTHER}
        assert {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads} == {LOWERED_WORKER_NICE}


def scaling(profile: Profile) -> Profile:
    """Return a profile of 1, 2, 4, ... cores that halve the time."""
    grid = tuple(tuple(1000.0 / cores for _ in profile.batches) for cores in profile.cores)
    layers = tuple(replace(layer, latency_us=(grid,)) for layer in profile.layers)
    return replace(profile, layers=layers, isolated_us=grid, together_us=grid, cores_whole=1.0)


def test_what_nobody_can_serve_is_refused(tmp_path: Path) -> None:
    path = FOREIGN["lstm"]().save(tmp_path / "models" / "broken" / "1" / "model.onnx")
    path.write_bytes(path.read_bytes()[:-30])
    command = [*GANGWAY, "serve", f"--model-repository={tmp_path / 'models'}", f"--cache-dir={tmp_path / 'cache'}"]
    command += ["--grpc-address=127.0.0.1", "--grpc-port=0", "--metrics-port=0", "--http-port=0"]
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
