"""`gangway client` as a user runs it, against a real server."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from gangway.clients.command import main
from testing.live_server import LiveServer, free_port, live_server
from tests.helpers.onnx_text import save


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


Client = Callable[..., Done]


@pytest.fixture
def client(capsys: pytest.CaptureFixture[str]) -> Client:
    """Runs the command in this process."""

    def run(*arguments: str) -> Done:
        try:
            status = main(arguments)
        except SystemExit as ended:
            status = int(ended.code or 0)
        return Done(status, *capsys.readouterr())

    return run


def test_random_input_is_answered_with_scores_and_times(gangway_server: LiveServer, client: Client) -> None:
    done = client("mlp", "--url", gangway_server.url, "--top", "2", "--count", "3")
    assert done.returncode == 0, done.stderr
    assert "best classes of output" in done.stdout
    assert "mean of 3" in done.stdout
    assert "compute infer" in done.stdout


def test_files_are_sent_as_they_are(gangway_server: LiveServer, tmp_path: Path, client: Client) -> None:
    first, second = np.arange(16, dtype=np.int32)[None], np.full((1, 16), 1000, dtype=np.int32)
    np.save(tmp_path / "a.npy", first)
    np.save(tmp_path / "b.npy", second)
    inputs = [f"--input=INPUT0={tmp_path / 'a.npy'}", f"--input=INPUT1={tmp_path / 'b.npy'}"]
    done = client("simple", "--url", gangway_server.url, *inputs)
    assert done.returncode == 0, done.stderr
    assert "1000, 1001, 1002" in done.stdout  # OUTPUT0, the sum
    assert "-1000, -999, -998" in done.stdout  # OUTPUT1, the difference


@pytest.mark.long
def test_a_refusal_of_texts_that_nobody_said_names_the_way_to_say_them(client: Client, tmp_path: Path) -> None:
    hot = 'y = ai.onnx.ml.OneHotEncoder<cats_strings: strings = ["Rome", "Oslo"], zeros: int = 0>(city)'
    save(tmp_path / "models", "places", f"(string[N,1] city) => (float[N,1,2] y) {{ {hot} }}")
    np.save(tmp_path / "oslo.npy", np.array([["Oslo"]]))
    with live_server(tmp_path / "models", [f"--cache-dir={tmp_path / 'cache'}"]) as server:
        refused = client("places", "--url", server.url)
        answered = client("places", "--url", server.url, f"--input=city={tmp_path / 'oslo.npy'}")
        told = server.log.read_text()
    assert "trial" not in told and "runs alone" not in told  # trials ask with texts that the model knows
    assert refused.returncode == 1
    assert refused.stderr.endswith(
        "the texts of city were random digits: --input NAME=FILE for each input has others\n"
    )
    assert answered.returncode == 0 and "1" in answered.stdout, answered.stderr


def test_batches_are_answered_row_by_row(gangway_server: LiveServer, client: Client) -> None:
    done = client("mlp", "--url", gangway_server.url, "--batch", "4")
    assert done.returncode == 0, done.stderr
    assert "4x10" in done.stdout


def test_an_unknown_model_is_refused(gangway_server: LiveServer, client: Client) -> None:
    done = client("nothing", "--url", gangway_server.url)
    assert done.returncode == 1
    assert "NOT_FOUND" in done.stderr
    assert "nothing" in done.stderr


def test_a_wrong_file_is_the_users_mistake(gangway_server: LiveServer, tmp_path: Path, client: Client) -> None:
    done = client("mlp", "--url", gangway_server.url, "--input", f"input={tmp_path / 'absent.npy'}")
    assert done.returncode == 2
    assert "absent.npy" in done.stderr


def test_a_wrong_shape_is_refused_by_the_server(gangway_server: LiveServer, tmp_path: Path, client: Client) -> None:
    np.save(tmp_path / "short.npy", np.zeros((1, 15), dtype=np.float32))
    done = client("mlp", "--url", gangway_server.url, "--input", f"input={tmp_path / 'short.npy'}")
    assert done.returncode == 1
    assert "INVALID_ARGUMENT" in done.stderr


def test_no_server_is_said_plainly() -> None:
    command = [sys.executable, "-m", "gangway.server.cli", "client", "mlp", "--url", f"127.0.0.1:{free_port()}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    assert done.returncode == 3
    assert "no server answers" in done.stderr


@pytest.mark.parametrize("argument", ["--count=0", "--input=nofile", "--timeout-ms=-1"])
def test_arguments_without_meaning_are_refused(argument: str, client: Client) -> None:
    assert client("mlp", argument).returncode == 2
