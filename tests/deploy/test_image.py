"""The container images, built and run as orchestrators do: who calls them is outside, with Triton's own client.

`make image-test` runs this; it takes Docker, or what starts a daemon (testing/image/docker.py).
"""

import os
import shlex
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from gangway.base.process import LOWERED_WORKER_NICE
from gangway.zoo import write_model
from testing.image.build import ROOT, Images, build
from testing.image.container import HARDENED, Container, container, volume
from testing.image.docker import Docker, DockerMissingError, docker
from testing.live_server import reserved_port
from testing.load import TOLERANCE, relative_error
from testing.reference import Example, example_of
from testing.waiting import until
from tests.helpers import python_models

pytestmark = [pytest.mark.image, pytest.mark.timeout(900)]

MOST_BYTES = {"full": 600e6, "serve": 240e6}
ZOO = ("simple", "mlp")
PYTHON = "plus_one"
CALL_SECONDS = 30
CACHE_NAME = "gangway-cache"  # of the pages
STOP_SECONDS = 10  # Docker's own limit, then it kills
WIDE = """(float[n, 1, 64, 64] x) => (float[n, 8, 1, 1] y) {
    c = Conv<pads = [1, 1, 1, 1]>(x, a)  r = Relu(c)  d = Conv(r, b)  y = GlobalAveragePool(d) }"""
SERVE = ("serve", "--model-repository=/models", "--cache-dir=/cache")


@pytest.fixture(scope="module")
def daemon() -> Iterator[Docker]:
    try:
        with docker() as running:
            yield running
    except DockerMissingError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def images(daemon: Docker) -> Images:
    return build(daemon, "gangway-test:full", "gangway-test:serve")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two of the zoo, one in Python, one that onnxruntime serves, and one whose 8 rows want more than /dev/shm has."""
    folder = tmp_path_factory.mktemp("models")
    folder.chmod(0o755)
    for name in ZOO:
        write_model(folder, name)
    python_models.write(folder, PYTHON)
    add(folder, "whole", "(bfloat16[n, 4] x) => (bfloat16[n, 4] y) { y = Identity(x) }")
    random = np.random.default_rng(0)
    weights = {"a": random.random((512, 1, 3, 3), np.float32) - 0.5, "b": random.random((8, 512, 1, 1), np.float32)}
    add(folder, "wide", WIDE, weights)
    (folder / "wide" / "config.pbtxt").write_text("max_batch_size: 8")
    return folder


def add(models: Path, name: str, graph: str, weights: dict[str, np.ndarray] | None = None) -> None:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {graph}')
    model.graph.initializer.extend(onnx.numpy_helper.from_array(a, n) for n, a in (weights or {}).items())
    (models / name / "1").mkdir(parents=True)
    onnx.save(model, models / name / "1" / "model.onnx")


@pytest.fixture(scope="module")
def cache(daemon: Docker) -> Iterator[str]:
    with volume(daemon) as name:
        yield name


@pytest.fixture(scope="module")
def served(daemon: Docker, images: Images, models: Path, cache: str) -> Iterator[Container]:
    """The full image with everything compiled, which tests may stop and must start again."""
    with container(daemon, images.full, models, cache) as running:
        running.wait_until_ready()
        yield running


@pytest.fixture(scope="module")
def examples(models: Path) -> dict[str, Example]:
    return {name: example_of(name, models / name / "1" / "model.onnx") for name in ZOO}


def inputs_of(arrays: dict[str, np.ndarray]) -> list[triton.InferInput]:
    inputs = []
    for name, values in arrays.items():
        inputs.append(triton.InferInput(name, values.shape, np_to_triton_dtype(values.dtype)))
        inputs[-1].set_data_from_numpy(values)
    return inputs


def check_answers(server: Container, examples: dict[str, Example]) -> None:
    """Each model answers what onnxruntime does, and the one in Python one more than it gets."""
    with triton.InferenceServerClient(server.url) as client:
        x = python_models.four(1)
        assert (client.infer(PYTHON, inputs_of({"x": x}), client_timeout=CALL_SECONDS).as_numpy("y") == x + 1).all()
        for name, example in examples.items():
            result = client.infer(name, inputs_of(example.inputs), client_timeout=CALL_SECONDS)
            for output, expected in example.outputs.items():
                assert relative_error(result.as_numpy(output), expected) <= TOLERANCE


def test_the_first_page_works_as_written(
    daemon: Docker, images: Images, models: Path, cache: str, served: Container
) -> None:
    """Each page's `docker run`, with our image, ports, models and cache in place of those that it names."""
    for page in (ROOT / "docs" / "how-to" / "container.md", ROOT / "README.md"):
        text = page.read_text().replace("\\\n", " ")
        command = next(line for line in text.splitlines() if line.startswith("docker run"))
        words = shlex.split(command)[1:]
        assert words[-1] == "gangway" and "--publish" in words and f"{CACHE_NAME}:/cache" in words
        own = {
            "gangway": images.full,
            "$PWD/models:/models:ro": f"{models}:/models:ro",
            f"{CACHE_NAME}:/cache": f"{cache}:/cache",
        }
        with reserved_port() as port:
            ports = {
                "8001:8001": f"127.0.0.1:{port}:8001",
                "8000:8000": "127.0.0.1::8000",
                "8002:8002": "127.0.0.1::8002",
            }
            given = [ports.get(word, own.get(word, word)) for word in words[1:]]
            name = daemon.run("run", "--detach", *given)
            try:
                Container(daemon, name, f"127.0.0.1:{port}").wait_until_ready()
            finally:
                daemon.run("rm", "--force", name)


