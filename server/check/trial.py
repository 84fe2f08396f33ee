"""A server that tries models for `gangway check`: it loads one at a time, and says what comes of it."""

import os
import re
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from google.protobuf import json_format

from gangway.base.python_process import start_of
from gangway.base.settings import PREFIX
from gangway.protos import grpc_service_pb2 as pb
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.errors import RequestError
from gangway.server.own_client import OwnClient

POLL_S: Final = 0.05  # between two looks whether the server listens
STOP_S: Final = 40
START_SECONDS: Final = 60  # of a Python model: people wait for what is said of it
START_LIMIT: Final = f"python,stub-timeout-seconds={START_SECONDS}"


@dataclass(frozen=True)
class Outcome:
    """What came of a load: the completed configuration, or why there is none.

    `impossible`: what the server says of a latency target that is out of reach.
    """

    config: ModelConfig | None = None
    reason: str = ""
    impossible: str = ""


class TrialServer:
    """A running server, which serves the folders that are linked or written into `repository`."""

    def __init__(self, repository: Path, client: OwnClient, log: Path) -> None:
        self.repository = repository
        self._client = client
        self._log = log

    def load(self, name: str, config: ModelConfig | None = None) -> Outcome:
        """Load a model and unload it again; `config` replaces its config.pbtxt."""
        call, request = self._client.call, pb.RepositoryModelLoadRequest(model_name=name)
        begin = self._log.stat().st_size
        if config is not None:
            request.parameters["config"].string_param = json_format.MessageToJson(config)
        try:
            call("RepositoryModelLoad", request, pb.RepositoryModelLoadResponse)
            answer = call("ModelConfig", pb.ModelConfigRequest(name=name), pb.ModelConfigResponse)
            unload = pb.RepositoryModelUnloadRequest(model_name=name)
            call("RepositoryModelUnload", unload, pb.RepositoryModelUnloadResponse)
        except RequestError as error:
            return Outcome(reason=_reason(error.message or error.code.name, name))
        except OSError as error:
            return Outcome(reason=f"the server for trials has ended: {error}")
        return Outcome(config=answer.config, impossible=self._impossible(name, begin))

    def _impossible(self, name: str, begin: int) -> str:
        """Return what the log says from this byte on of a target that is out of reach; empty: nothing."""
        text = self._log.read_bytes()[begin:].decode(errors="replace")
        found = re.search(rf" {re.escape(name)}: its (latency target of .* ms is out of reach: .*)", text)
        return found[1] if found else ""


def _reason(details: str, name: str) -> str:
    """Return what the server says of a failed load without what it says of every failed load."""
    start = rf"(load failed for model|model load failed for model|failed to load) '{re.escape(name)}'[:,] "
    return re.sub(rf"^{start}|version \d+ is at UNAVAILABLE state: |;$", "", details)


@contextmanager
def trial_server(cache_dir: str, backend_settings: Sequence[str] = ()) -> Iterator[TrialServer]:
    """Run a server over an empty repository until the block ends, or this process does.

    It listens on a Unix socket in a folder of its own, so nobody else reaches it. Settings in variables of the caller
    do not reach it. `backend_settings`: as `gangway serve --backend-config` has them. Raises RuntimeError if it ends.
    """
    with tempfile.TemporaryDirectory(prefix="gangway-check-") as folder, _short(folder) as alias:
        repository, address, log = Path(folder, "models"), f"{alias}/grpc.sock", Path(folder, "log")
        repository.mkdir()
        arguments = [folder, str(os.getpid()), f"--model-repository={repository}"]
        arguments += ["--model-control-mode=explicit", "--no-profile", f"--log-file={log}", f"--cache-dir={cache_dir}"]
        arguments += [f"--grpc-address=unix:{address}", "--allow-http=false", "--allow-metrics=false"]
        arguments += [f"--backend-config={setting}" for setting in (START_LIMIT, *backend_settings)]
        start = start_of("gangway.server.check.trial_process", arguments)
        environment = {name: value for name, value in start.environment.items() if not name.startswith(PREFIX)}
        with subprocess.Popen(
            start.command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                with socket.socket(socket.AF_UNIX) as connection:
                    _connect(connection, address, process, log)
                    yield TrialServer(repository, OwnClient(connection), log)
            finally:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)
                process.kill()


@contextmanager
def _short(folder: str) -> Iterator[str]:
    """Yield a short path of a folder, for a socket: its path may have 107 bytes, which TMPDIR alone can have."""
    descriptor = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _connect(connection: socket.socket, address: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Connect as soon as the server listens. Raises RuntimeError if it ends before."""
    while process.poll() is None:
        with suppress(FileNotFoundError, ConnectionRefusedError):
            connection.connect(address)
            return
        time.sleep(POLL_S)
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    raise RuntimeError(f"the server for trials has ended: {lines[-1] if lines else process.returncode}")
