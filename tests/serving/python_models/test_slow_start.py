"""Python models whose `initialize` does not end: nobody else waits, the log names them, and they fail in time."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from testing.live_server import live_server, reserved_port
from testing.waiting import until
from tests.helpers import ensemble_configs
from tests.helpers.python_models import ADD, four, write
from tests.helpers.served import Served
from tests.helpers.whole_server import started

pytestmark = pytest.mark.long  # a start is slow after ten seconds

FLAG = "--backend-config=python,stub-timeout-seconds="
HANGS = """
    def initialize(self, args):
        import os, threading
        if os.path.exists("{gate}"):
            threading.Event().wait()
"""
LATE = "it is not initialised after {} s (--backend-config=python,stub-timeout-seconds), it waits in "


def reason_of(client: triton.InferenceServerClient, name: str) -> str:
    (reason,) = [model.reason for model in client.get_model_repository_index().models if model.name == name]
    return str(reason)


def is_ready(client: triton.InferenceServerClient, name: str) -> bool:
    try:
        return bool(client.is_model_ready(name))
    except InferenceServerException:  # the server has not begun
        return False


@contextmanager
def starting(models: Path, cache_dir: Path, *flags: str) -> Iterator[triton.InferenceServerClient]:
    with reserved_port() as port:
        address = ("--grpc-address=127.0.0.1", f"--grpc-port={port}")
        with (
            started(models, cache_dir, *address, *flags) as process,
            triton.InferenceServerClient(f"127.0.0.1:{port}") as client,
        ):
            yield client
            process.terminate()
            output, _ = process.communicate()
            assert process.returncode == 0, output


def test_a_start_goes_on_beside_models_that_hang(tmp_path: Path) -> None:
    gate, models = tmp_path / "gate", tmp_path / "models"
    gate.touch()
    for number in range(3):
        write(models, f"hangs{number}", HANGS.format(gate=gate) + ADD)
    write(models, "sound", ADD)
    steps = [("sound", "x=x", "y=y")]
    ensemble_configs.write(models, "pair", ensemble_configs.config_of("x:FP32:4", "y:FP32:4", steps, 0))
    with starting(models, tmp_path / "cache", f"{FLAG}13") as client:
        until(lambda: is_ready(client, "pair"))
        assert not is_ready(client, "hangs2")
        for number in range(3):
            until(lambda name=f"hangs{number}": LATE.format(13) in reason_of(client, name))


def test_a_polled_repository_is_followed_beside_a_model_that_hangs(tmp_path: Path) -> None:
    gate, models = tmp_path / "gate", tmp_path / "models"
    write(models, "first", HANGS.format(gate=gate) + ADD)
    flags = [f"--cache-dir={tmp_path / 'cache'}", "--model-control-mode=poll", "--repository-poll-secs=0.2"]
    with live_server(models, [*flags, f"{FLAG}30"]) as server, triton.InferenceServerClient(server.url) as client:
        served = Served(server, client, models)
        gate.touch()
        write(models, "hangs", HANGS.format(gate=gate) + ADD)
        until(lambda: "hangs, instance 0 is not initialised after 10 s, it waits in " in served.log())
        write(models, "late", ADD)
        until(lambda: is_ready(client, "late"))
        assert served.infer("late", x=four(1))["y"][0] == 2
        assert served.infer("first", x=four(1))["y"][0] == 2
        (pid,) = served.instances("first")
        os.kill(pid, signal.SIGKILL)  # its successor hangs
        until(lambda: "first, instance 0 is not initialised after 10 s" in served.log())
        until(lambda: LATE.format(30) in reason_of(client, "hangs"))
        until(lambda: "first, instance 0 cannot be initialised again: " + LATE.format(30) in served.log())
        gate.unlink()
        until(lambda: is_ready(client, "first"))
        assert served.infer("first", x=four(1))["y"][0] == 2
