"""`gangway serve --serve-while-compiling`: onnxruntime answers until the kernels are there, which nobody notices.

A test keeps the locks of artifacts, so their compilations wait as long as it wants. Then the artifacts are put into the
cache, as if another server had compiled them.
"""

import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from gangway.artifact.cache import Cache
from gangway.artifact.format import MANIFEST_FILE, Engine
from gangway.artifact.reader import ArtifactError, read_manifest
from gangway.compiler.key import model_key
from gangway.compiler.target import detect, for_file
from testing.live_server import live_server
from testing.processes import command_of, descendants_of
from tests.conftest import CompileKept
from tests.helpers import ensemble_configs
from tests.helpers.adder_models import Controlled, adder, fill_cache, write

pytestmark = pytest.mark.long

OFF = 'parameters { key: "serve_while_compiling" value: { string_value: "false" } }'
WRONG = OFF.replace("false", "perhaps")
STATES = "max_batch_size: 4 sequence_batching { }"
TEXT, LENGTH = "(float[N, S, 4] x) => (float[N, S, 4] y) { y = Relu(x) }", 5
FIXED = f'max_batch_size: 4 input {{ name: "x" dims: [ {LENGTH}, 4 ] }}'


@dataclass(frozen=True)
class Kitchen:
    """A cache in which compilations wait, and another one that has all artifacts."""

    cache: Cache
    full: Cache
    held: ExitStack

    def key(self, number: float) -> str:
        """Return the key of an adder; of 0 that of the text of one length."""
        path = self.full.root.parent / "of_key.onnx"
        path.write_bytes(adder(number) if number else text())
        return model_key(path, for_file(path, detect(), "fp32"), {} if number else {"S": LENGTH})

    def hold(self, *numbers: float) -> None:
        """Let no adder of these numbers be compiled from now on."""
        for number in numbers:
            self.held.enter_context(self.cache.lock(self.key(number)))

    def serve_up(self, *numbers: float) -> None:
        """Let these be compiled, and all others go on."""
        for number in numbers:
            shutil.copytree(self.full.root / self.key(number), self.cache.root / self.key(number))
        self.held.close()

    def stand_ins(self) -> list[Path]:
        """Return the artifacts that serve until others are compiled."""
        folders = [path.parent for path in self.cache.root.glob(f"[!.]*/{MANIFEST_FILE}")]
        found = []
        for folder in folders:
            try:
                found += [folder] * read_manifest(folder).is_stand_in
            except ArtifactError:
                assert not folder.exists()  # the server has removed it in between
        return found

    def unfinished(self) -> list[Path]:
        return list(self.cache.root.glob(".*"))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory, compile_kept: CompileKept) -> Cache:
    folder = tmp_path_factory.mktemp("full")
    cache = Cache(fill_cache(folder, compile_kept))
    path = folder / "text.onnx"
    path.write_bytes(text())
    compile_kept(path, "text", cache.root, dimensions={"S": LENGTH})
    return cache


