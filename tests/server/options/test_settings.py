"""Settings from a file and from variables, the two helps, and near names."""

import os
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest

from gangway.base.command_line import parser_of
from gangway.base.commands import COMMANDS
from gangway.server.cli import main

MAX_COMMON_FLAGS = 25


@dataclass(frozen=True)
class Ran:
    """What a command has said, and its exit status."""

    returncode: int
    stdout: str
    stderr: str


def gangway(folder: Path, *arguments: str, **variables: str) -> Ran:
    """Run a command in this process, in a folder, with these variables: most of a process's time is its imports."""
    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(folder)
        for name in [name for name in os.environ if name.startswith("GANGWAY_")]:
            patch.delenv(name)
        for name, value in {"COLUMNS": "80", **variables}.items():
            patch.setenv(name, value)
        try:
            status = main(list(arguments))
        except SystemExit as stopped:
            assert isinstance(stopped.code, int)
            status = stopped.code
    return Ran(status, out.getvalue(), err.getvalue())


def effective(folder: Path, *arguments: str, **variables: str) -> dict[str, str]:
    """What --show-config says is set, with where each is from."""
    ran = gangway(folder, "serve", ".", *arguments, "--show-config", **variables)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert tomllib.loads(ran.stdout).keys() == {"serve"}
    return dict(line.split(" = ", 1) for line in ran.stdout.splitlines() if " = " in line and not line.startswith("#"))


def config(folder: Path, text: str) -> str:
    (folder / "gangway.toml").write_text(text)
    return "--config=gangway.toml"


def test_a_flag_counts_more_than_a_variable_and_that_more_than_a_file(tmp_path: Path) -> None:
    file = config(tmp_path, "http-port = 1\ngrpc-port = 1\n[serve]\ngrpc-port = 2\nmetrics-port = 3\n")
    variables = {"GANGWAY_METRICS_PORT": "4", "GANGWAY_HTTP_PORT": "5"}
    assert effective(tmp_path, file, "--http-port=6", **variables) == {
        "grpc-port": '"2"  # gangway.toml, [serve] grpc-port',
        "http-port": '"6"  # command line',
        "metrics-port": '"4"  # GANGWAY_METRICS_PORT',
    }
    assert effective(tmp_path, "--http-port", "6", GANGWAY_CONFIG="gangway.toml")["grpc-port"].startswith('"2"')


def test_lists_switches_and_truth_values(tmp_path: Path) -> None:
    file = config(
        tmp_path,
        '[serve]\nload-model = ["a", "b"]\nmodel-control-mode = "explicit"\nno-profile = true\nallow-http = false\n'
        "disable-auto-complete-config = false\nprofile-seconds = 1.5\n",
    )
    found = effective(tmp_path, file)
    assert found["load-model"].startswith('["a", "b"]')
    assert found["no-profile"].startswith("true") and found["allow-http"].startswith('"false"')
    assert found["disable-auto-complete-config"].startswith("false")
    assert effective(tmp_path, file, "--load-model=c")["load-model"] == '["c"]  # command line'
    assert "no-profile" not in effective(tmp_path, file, "--profile-seconds=2")  # two flags for one value
    assert effective(tmp_path, file, GANGWAY_NO_PROFILE="false")["no-profile"].startswith("false")


def test_what_is_shown_is_a_file_that_says_the_same(tmp_path: Path) -> None:
    ran = gangway(tmp_path, "serve", ".", "--show-config", "--load-model=ä\"'#", "--model-control-mode=explicit")
    again = effective(tmp_path, config(tmp_path, ran.stdout))
    assert {name: text.split("  # ")[0] for name, text in again.items()} == {
        "model-control-mode": '"explicit"',
        "load-model": '["ä\\"\'#"]',
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("htp-port = 1", "gangway.toml: unknown setting 'htp-port'; did you mean 'http-port'?"),
        ("[serve]\nhtp-port = 1", "gangway.toml, [serve]: unknown setting 'htp-port'; did you mean 'http-port'?"),
        ("[sreve]\nhttp-port = 1", "gangway.toml: no command is called 'sreve'; did you mean 'serve'?"),
        ("[serve]\nhelp = true", "unknown setting 'help'"),
        ("http-port = 70000", "argument --http-port: 70000 is not a port (of gangway.toml http-port)"),
        ("http-port = [1, 2]", "gangway.toml http-port: one value is expected, not a list"),
        ("http-port = 1979-05-27", "gangway.toml http-port: a text, a number, a truth value"),
        ("no-profile = 3", "gangway.toml no-profile: '3' is neither true nor false"),
        ("no-profile = []", "gangway.toml no-profile: one value is expected, not a list"),
        ("[serve]\n[serve.http]\nport = 1", "unknown setting 'http'"),
        ("serve = 3", "unknown setting 'serve'"),
        ("load-model = []\nhttp-port = ", "gangway.toml: Invalid value"),
        ("[client]\nurl = 3", ""),
        ("load-model = []", ""),
    ],
)
def test_files_are_checked(tmp_path: Path, text: str, said: str) -> None:
    ran = gangway(tmp_path, "serve", ".", config(tmp_path, text), "--show-config")
    assert said in ran.stderr
    assert ran.returncode == (2 if said else 0), ran.stderr
    assert "Traceback" not in ran.stderr


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("GANGWAY_HTP_PORT", "1", "the variable GANGWAY_HTP_PORT is no setting; did you mean GANGWAY_HTTP_PORT?"),
        ("GANGWAY_HTTP_PORT", "x", "argument --http-port: x is not a port (of GANGWAY_HTTP_PORT)"),
        ("GANGWAY_NO_PROFILE", "perhaps", "GANGWAY_NO_PROFILE: 'perhaps' is neither true nor false"),
        ("GANGWAY_CONFIG", "absent.toml", "--config absent.toml: No such file or directory"),
        ("GANGWAY_URL", "localhost:1", ""),  # of a client
        ("GANGWAY_SEARCH", "true", ""),
        ("GANGWAY_PORT", "tcp://10.0.0.1:8001", ""),  # of Kubernetes, for services called gangway and gangway-http
        ("GANGWAY_HTTP_PORT", "tcp://10.0.0.1:8000", ""),
        ("GANGWAY_SERVICE_PORT_HTTP", "8000", ""),
        ("GANGWAY_PORT_8001_TCP_ADDR", "10.0.0.1", ""),
    ],
)
def test_variables_are_checked(tmp_path: Path, variable: str, value: str, said: str) -> None:
    ran = gangway(tmp_path, "serve", ".", "--show-config", **{variable: value})
    assert said in ran.stderr
    assert ran.returncode == (2 if said else 0), ran.stderr


