"""The folder where a server is started: none of its files becomes code. And starts that cannot succeed, which end."""

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton

from gangway.zoo import write_model
from testing.live_server import reserved_port, stop, wait_until_ready
from testing.waiting import until
from tests.helpers.hostile_folder import ALL, OTHERS, SITE, hostile_folder, imported
from tests.helpers.python_models import ADD, HEAD, four, write
from tests.helpers.served import inputs_of
from tests.helpers.whole_server import TIMEOUT_SECONDS

pytestmark = pytest.mark.long

SCRIPT = [str(Path(sys.executable).with_name("gangway"))]
MODULE = [sys.executable, "-m", "gangway"]
PROCESSES = {
    "worker": "gangway.executor.worker",
    "scheduler": "gangway.scheduler.process",
    "front end": "gangway.server.serving.process",
}


@pytest.mark.parametrize(
    ("command", "names", "search"),
    [
        pytest.param(SCRIPT, ALL, None, id="command"),
        pytest.param(MODULE, SITE | OTHERS, None, id="module"),
        pytest.param(SCRIPT, OTHERS, "/nowhere:", id="empty entry of PYTHONPATH"),
    ],
)
def test_a_hostile_folder(tmp_path: Path, command: list[str], names: frozenset[str], search: str | None) -> None:
    """An ONNX file is compiled and measured, a Python model executed, requests are traced; all paths are relative."""
    folder = hostile_folder(tmp_path / "here", names)
    write_model(folder / "models", "mlp")
    write(folder / "models", "adds", ADD, head="import json, queue\n" + HEAD)
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"PYTHONPATH": search} if search else {}
    with ExitStack() as stack:
        ports = [stack.enter_context(reserved_port()) for _ in range(3)]
        options = [f"--{name}-port={port}" for name, port in zip(("grpc", "http", "metrics"), ports, strict=True)]
        options += [f"--{name}-address=127.0.0.1" for name in ("grpc", "http", "metrics")]
        options += ["--cache-dir=cache", "--profile-seconds=0.1", "--trace-config=triton,file=traces"]
        options += ["--trace-config=level=TIMESTAMPS", "--trace-config=rate=1", "--log-verbose=1", "--log-file=log"]
        log = folder / "log"
        process = stack.enter_context(
            subprocess.Popen([*command, "serve", "models", *options], cwd=folder, env=variables)
        )
        try:
            wait_until_ready(f"127.0.0.1:{ports[0]}", process, log)
            with triton.InferenceServerClient(f"127.0.0.1:{ports[0]}") as client:
                assert client.infer("adds", inputs_of({"x": four(2)})).as_numpy("y").tolist() == [3.0] * 4
                (x,) = client.get_model_metadata("mlp").inputs
                feed = np.ones([max(size, 1) for size in x.shape], np.float32)
                assert client.infer("mlp", inputs_of({x.name: feed})).get_response().outputs
            until(lambda: "its layers have been measured" in log.read_text())
        finally:
            status = stop(process)
    assert status == 0
    assert imported(folder) == []
    assert (folder / "traces").stat().st_size and any((folder / "cache").iterdir())


def test_check_and_tune_in_a_hostile_folder(tmp_path: Path) -> None:
    folder = hostile_folder(tmp_path / "here", ALL)
    write_model(folder / "models", "mlp")
    write(folder / "models", "adds")
    for words in (["check", "models"], ["tune", "models/mlp", "--seconds=1", "--trials=1"]):
        command = [*SCRIPT, *words, "--cache-dir=cache"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert imported(folder) == []


@pytest.mark.parametrize("role", PROCESSES)
def test_a_start_that_cannot_succeed_ends_with_a_sentence(tmp_path: Path, role: str) -> None:
    """As in a broken environment: the supervisor lives, and a process that it needs does not."""
    (tmp_path / "models").mkdir()
    (tmp_path / "lib").mkdir()
    text = (
        f"import os, sys\nif {PROCESSES[role]!r} in sys.orig_argv:\n    print('libfew.so: not found', file=sys.stderr)"
    )
    (tmp_path / "lib" / "sitecustomize.py").write_text(f"{text}\n    sys.stderr.flush()\n    os._exit(3)\n")
    options = ["--model-repository=models", "--cache-dir=cache", "--grpc-port=0", "--http-port=0", "--metrics-port=0"]
    begin = time.monotonic()
    done = subprocess.run(
        [*SCRIPT, "serve", *options, *(f"--{name}-address=127.0.0.1" for name in ("grpc", "http", "metrics"))],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": "lib"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        check=False,
    )
    assert done.returncode == 1 and time.monotonic() - begin < TIMEOUT_SECONDS
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"gangway serve: cannot start, because the {role}"), done.stderr
    assert last.endswith(" exited with status 3, 3 times in a row: libfew.so: not found")
    assert "Traceback" not in done.stderr
