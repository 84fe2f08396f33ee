"""The command line: help, versions and mistakes. Each runs as a process, as a user starts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gangway.base.commands import COMMANDS
from gangway.server.options.command_line import parse_options
from tests.helpers.sampled import sampled


def gangway(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gangway.server.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_help_names_every_command() -> None:
    result = gangway("--help")
    assert result.returncode == 0
    assert all(name in result.stdout and command.summary in result.stdout for name, command in COMMANDS.items())


def test_help_imports_nothing_heavy() -> None:
    code = "import sys; from gangway.server.cli import main; main(['--help']); print(sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    loaded = result.stdout.splitlines()[-1]
    assert not any(f"'{name}'" in loaded for name in ("numpy", "grpc", "onnx", "tvm", "rich", "asyncio"))


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ((), 2, "usage: gangway"),
        (("--version",), 0, "gangway 0."),
        (("sreve",), 2, "unknown command 'sreve'; did you mean 'serve'?"),
        (("serve",), 2, "name a folder of models or an ONNX file"),
        (("serve", "--http-prot", "9000"), 2, "unrecognized arguments: --http-prot; did you mean '--http-port'?"),
        (("serve", "--port", "9000"), 2, "unrecognized arguments: --port; there is --grpc-port and --http-port"),
        (("serve", "--id", "--http-port", "1", "/no/such"), 2, "argument --id: expected one argument"),
        (("perf", "--raet", "5", "host:1", "other"), 2, "unrecognized arguments: --raet; did you mean '--rate'?"),
        (("zoo",), 0, "models (* those written when none is named"),
        (("serve", "--model-repository", "/no/such"), 2, "/no/such does not exist"),
        (("serve", "--model-repository", ".", "--cores", "0-4095"), 2, "not available to this process"),
        (("serve", "--model-repository", ".", "--scheduler", "fifo"), 2, "model_fcfs"),
        (("serve", "--model-repository", ".", "--grpc-port", "70000"), 2, "argument --grpc-port: 70000 is not a port"),
        (("serve", "--model-repository", ".", "--http-port", "x"), 2, "argument --http-port: x is not a port"),
        (("serve", "--model-repository", ".", "--max-shapes", "-1"), 2, "argument --max-shapes: -1 is not from 0"),
        (("serve", "--model-repository", ".", "--timeline", "/no/such/x"), 2, "argument --timeline: /no/such/x cannot"),
    ],
)
def test_answers(arguments: tuple[str, ...], status: int, said: str) -> None:
    result = gangway(*arguments)
    assert result.returncode == status
    assert said in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


def test_an_installation_that_is_not_whole_is_one_sentence() -> None:
    hidden = "import sys; sys.modules['gangway.executor._native'] = None; from gangway.server.cli import main"
    command = [sys.executable, "-c", f"{hidden}; sys.exit(main(['serve', '.']))"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("gangway serve: ") and "_native" in line and line.endswith("; install Gangway again")


@pytest.mark.parametrize("command", sampled(COMMANDS, ["serve", "client", "compile"]))
def test_every_command_has_help(command: str) -> None:
    result = gangway(command, "--help")
    assert result.returncode == 0, result.stderr
    assert f"usage: gangway {command}" in result.stdout
    assert len(result.stdout.splitlines()) > 8


@pytest.mark.parametrize("arguments", [("--help",), ("serve", "--help-all"), ("completion", "bash"), ("zoo", "--help")])
def test_whoever_reads_the_output_may_go(arguments: tuple[str, ...]) -> None:
    """As `head` does."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as output:
        command = [sys.executable, "-m", "gangway.server.cli", *arguments]
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, b"")


def test_repeated_repositories(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    options = parse_options(["--model-repository", str(tmp_path), "--model-store", str(tmp_path / "a"), "--cores", "0"])
    assert options.repository.folders == (tmp_path, tmp_path / "a")
    assert (options.grpc.port, options.general.cores) == (8001, (0,))