def test_images_are_small(daemon: Docker, images: Images) -> None:
    assert daemon.size_bytes(images.full) <= MOST_BYTES["full"]
    assert daemon.size_bytes(images.serve) <= MOST_BYTES["serve"]


def test_the_full_image_makes_tokens(daemon: Docker, images: Images) -> None:
    program = (
        "from tokenizers import Tokenizer, models; print(Tokenizer(models.WordLevel({'cat': 7})).encode('cat').ids)"
    )
    said = daemon.run("run", "--rm", "--entrypoint", "/opt/gangway/bin/python", images.full, "-c", program)
    assert said.strip() == "[7]"


def test_without_privilege_and_with_64_mb_of_shared_memory(served: Container, examples: dict[str, Example]) -> None:
    check_answers(served, examples)
    with triton.InferenceServerClient(served.url) as client:
        rows = {"x": np.ones((8, 1, 64, 64), np.float32)}
        assert client.infer("wide", inputs_of(rows), client_timeout=CALL_SECONDS).as_numpy("y").shape == (8, 8, 1, 1)
        scores = triton.InferInput("x", [1, 4], "BF16")
        scores.set_data_from_numpy(np.ones((1, 4), ml_dtypes.bfloat16))
        assert (client.infer("whole", [scores], client_timeout=CALL_SECONDS).as_numpy("y") == 1).all()
    assert served.inspect("{{.HostConfig.ShmSize}}") == str(64 << 20)
    states = {pid: (Path("/proc") / str(pid) / "status").read_text() for pid in served.processes()}
    for status in states.values():
        fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert fields["Uid"].split() == ["1000"] * 4
        assert int(fields["CapEff"], 16) == int(fields["CapPrm"], 16) == 0
    assert served.log().count("the system permits no") == 1
    # That onnxruntime serves a model is a warning.
    said = [line for line in served.log().splitlines() if "whole" not in line]
    assert not [line for line in said if " WARNING " in line or " ERROR " in line]


def test_front_ends_go_before_workers(served: Container) -> None:
    rooms = {"gangway.executor.worker": LOWERED_WORKER_NICE, "gangway.server.serving": 0, "gangway.scheduler": 0}
    for pid, command in served.processes().items():
        for room, nice in rooms.items():
            for thread in os.listdir(f"/proc/{pid}/task") if room in command else ():
                assert os.getpriority(os.PRIO_PROCESS, int(thread)) == nice, command
                assert os.sched_getscheduler(int(thread)) & ~os.SCHED_RESET_ON_FORK == os.SCHED_OTHER, command


def test_health_is_asked(served: Container) -> None:
    until(lambda: served.inspect("{{.State.Health.Status}}") != "starting")
    assert served.inspect("{{.State.Health.Status}}") == "healthy", served.inspect("{{json .State.Health}}")


def test_a_stop_under_load_loses_no_call_that_was_sent(served: Container, examples: dict[str, Example]) -> None:
    served.wait_until_ready()
    is_stopped, answers = threading.Event(), Counter[str]()
    lost: list[str] = []
    example = examples["mlp"]
    ((output, expected),) = example.outputs.items()

    def call_until_refused() -> None:
        with triton.InferenceServerClient(served.url) as client:
            while True:
                was_stopped = is_stopped.is_set()
                try:
                    result = client.infer("mlp", inputs_of(example.inputs), client_timeout=CALL_SECONDS)
                except InferenceServerException as error:
                    if not was_stopped or error.status() != "StatusCode.UNAVAILABLE":
                        lost.append(str(error))
                    return
                assert relative_error(result.as_numpy(output), expected) <= TOLERANCE
                answers["calls"] += 1

    clients = [threading.Thread(target=call_until_refused) for _ in range(8)]
    for client in clients:
        client.start()
    until(lambda: answers["calls"] >= 200)
    begin = time.monotonic()
    is_stopped.set()
    served.docker.run("stop", f"--time={STOP_SECONDS}", served.name)
    took_seconds = time.monotonic() - begin
    for client in clients:
        client.join(CALL_SECONDS)
    assert not lost and not any(client.is_alive() for client in clients)
    assert served.inspect("{{.State.ExitCode}}") == "0" and took_seconds < STOP_SECONDS
    check_start_from_cache(served, examples)


