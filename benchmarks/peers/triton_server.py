"""A real Triton for a benchmark: a repository whose models run onnxruntime, started, waited for, stopped."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import grpc
from google.protobuf import text_format

from gangway.protos import model_config_pb2 as mc
from testing.fetch.triton import BACKENDS, fetch, triton_environment
from testing.live_server import free_port, stop, wait_until_ready
from testing.processes import descendants_of
from testing.reference import symbolic_dimensions
from testing.repository import onnx_file

MODEL = Path(__file__).parent / "triton_model.py"
# Reserved for tensors on their way to and from each process of a model: an image or an answer of ours is 3 MB at most.
SHARED_MEMORY_BYTES = 16 << 20
SHARED_MEMORY = Path("/dev/shm")
ONLY_GRPC = (
    f"--backend-config=python,shm-default-byte-size={SHARED_MEMORY_BYTES}",
    "--allow-http=false",
    "--allow-metrics=false",
    "--allow-gpu-metrics=false",
    "--disable-auto-complete-config",
)


@dataclass(frozen=True)
class Configuration:
    """How each model is served: so many instances, each with so many threads of onnxruntime.

    `batch_rows`: Triton's dynamic batching makes batches of up to so many rows of what waits; 0: no batching.
    """

    instances: int
    threads: int
    batch_rows: int = 0
    spinning: bool = False

    @property
    def name(self) -> str:
        """As the tables call it."""
        spinning = ", spinning" if self.spinning else ""
        batches = f", batches to {self.batch_rows}" if self.batch_rows else ""
        return f"triton {self.instances}x{self.threads}{spinning}{batches}"


CONFIGURATIONS: Mapping[str, Configuration] = {
    configuration.name: configuration
    for configuration in (Configuration(1, 2), Configuration(2, 1), Configuration(1, 1))
}


@dataclass(frozen=True)
class TritonServer:
    """A server that answers at `url`."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def pids(self) -> list[int]:
        """The server and the processes of its models."""
        return [self.process.pid, *descendants_of(self.process.pid)]


def write_repository(
    folder: Path,
    source: Path,
    models: Sequence[str],
    configuration: Configuration,
    codes: Mapping[str, Path] = MappingProxyType({}),
) -> None:
    """Write a Triton repository of these models of a repository of ours, whose ONNX files it names.

    `codes`: models with a model.py of their own.
    """
    for name in models:
        config = text_format.Parse((source / name / "config.pbtxt").read_text(), mc.ModelConfig())
        path = onnx_file(source, name).resolve()
        config.ClearField("platform")
        config.ClearField("parameters")
        config.backend = "python"
        config.instance_group.add(count=configuration.instances, kind=mc.ModelInstanceGroup.KIND_CPU)
        if configuration.batch_rows:
            config.max_batch_size = configuration.batch_rows
            config.dynamic_batching.SetInParent()  # at once, as much as waits
        settings = {
            "onnx_file": str(path),
            "threads": str(configuration.threads),
            "spinning": str(int(configuration.spinning)),
            # Known to be 1, unless a batch may be of any size.
            "batch_dimensions": "" if configuration.batch_rows else ",".join(sorted(symbolic_dimensions(path))),
        }
        for key, value in settings.items():
            config.parameters[key].string_value = value
        version = folder / name / "1"
        version.mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(text_format.MessageToString(config))
        shutil.copy(codes.get(name, MODEL), version / "model.py")


@contextmanager
def triton_server(
    source: Path, models: Sequence[str], configuration: Configuration, codes: Mapping[str, Path] = MappingProxyType({})
) -> Iterator[TritonServer]:
    """Serve models of a repository of ours by Triton until the block ends. `codes`: as for `write_repository`.

    Raises FetchError when there is no Triton to be had, RuntimeError with the log's end when it does not start.
    """
    with tempfile.TemporaryDirectory() as name:
        repository = Path(name) / "models"
        write_repository(repository, source, models, configuration, codes)
        with triton_serving(repository) as served:
            yield served


@contextmanager
def triton_serving(
    repository: Path,
    flags: Sequence[str] = ONLY_GRPC,
    credentials: grpc.ChannelCredentials | None = None,
    path: str = "",
) -> Iterator[TritonServer]:
    """Serve a repository of Triton's until the block ends. `credentials` if the flags ask for TLS. `path`: of a Unix
    socket for gRPC; Triton adds a port to its name.

    Raises FetchError and RuntimeError as `triton_server`.
    """
    server = fetch()
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "triton.log"
        url = f"unix:{path}:{free_port()}" if path else f"127.0.0.1:{free_port()}"
        regions = f"{Path(name).name}-"  # a server that does not end in time leaves them behind
        process = _start(
            server, repository, url, log, [*flags, f"--backend-config=python,shm-region-prefix-name={regions}"]
        )
        try:
            wait_until_ready(url, process, log, credentials)
            yield TritonServer(url, process, log)
        finally:
            children = descendants_of(process.pid)
            stop(process)
            _kill(children)
            for region in SHARED_MEMORY.glob(f"{regions}*"):
                region.unlink()


def _start(server: Path, repository: Path, url: str, log: Path, flags: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the binary. It inherits no descriptor: a lock held by whoever runs us must not live on in it."""
    address, _, port = url.rpartition(":")
    options = [
        f"--model-repository={repository}",
        f"--backend-directory={BACKENDS}",
        f"--grpc-address={address}",
        f"--grpc-port={port}",
        *flags,
    ]
    with log.open("wb") as output:
        return subprocess.Popen(
            [str(server), *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=triton_environment(),
            close_fds=True,
        )


def _kill(pids: Sequence[int]) -> None:
    """End what a killed server left behind."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