def text() -> bytes:
    return bytes(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {TEXT}').SerializeToString())


@pytest.fixture
def kitchen(full: Cache, tmp_path: Path) -> Iterator[Kitchen]:
    (tmp_path / "cache").mkdir()
    with ExitStack() as held:
        yield Kitchen(Cache(tmp_path / "cache"), full, held)


@contextmanager
def served(kitchen: Kitchen, repository: Path, *more: str) -> Iterator[Controlled]:
    flags = [f"--cache-dir={kitchen.cache.root}", "--serve-while-compiling", *more]
    with live_server(repository, flags) as server, triton.InferenceServerClient(server.url) as client:
        yield Controlled(server, client, repository, repository, repository)
    assert server.process.returncode in (0, -signal.SIGKILL)


def is_native(server: Controlled, name: str) -> bool:
    parameters = server.client.get_model_config(name).config.parameters
    return bool(parameters["gangway_engine"].string_value == Engine.NATIVE)


def answers_of(server: Controlled, name: str) -> int:
    return int(server.client.get_inference_statistics(name).model_stats[0].inference_stats.success.count)


def shown(server: Controlled, name: str) -> Any:
    """Return what clients see of a model, but for what the server says of how it executes it."""
    config = server.client.get_model_config(name).config
    config.ClearField("parameters")
    return config, server.client.get_model_metadata(name), server.index()[name, "1"]


def compilations(server: Controlled) -> list[int]:
    """Return the processes that compile models; those that make stand-ins are others."""
    commands = {pid: command_of(pid) for pid in descendants_of(server.server.process.pid)}
    return [pid for pid, text in commands.items() if "-m gangway.compiler --serve=compile" in text]


def test_nobody_notices_that_kernels_take_over(kitchen: Kitchen, tmp_path: Path) -> None:
    repository, names = tmp_path / "models", ("one", "two", "both")
    for name, number in (("one", 1), ("two", 2)):
        write(repository, name, number)
    steps = [("one", "x=x", "y=t"), ("two", "x=t", "y=y")]
    ensemble_configs.write(repository, "both", ensemble_configs.config_of("x:FP32:4", "y:FP32:4", steps))
    kitchen.hold(1, 2)
    with served(kitchen, repository) as server:
        assert [server.added(name) for name in names] == [1, 2, 3]
        assert not (is_native(server, "one") or is_native(server, "two")) and len(kitchen.stand_ins()) == 2
        before = [shown(server, name) for name in names]
        over, sent, wrong = threading.Event(), [1], list[float]()

        def ask() -> None:
            client = triton.InferenceServerClient(server.server.url)
            asking = Controlled(server.server, client, repository, repository, repository)
            while not over.is_set():
                wrong.extend(number for number in (asking.added("both"),) if number != 3)
                sent[0] += 1

        asking = threading.Thread(target=ask)
        asking.start()
        kitchen.serve_up(1, 2)
        server.wait_until(lambda: is_native(server, "one") and is_native(server, "two"))
        over.set()
        asking.join()
        assert server.added("both") == 3 and not wrong
        assert [shown(server, name) for name in names] == before
        assert [answers_of(server, name) for name in names] == [sent[0] + 2, sent[0] + 2, sent[0] + 1]
        server.wait_until(lambda: not kitchen.stand_ins())
        assert not kitchen.unfinished()


def test_whatever_ends_a_model_ends_its_compilation(kitchen: Kitchen, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    write(repository, "one", 1)
    write(repository, "slow", 3, config=OFF)
    kitchen.hold(1, 2, 3)
    with served(kitchen, repository, "--model-control-mode=explicit", "--load-model=one") as server:
        server.wait_until(lambda: len(compilations(server)) == 1)
        first = compilations(server)
        write(repository, "one", 2)
        server.client.load_model("one")
        assert server.added("one") == 2
        server.wait_until(lambda: first != compilations(server) != [])
        server.client.unload_model("one")
        server.wait_until(lambda: not compilations(server))
        server.wait_for_unloaded("one")
        server.wait_until(lambda: not (kitchen.stand_ins() or kitchen.unfinished()))
        loading = threading.Thread(target=server.client.load_model, args=("slow",))
        loading.start()  # its configuration says that it is ready only when it is compiled
        server.wait_until(lambda: len(compilations(server)) == 1)
        server.client.load_model("one")
        assert server.added("one") == 2
        assert server.state("slow")[0] == "LOADING"
        kitchen.serve_up(3)
        loading.join()
        assert is_native(server, "slow")


def test_sizes_that_dims_name_are_compiled_later(kitchen: Kitchen, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    folder = write(repository, "text", 1, config=FIXED)
    (folder / "1" / "model.onnx").write_bytes(text())
    kitchen.hold(0)
    x = np.random.default_rng(0).standard_normal((2, LENGTH, 4)).astype(np.float32)
    tensor = triton.InferInput("x", x.shape, "FP32")
    tensor.set_data_from_numpy(x)
    with served(kitchen, repository) as server:
        before = shown(server, "text")
        np.testing.assert_array_equal(server.client.infer("text", [tensor]).as_numpy("y"), np.maximum(x, 0))
        assert not is_native(server, "text")
        kitchen.serve_up(0)
        server.wait_until(lambda: is_native(server, "text"))
        np.testing.assert_array_equal(server.client.infer("text", [tensor]).as_numpy("y"), np.maximum(x, 0))
        assert shown(server, "text") == before and answers_of(server, "text") == 2
    with served(kitchen, repository) as server:
        assert "until it is compiled" not in server.server.log.read_text()


def test_sequences_and_wrong_settings(kitchen: Kitchen, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    write(repository, "states", 1, config=STATES)
    write(repository, "wrong", 2, config=WRONG)
    write(repository, "other", 3)
    kitchen.hold(1)
    with served(kitchen, repository, "--model-control-mode=explicit", "--load-model=other") as server:
        loading = threading.Thread(target=server.client.load_model, args=("states",))
        loading.start()
        with pytest.raises(InferenceServerException, match='expected "true" or "false", got "perhaps"'):
            server.client.load_model("wrong")
        server.wait_until(lambda: compilations(server) != [])
        assert server.state("states")[0] == "LOADING"  # what a sequence has kept would be lost
        kitchen.serve_up(1)
        loading.join()
        assert is_native(server, "states")


def test_killed_processes(kitchen: Kitchen, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    write(repository, "one", 1)
    write(repository, "two", 2)
    kitchen.hold(1, 2)
    with served(kitchen, repository) as server:
        server.wait_until(lambda: compilations(server) != [])
        server.server.process.kill()
    with served(kitchen, repository) as server:
        os.kill(server.server.pids()["worker"][0], signal.SIGKILL)
        assert (server.added("one"), server.added("two")) == (1, 2)
        assert len(kitchen.stand_ins()) == 2  # nothing took them for what was compiled
        server.wait_until(lambda: compilations(server) != [])
        os.kill(compilations(server)[0], signal.SIGKILL)
        server.wait_until(lambda: "the compiler failed, so onnxruntime serves it" in server.server.log.read_text())
        kitchen.serve_up(1, 2)
        server.wait_until(lambda: is_native(server, "one") or is_native(server, "two"))
        assert (server.added("one"), server.added("two")) == (1, 2)
        server.wait_until(lambda: not kitchen.stand_ins())
        assert sorted(is_native(server, name) for name in ("one", "two")) == [False, True]
    with served(kitchen, repository) as server:  # once more, and all are there
        assert is_native(server, "one") and is_native(server, "two")
        assert not kitchen.stand_ins()