def check_start_from_cache(stopped: Container, examples: dict[str, Example]) -> None:
    before = stopped.log()
    stopped.docker.run("start", stopped.name)
    stopped.wait_until_ready()
    check_answers(stopped, examples)
    assert "compiling" not in stopped.log().removeprefix(before)


def test_the_image_that_serves_only_takes_the_cache_of_the_other(
    daemon: Docker, images: Images, models: Path, cache: str, served: Container, examples: dict[str, Example]
) -> None:
    command = (*SERVE, "--model-control-mode=explicit", *(f"--load-model={name}" for name in (*ZOO, PYTHON)))
    with container(daemon, images.serve, models, cache, command=command) as only:
        only.wait_until_ready()
        check_answers(only, examples)
        absent = "import importlib.util as u, sys; sys.exit(any(map(u.find_spec, sys.argv[1:])))"
        packages = ("tvm", "tvm_ffi", "onnx", "onnxruntime", "ml_dtypes")
        daemon.run("exec", only.name, "/opt/gangway/bin/python", "-c", absent, *packages)


@pytest.mark.parametrize("limit", ["--cpuset-cpus=1", "--cpus=1"])
def test_workers_are_as_many_as_cores_may_be_used(
    daemon: Docker,
    images: Images,
    models: Path,
    cache: str,
    served: Container,
    examples: dict[str, Example],
    limit: str,
) -> None:
    with container(daemon, images.full, models, cache, (*HARDENED, limit)) as limited:
        limited.wait_until_ready()
        check_answers(limited, examples)
        commands = limited.processes().values()
        (worker,) = [command for command in commands if "gangway.executor.worker" in command]
        assert "--core=1" in worker or "cpuset" not in limit


def test_a_limit_of_memory_is_kept(
    daemon: Docker, images: Images, models: Path, cache: str, served: Container, examples: dict[str, Example]
) -> None:
    flags = (*HARDENED, "--memory=400m", "--memory-swap=400m")
    with container(daemon, images.full, models, cache, flags) as limited:
        limited.wait_until_ready()
        check_answers(limited, examples)
        assert limited.inspect("{{.State.OOMKilled}}") == "false"


def test_a_killed_worker_comes_back(served: Container, examples: dict[str, Example]) -> None:
    served.wait_until_ready()

    def workers() -> list[int]:
        return [pid for pid, command in served.processes().items() if "gangway.executor.worker" in command]

    killed, *others = workers()
    os.kill(killed, signal.SIGKILL)
    until(lambda: killed not in (now := workers()) and len(now) == 1 + len(others))
    check_answers(served, examples)
    assert served.is_running()


def test_a_killed_container_comes_back(served: Container, examples: dict[str, Example]) -> None:
    served.docker.run("kill", served.name)
    assert not served.is_running()
    check_start_from_cache(served, examples)


def test_a_cache_that_cannot_be_written_serves_what_it_holds(
    daemon: Docker, images: Images, models: Path, cache: str, served: Container, examples: dict[str, Example]
) -> None:
    flags, command = (*HARDENED, f"--volume={cache}:/kept:ro"), (*SERVE[:2], "--cache-dir=/kept")
    with volume(daemon) as empty, container(daemon, images.full, models, empty, flags, command) as fixed:
        fixed.wait_until_ready()
        check_answers(fixed, examples)


def test_an_empty_cache_that_cannot_be_written_ends_the_start(daemon: Docker, images: Images, models: Path) -> None:
    command = ["run", "--rm", *HARDENED, f"--volume={models}:/models:ro", "--tmpfs=/cache:ro", images.full]
    with pytest.raises(subprocess.CalledProcessError) as failed:
        daemon.run(*command, seconds=30)
    assert failed.value.returncode == 2 and "argument --cache-dir: /cache cannot be used" in failed.value.stderr


def test_a_stop_in_the_first_moments_is_heard(daemon: Docker, images: Images, models: Path, cache: str) -> None:
    with container(daemon, images.full, models, cache) as new:
        begin = time.monotonic()
        daemon.run("stop", f"--time={STOP_SECONDS}", new.name)
        assert time.monotonic() - begin < STOP_SECONDS
        assert new.inspect("{{.State.ExitCode}}") in ("0", "143")