def test_other_commands_have_settings(tmp_path: Path) -> None:
    file = config(tmp_path, '[client]\nurl = "127.0.0.1:9"\nrandom = true\n[serve]\nhttp-port = 1\n')
    (tmp_path / "a.npy").touch()
    ran = gangway(tmp_path, "client", "x", file, "--input=a=a.npy")  # which excludes --random
    assert ran.returncode == 3
    assert "no server answers at 127.0.0.1:9" in ran.stderr
    ran = gangway(tmp_path, "client", "x", GANGWAY_URL="127.0.0.1:7")
    assert "no server answers at 127.0.0.1:7" in ran.stderr


@pytest.mark.parametrize("arguments", [("m=3", "--cores=2"), ("--cores=2", "m=3"), ("--cores", "2", "--", "m=3")])
def test_a_list_from_elsewhere_takes_no_argument_of_the_command_line(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    config(tmp_path, 'profile = ["absent.json"]')
    for where in ({"GANGWAY_PROFILE": "absent.json"}, {"GANGWAY_CONFIG": "gangway.toml"}):
        assert "absent.json: [Errno 2] No such file" in gangway(tmp_path, "capacity", *arguments, **where).stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--count=1",), 'count = "1"  # command line'),
        (("--coun", "1"), 'count = "1"  # command line'),
        (("--random",), "random = true  # command line"),  # which excludes --input
        (("--shape", "a:1", "--shape=b:2"), 'shape = ["a:1", "b:2"]  # command line'),
        (("--model-version=",), 'model-version = ""  # command line'),
        ((), 'count = "2"  # GANGWAY_COUNT'),
        ((), '# mean = "0.485,0.456,0.406"  # default'),
    ],
)
def test_the_command_line_is_read_as_the_command_reads_it(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    variables = {"GANGWAY_COUNT": "2", "GANGWAY_SHAPE": "c:3", "GANGWAY_INPUT": "a=absent.npy"}
    ran = gangway(tmp_path, "client", "x", *arguments, "--show-config", **variables)
    assert said in ran.stdout.splitlines(), ran.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_fits_a_screen_and_the_long_one_has_all(tmp_path: Path, command: str) -> None:
    short = gangway(tmp_path, command, "--help").stdout
    flags = [line for line in short.splitlines() if line.startswith("  -")]
    assert 3 <= len(flags) <= MAX_COMMON_FLAGS
    assert max(map(len, short.splitlines())) <= 80
    for line, below in pairwise(short.splitlines()):
        if line[:1].strip() and below[:1].strip():  # of a paragraph
            assert len(f"{line} {below.split()[0]}") > 78
    if "--help-all" in short:
        long = gangway(tmp_path, command, "--help-all").stdout
        assert len([line for line in long.splitlines() if line.startswith("  -")]) > len(flags)
        assert set(short.split()) <= set(long.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_flag_without_a_value_says_that_it_has_none(tmp_path: Path, command: str) -> None:
    flags = [name for action in parser_of(command)._actions if action.nargs == 0 for name in action.option_strings]
    assert "--show-config" in flags
    for flag in flags:
        if not flag.startswith("--"):
            continue
        for value in ("false", "true", "x"):
            ran = gangway(tmp_path, command, f"{flag}={value}")
            assert ran.returncode == 2
            said = f": takes no value, but has '{value}': give the flag alone, or leave it out\n"
            assert flag in ran.stderr and said in ran.stderr, ran.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("serve", "--htp-port=1"), "unrecognized arguments: --htp-port=1; did you mean '--http-port'?"),
        (("serve", "--model-repo=x"), "unrecognized arguments: --model-repo=x; did you mean '--model-repository'?"),
        (("client", "x", "--cuont", "3"), "unrecognized arguments: --cuont; did you mean '--count'?"),
        (("client", "x", "--zzz"), "unrecognized arguments: --zzz\n"),
        (("serve", ".", "--scheduler=vetair"), "veltair_as; did you mean 'veltair'?"),
        (("clinet", "x"), "unknown command 'clinet'; did you mean 'client'?"),
        (("completion", "fihs"), "did you mean 'fish'?"),
        (("serve", ".", "--model-control-mode=explcit"), "did you mean 'explicit'?"),
    ],
)
def test_near_names(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    ran = gangway(tmp_path, *arguments)
    assert ran.returncode == 2
    assert said in ran.stderr
