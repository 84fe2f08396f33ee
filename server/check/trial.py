"""A server that tries models for `gangway check`: it loads one at a time, and says what comes of it."""

import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import grpc
from google.protobuf import json_format
from google.protobuf.message import Message

from gangway.artifact.settings import PREFIX
from gangway.executor.python_process import start_of
from gangway.protos import grpc_service_pb2 as pb
from gangway.protos.model_config_pb2 import ModelConfig

SERVICE: Final = "/inference.GRPCInferenceService/"
Response = TypeVar("Response", bound=Message)
POLL_S: Final = 0.5  # between two looks whether the server still runs
STOP_S: Final = 40
START_SECONDS: Final = 60  # of a Python model: people wait for what is said of it
START_LIMIT: Final = f"python,stub-timeout-seconds={START_SECONDS}"


@dataclass(frozen=True)
class Outcome:
    """What came of a load: the completed configuration, or why there is none."""

    config: ModelConfig | None = None
    reason: str = ""


class TrialServer:
    """A running server, which serves the folders that are linked or written into `repository`."""

    def __init__(self, repository: Path, channel: grpc.Channel) -> None:
        self.repository = repository
        self._channel = channel

    def load(self, name: str, config: ModelConfig | None = None) -> Outcome:
        """Load a model and unload it again; `config` replaces its config.pbtxt."""
        request = pb.RepositoryModelLoadRequest(model_name=name)
        if config is not None:
            request.parameters["config"].string_param = json_format.MessageToJson(config)
        try:
            self._call("RepositoryModelLoad", request, pb.RepositoryModelLoadResponse)
            answer = self._call("ModelConfig", pb.ModelConfigRequest(name=name), pb.ModelConfigResponse)
            self._call("RepositoryModelUnload", pb.RepositoryModelUnloadRequest(model_name=name),
                       pb.RepositoryModelUnloadResponse)  # fmt: skip
        except grpc.RpcError as error:
            return Outcome(reason=_reason(error.details() or str(error.code()), name))
        return Outcome(config=answer.config)

    def _call(self, method: str, request: Message, response: type[Response]) -> Response:
        call: Callable[..., Response] = self._channel.unary_unary(
            SERVICE + method,
            request_serializer=_serialise,
            response_deserializer=response.FromString,
        )
        return call(request)


def _serialise(message: Message) -> bytes:
    return message.SerializeToString()


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
    with tempfile.TemporaryDirectory(prefix="gangway-check-") as folder:
        repository, address, log = Path(folder, "models"), f"unix:{folder}/grpc.sock", Path(folder, "log")
        repository.mkdir()
        arguments = [folder, str(os.getpid()), f"--model-repository={repository}"]
        arguments += ["--model-control-mode=explicit", "--no-profile", f"--log-file={log}", f"--cache-dir={cache_dir}"]
        arguments += [f"--grpc-address={address}", "--allow-http=false", "--allow-metrics=false"]
        arguments += [f"--backend-config={setting}" for setting in (START_LIMIT, *backend_settings)]
        start = start_of("gangway.server.check.trial_process", arguments)
        environment = {name: value for name, value in start.environment.items() if not name.startswith(PREFIX)}
        with subprocess.Popen(
            start.command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as process:
            try:
                with grpc.insecure_channel(address) as channel:
                    _wait(process, channel, log)
                    yield TrialServer(repository, channel)
            finally:
                process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    process.wait(STOP_S)
                process.kill()


def _wait(process: "subprocess.Popen[bytes]", channel: grpc.Channel, log: Path) -> None:
    ready = grpc.channel_ready_future(channel)
    while process.poll() is None:
        with suppress(grpc.FutureTimeoutError):
            ready.result(POLL_S)
            return
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    raise RuntimeError(f"the server for trials has ended: {lines[-1] if lines else process.returncode}")
