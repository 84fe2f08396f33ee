"""A served repository as tests use it: the server, a client, and what its log and its models' statistics say."""

import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import np_to_triton_dtype

from gangway.clients.inputs import outputs_of
from testing.live_server import LiveServer, live_server
from testing.processes import command_of, descendants_of
from testing.waiting import until
from tests.helpers.scraped_metrics import Scrape, Scraped
from tests.helpers.ways import WAYS, Array, request_of

TIMEOUT_S = 60


@dataclass(frozen=True)
class Served:
    """A server and a client of it."""

    server: LiveServer
    client: triton.InferenceServerClient
    repository: Path

    @cached_property
    def channel(self) -> grpc.Channel:
        """For messages as they are."""
        return grpc.insecure_channel(self.server.url)

    def infer(self, name: str, timeout_s: float = TIMEOUT_S, **feeds: Array) -> dict[str, Array]:
        """The outputs of a request."""
        return self.ask(name, feeds, client_timeout=timeout_s)

    def ask(self, name: str, feeds: dict[str, Array], client_timeout: float = TIMEOUT_S, **more: Any) -> dict[str, Any]:
        """The outputs of a request with more options of the client."""
        result = self.client.infer(name, inputs_of(feeds), client_timeout=client_timeout, **more)
        return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}

    def over(self, way: str, name: str, /, outputs: Sequence[str] = (), **feeds: Array) -> dict[str, Array]:
        """The outputs of a request in one of WAYS. Raises RefusedError."""
        return outputs_of(WAYS[way](self.server, request_of(name, feeds, outputs)))

    def executed(self, name: str, code: str) -> str:
        """What a Python model answers that `executes` this."""
        answer: bytes = self.infer(name, x=np.array([code.encode()], dtype=object))["y"][0]
        return answer.decode()

    def instances(self, name: str) -> list[int]:
        """The processes of a Python model's instances."""
        pids = descendants_of(self.server.process.pid)
        folder = str(self.repository / name)
        return [pid for pid in pids if "python_backend" in command_of(pid) and _folder_of(pid) == folder]

    def log(self) -> str:
        """What the server has written."""
        return self.server.log.read_text()

    def lines(self, pattern: str) -> list[str]:
        """What the log has of a regular expression."""
        return re.findall(pattern, self.log())

    def wait_for(self, pattern: str, count: int = 1) -> None:
        """Return when the log has so many of a regular expression."""
        until(lambda: len(self.lines(pattern)) >= count, self.log)

    def statistics(self, name: str) -> Any:
        """What the server counts of a model."""
        return self.client.get_inference_statistics(name).model_stats[0]

    def parameter(self, name: str, key: str) -> str:
        """A parameter of a model's configuration, such as what executes it, gangway_engine."""
        return str(self.client.get_model_config(name).config.parameters[key].string_value)

    def scrape(self) -> Scrape:
        """All metrics."""
        return Scraped(self.server).scrape()

    def await_rest(self) -> None:
        """Return when no request has a slot, memory or a core."""
        until(lambda: not self.server.busy_slots())
        until(lambda: not any(map(self.scrape(), ("gangway_heap_used_bytes", "gangway_cores_busy"))))

    def kill(self, role: str) -> int:
        """Kill the first process of a role, as of LiveServer.pids; return its number."""
        pid = self.server.pids()[role][0]
        os.kill(pid, signal.SIGKILL)
        return pid


S = TypeVar("S", bound=Served)


@contextmanager
def serving(repository: Path, *flags: str, kind: Callable[..., S] = Served, **options: Any) -> Iterator[S]:
    """Serve a repository until the block ends, with an empty cache unless the flags name one; it must end well.

    `options`: of `live_server`.
    """
    with tempfile.TemporaryDirectory() as cache:
        own = () if any(flag.startswith("--cache-dir=") for flag in flags) else (f"--cache-dir={cache}",)
        with (
            live_server(repository, [*own, *flags], **options) as server,
            triton.InferenceServerClient(server.url) as client,
        ):
            served = kind(server, client, repository)
            yield served
            if "channel" in vars(served):
                served.channel.close()
        assert server.process.returncode == 0


def inputs_of(feeds: dict[str, Array], module: Any = triton) -> list[Any]:
    """Inputs of a request, of Triton's client for gRPC or for HTTP."""
    inputs = []
    for name, array in feeds.items():
        inputs.append(module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    return inputs


def _folder_of(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/cwd").readlink())
    except OSError:
        return ""
