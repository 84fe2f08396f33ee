"""Where Python models run: instances, environments, and configurations that model.py completes."""

import json
import os
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from testing.live_server import live_server
from testing.waiting import until
from tests.helpers.python_models import ADD, HEAD, config_of, four, parameter, write
from tests.helpers.served import Served, serving

pytestmark = pytest.mark.long

WHERE = """
    def execute(self, requests):
        import json, os, sys
        try:
            from only_here import VALUE
        except ImportError:
            VALUE = None
        about = {"prefix": sys.prefix, "value": VALUE, "path": sys.path, "threads": os.environ.get("OMP_NUM_THREADS"),
                 "gangway": getattr(__import__("gangway"), "__file__", None), "pid": os.getpid()}
        y = np.array([json.dumps(about).encode()], dtype=object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]) for _ in requests]
"""
TEXT = "y:STRING:1"
COMPLETES = """
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [4]})
        config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [4]})
        config.set_max_batch_size(8)
        config.set_dynamic_batching()
        return config
"""
CONTRADICTS = COMPLETES.replace(
    '"TYPE_FP32", "dims": [4]})\n        config.set_max', '"TYPE_INT8", "dims": [4]})\n        config.set_max'
)
MEETS = """
    def execute(self, requests):
        import os, time
        folder = os.path.join(os.path.dirname(__file__), "here")
        open(os.path.join(folder, str(os.getpid())), "w").close()
        end = time.monotonic() + 5
        while len(os.listdir(folder)) < 2 and time.monotonic() < end:
            time.sleep(0.001)
        met = np.array([len(os.listdir(folder))], np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", met)]) for _ in requests]
"""


