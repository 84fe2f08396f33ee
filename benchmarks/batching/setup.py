"""What the parts of `benchmarks.batching` share: what is asked for, servers with and without batching, one client."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.serving.servers import write_repository
from gangway.clients.command import server_times
from gangway.clients.connection import ServerConnection
from gangway.scheduler.profiles import ModelProfile, policy_profile
from testing.live_server import LiveServer, live_server
from testing.load import is_right, raw_channel, raw_infer
from testing.reference import Example, example_of
from testing.repository import compile_model, ensure_profiles, ensure_zoo, find_profile, onnx_file

MAX_ROWS = 64
DISTINCT_ROWS = 4  # of an example; larger batches repeat them
TIMEOUT_S = 60


@dataclass(frozen=True)
class Setting:
    """What the command line asks for. No `models`: those that a part is usually about."""

    repository: Path
    models: Sequence[str]
    seconds: float  # of measuring, for each model of a part
    cores: Sequence[int]
    triton: Sequence[str]
    regions: bool
    batches: Sequence[int]
    profile_seconds: float | None = None  # of a model that has no profile; None: as `gangway profile` does

    def models_or(self, usual: Sequence[str]) -> Sequence[str]:
        """Return the models to measure, written and profiled."""
        models = self.models or usual
        ensure_zoo(self.repository, models)
        ensure_profiles(self.repository, models, self.profile_seconds)
        return models

    def example(self, model: str, rows: int = DISTINCT_ROWS) -> Example:
        """Return inputs of a model, and what onnxruntime answers."""
        return example_of(model, onnx_file(self.repository, model), rows=rows)


def model_profile(repository: Path, model: str) -> ModelProfile:
    """Return what policies see of a model, as this machine has measured it. Raises LookupError if it has not."""
    folder = compile_model(repository, model)
    profile = find_profile(folder)
    if profile is None:
        raise LookupError(f"{model} has no profile on this machine: gangway profile {repository / model}")
    return policy_profile(profile, 0, model, profile.cores[-1])


@contextmanager
def gangway(setting: Setting, models: Sequence[str], batching: bool) -> Iterator[LiveServer]:
    """Serve models without latency targets, up to MAX_ROWS rows a request, with batching or without."""
    with tempfile.TemporaryDirectory() as folder:
        write_repository(Path(folder), setting.repository, dict.fromkeys(models), max_batch_size=MAX_ROWS)
        cores = ",".join(map(str, setting.cores))
        with live_server(Path(folder), [f"--cores={cores}", f"--batching={'auto' if batching else 'off'}"]) as server:
            yield server


@contextmanager
def with_and_without(setting: Setting, model: str) -> Iterator[tuple[LiveServer, LiveServer]]:
    """Serve a model twice at a time: with batching, without. One that is asked nothing leaves the cores alone."""
    with ExitStack() as stack:
        servers = [stack.enter_context(gangway(setting, [model], batching)) for batching in (True, False)]
        yield servers[0], servers[1]


@dataclass(frozen=True)
class Counted:
    """Of a model since a server began: rows that were inferred, and executions, each of one batch."""

    rows: int
    executions: int

    def rows_per_execution(self, before: "Counted") -> float:
        """Return the mean size of the batches since; 0 if there were none."""
        executions = self.executions - before.executions
        return (self.rows - before.rows) / executions if executions else 0.0


def counted(url: str, model: str) -> Counted:
    """Ask a server (Gangway or Triton) how much it has executed of a model."""
    with ServerConnection(url, TIMEOUT_S) as connection:
        stats = connection.model_statistics(model).model_stats[0]
    return Counted(stats.inference_count, stats.execution_count)


class Client:
    """One client of one model: a request at a time."""

    def __init__(self, url: str, model: str) -> None:
        self._model = model
        self._connection = ServerConnection(url, TIMEOUT_S)
        self._channel = raw_channel(url)
        self._infer = raw_infer(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()
        self._connection.__exit__(kind, error, trace)

    def check(self, example: Example) -> None:
        """Raise RuntimeError if the server's answer is not onnxruntime's."""
        if not is_right(self.ask(example.request), example.outputs):
            raise RuntimeError(f"{self._connection.url} answers {self._model} wrongly: nothing is measured")

    def ask(self, request: bytes) -> bytes:
        """Send a request; return its answer. Raises grpc.RpcError."""
        return self._infer(request, timeout=TIMEOUT_S)

    def served_ms(self, request: bytes) -> float:
        """Return for how long a request waited in the server and was computed, by the server's own account."""
        before = server_times(self._connection.model_statistics(self._model))
        self.ask(request)
        spent = server_times(self._connection.model_statistics(self._model)).since(before)
        return spent.mean_ms("queue") + spent.mean_ms("compute_infer")
