"""Tiny models that add a number, so that an answer tells which file it comes from; and a server with some of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton

from testing.live_server import LiveServer
from testing.waiting import until
from tests.conftest import CompileKept
from tests.helpers import onnx_text

TIMEOUT_S = 60  # a job that gives way to everybody may take long
COMPILED = (1, 2, 3)  # numbers that are in the cache


def adder(number: float) -> bytes:
    """y = x + number, four columns."""
    graph = "(float[N, 4] x) => (float[N, 4] y) { y = Add(x, number) }"
    model = onnx_text.model_of(graph, number=np.full((1, 4), number, np.float32))
    return bytes(model.SerializeToString())


def write(repository: Path, name: str, number: float, version: int = 1, config: str | None = None) -> Path:
    """Write a version of a model, replacing files as a careful owner does: each in one step."""
    folder = repository / name / str(version)
    folder.mkdir(parents=True, exist_ok=True)
    replace(folder / "model.onnx", adder(number))
    if config is not None:
        replace(repository / name / "config.pbtxt", config.encode())
    return repository / name


def replace(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}")
    beside.write_bytes(content)
    beside.rename(path)


def fill_cache(folder: Path, compile_kept: CompileKept, *others: Path) -> Path:
    """Compile adders and others; return the cache that has them, below the folder."""
    for number in COMPILED:
        (folder / f"{number}.onnx").write_bytes(adder(number))
    (folder / "cache").mkdir(mode=0o755)
    for path in (*folder.glob("*.onnx"), *others):
        compile_kept(path, "adder", folder / "cache")
    return folder / "cache"


@dataclass(frozen=True)
class Controlled:
    """A server whose models change."""

    server: LiveServer
    client: triton.InferenceServerClient
    repository: Path
    second: Path  # another repository
    temporary: Path  # where the server keeps files of requests

    def uploads(self) -> list[Path]:
        """Return the folders of models whose files came in requests."""
        return list(self.temporary.glob("gangway-override-*/*"))

    def added(self, name: str, version: str = "", rows: int = 1) -> float:
        """Return the number that a model adds."""
        tensor = triton.InferInput("x", [rows, 4], "FP32")
        tensor.set_data_from_numpy(np.full((rows, 4), 10, np.float32))
        answer = self.client.infer(name, [tensor], version, client_timeout=TIMEOUT_S).as_numpy("y")
        assert answer.shape == (rows, 4)
        assert (answer == answer[0, 0]).all()
        return float(answer[0, 0]) - 10

    def index(self) -> dict[tuple[str, str], tuple[str, str]]:
        """Return state and reason by name and version."""
        models = self.client.get_model_repository_index().models
        return {(model.name, model.version): (model.state, model.reason) for model in models}

    def state(self, name: str, version: str = "1") -> tuple[str, str]:
        return self.index().get((name, version), ("", ""))

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        until(is_so, self.server.log.read_text)

    def wait_for_unloaded(self, name: str, version: str = "1") -> None:
        self.wait_until(lambda: self.state(name, version) == ("UNAVAILABLE", "unloaded"))


def flags(cache_dir: Path, second: Path, *more: str) -> Sequence[str]:
    return [f"--cache-dir={cache_dir}", f"--model-repository={second}", *more]