def make_environment(folder: Path, value: int) -> Path:
    """An environment with numpy, and a module that no other one has."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    numpy = Path(np.__file__).parent
    for part in (numpy, numpy.with_name("numpy.libs")):
        if part.exists():
            (packages / part.name).symlink_to(part)
    (packages / "only_here.py").write_text(f"VALUE = {value}\n")
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("repository")
    environment = make_environment(tmp_path_factory.mktemp("environments") / "folder", 1)
    places = {
        "own": "",
        "folder": str(environment),
        "interpreter": str(environment / "bin" / "python"),
        "archive": "$$TRITON_MODEL_DIRECTORY/packed.tar.gz",
    }
    for name, place in places.items():
        more = parameter("EXECUTION_ENV_PATH", place) if place else ""
        write(repository, name, WHERE, config_of(outputs=TEXT, more=more))
    with tarfile.open(repository / "archive" / "packed.tar.gz", "w:gz") as archive:
        archive.add(environment, ".")
    write(repository, "completed", COMPLETES + ADD, "")
    write(repository, "partly", COMPLETES + ADD, 'backend: "python" input { name: "x" }')
    write(repository, "contradicted", CONTRADICTS + ADD, config_of(batch=4))
    write(repository, "too_large", COMPLETES + ADD, config_of(batch=16))
    write(
        repository,
        "fails",
        "    @staticmethod\n    def auto_complete_config(config):\n        raise RuntimeError('cannot tell')\n" + ADD,
        "",
    )
    write(repository, "meets", MEETS, config_of(outputs="y:INT32:1", more="instance_group { count: 2 }"))
    (repository / "meets" / "1" / "here").mkdir()
    broken = ("contradicted", "too_large", "fails")
    flags = ["--model-control-mode=explicit"]
    flags += [f"--load-model={folder.name}" for folder in repository.iterdir() if folder.name not in broken]
    with serving(repository, *flags, cwd=repository.parent) as served:
        yield served


@pytest.mark.parametrize(("name", "value"), [("own", None), ("folder", 1), ("interpreter", 1), ("archive", 1)])
def test_environments(served: Served, name: str, value: int | None) -> None:
    told = json.loads(served.infer(name, x=four(0))["y"][0])
    assert told["value"] == value
    assert (told["prefix"] == sys.prefix) == (value is None)
    assert told["gangway"] is None, "nothing of the server's is there but the room of Python models"
    assert told["threads"] == "1"
    if value:
        assert not any(path.startswith(sys.prefix) for path in told["path"])


def test_models_that_name_no_environment_have_that_of_the_flag(tmp_path: Path) -> None:
    default = make_environment(tmp_path / "default", 3)
    other = make_environment(tmp_path / "other", 4)
    write(tmp_path / "models", "silent", WHERE, config_of(outputs=TEXT))
    write(tmp_path / "models", "own", WHERE, config_of(outputs=TEXT, more=parameter("EXECUTION_ENV_PATH", other)))
    flags = [f"--cache-dir={tmp_path / 'cache'}", f"--backend-config=python,execution-env-path={default}"]
    with live_server(tmp_path / "models", flags) as server, triton.InferenceServerClient(server.url) as client:
        served = Served(server, client, tmp_path / "models")
        told = {name: json.loads(served.infer(name, x=four(0))["y"][0])["value"] for name in ("silent", "own")}
    assert told == {"silent": 3, "own": 4}


def test_an_environment_is_unpacked_once_and_removed_at_the_end(tmp_path: Path) -> None:
    environment = make_environment(tmp_path / "environment", 7)
    repository = tmp_path / "repository"
    more = parameter("EXECUTION_ENV_PATH", tmp_path / "packed.tar.gz")
    with tarfile.open(tmp_path / "packed.tar.gz", "w:gz") as archive:
        archive.add(environment, ".")
    for name in ("one", "two"):
        write(repository, name, WHERE, config_of(outputs=TEXT, more=more))
    with live_server(repository, [f"--cache-dir={tmp_path / 'cache'}"]) as server:
        with triton.InferenceServerClient(server.url) as client:
            served = Served(server, client, repository)
            prefixes = {json.loads(served.infer(name, x=four(0))["y"][0])["prefix"] for name in ("one", "two")}
        assert len(prefixes) == 1
        assert Path(prefixes.copy().pop()).exists()
    assert not Path(prefixes.pop()).exists()


@pytest.mark.parametrize("name", ["completed", "partly"])
def test_a_configuration_that_the_model_completes(served: Served, name: str) -> None:
    config = served.client.get_model_config(name).config
    assert (config.backend, config.max_batch_size, config.HasField("dynamic_batching")) == ("python", 8, True)
    assert [(tensor.name, list(tensor.dims)) for tensor in (*config.input, *config.output)] == [("x", [4]), ("y", [4])]
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert np.array_equal(served.infer(name, x=x)["y"], x + 1)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("contradicted", "configuration expects data_type TYPE_FP32"),
        ("too_large", "max_batch_size 16"),
        ("fails", "cannot tell"),
    ],
)
def test_a_model_that_contradicts_its_configuration(served: Served, name: str, why: str) -> None:
    with pytest.raises(InferenceServerException, match=why):
        served.client.load_model(name)


def test_instances_execute_side_by_side(served: Served) -> None:
    """Each waits until the other one has begun, too."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core executes one instance at a time")
    assert len(served.instances("meets")) == 2
    met: list[int] = []
    threads = [
        threading.Thread(target=lambda: met.append(int(served.infer("meets", x=four(0))["y"][0]))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert met == [2, 2]


def test_a_server_that_completes_nothing(tmp_path: Path) -> None:
    write(tmp_path / "repository", "completed", COMPLETES + ADD, 'backend: "python"')
    write(tmp_path / "repository", "add")
    flags = [f"--cache-dir={tmp_path / 'cache'}", "--disable-auto-complete-config", "--strict-readiness=false"]
    flags += ["--model-control-mode=explicit", "--load-model=add"]
    with live_server(tmp_path / "repository", flags) as server, triton.InferenceServerClient(server.url) as client:
        with pytest.raises(InferenceServerException, match="the config does not say input, output"):
            client.load_model("completed")
        assert np.array_equal(Served(server, client, tmp_path).infer("add", x=four(1))["y"], four(2))


def test_polling_sees_new_code_and_nothing_else(tmp_path: Path) -> None:
    """The process of a model writes nothing beside model.py, which would count as a change."""
    repository = tmp_path / "repository"
    folder = write(repository, "add", head=HEAD.replace("import numpy", "from .beside import ONE\nimport numpy"))
    (folder / "1" / "beside.py").write_text("ONE = 1\n")
    flags = [f"--cache-dir={tmp_path / 'cache'}", "--model-control-mode=poll", "--repository-poll-secs=1"]
    with (
        live_server(repository, flags, cwd=repository.parent) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        served = Served(server, client, repository)
        assert np.array_equal(served.infer("add", x=four(1))["y"], four(2))
        before = served.instances("add")
        time.sleep(2.5)
        assert served.instances("add") == before
        write(repository, "add", ADD.replace("np.float32(1)", "np.float32(3)"))
        until(lambda: np.array_equal(served.infer("add", x=four(1))["y"], four(4)))
