"""`gangway serve --model-control-mode=poll`: the server follows what happens in its repositories."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from gangway.server.options.command_line import parse_options
from gangway.server.options.server import RepositoryOptions
from testing.live_server import live_server
from testing.repository import GANGWAY
from tests.conftest import CompileKept
from tests.helpers.adder_models import Controlled, fill_cache, flags, replace, write

POLL = ("--model-control-mode=poll", "--repository-poll-secs=0.1", "--strict-readiness=false")
DUPLICATE = "model appears in two or more repositories"


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory, compile_kept: CompileKept) -> Path:
    return fill_cache(tmp_path_factory.mktemp("compiled"), compile_kept)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, cache_dir: Path) -> Iterator[Controlled]:
    repository, second = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    write(repository, "first", 1)
    with (
        live_server(repository, flags(cache_dir, second, *POLL)) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        yield Controlled(server, client, repository, second, repository)
    assert server.process.returncode == 0


def test_without_strict_readiness_a_broken_model_is_no_obstacle(served: Controlled) -> None:
    write(served.repository, "broken", 1, config="max_batch_size: eight")
    served.wait_until(lambda: "config.pbtxt: line 1, column 17: " in served.state("broken", "")[1])
    assert served.client.is_server_ready() and not served.client.is_model_ready("broken")
    replace(served.repository / "broken" / "config.pbtxt", b"max_batch_size: 8")
    served.wait_until(lambda: served.client.is_model_ready("broken"))
    assert served.added("broken", rows=8) == 1
    assert served.state("broken", "") == ("", "")


FAULTY = """
import sys
from gangway.server.control.repository import trials
samples_of = trials.samples_of
def faulty(config, folder):
    return {}["fault"] if folder.name == "faulty" else samples_of(config, folder)
trials.samples_of = faulty
from gangway.server.cli import main
sys.exit(main(sys.argv[sys.argv.index("serve"):]))
"""


def test_a_fault_of_the_server_with_one_model_costs_no_other(tmp_path: Path, cache_dir: Path) -> None:
    repository, second = tmp_path / "models", tmp_path / "more"
    second.mkdir()
    write(repository, "sound", 1)
    options = flags(cache_dir, second, *POLL)
    with (
        live_server(repository, options, prefix=[sys.executable, "-c", FAULTY]) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        controlled = Controlled(server, client, repository, second, repository)
        write(repository, "faulty", 1)
        controlled.wait_until(lambda: controlled.state("faulty")[1] == "internal error, see the server's log")
        assert "KeyError: 'fault'" in server.log.read_text()
        assert controlled.added("sound") == 1


def test_models_come_change_and_go(served: Controlled) -> None:
    model = write(served.repository, "new", 1)
    served.wait_until(lambda: served.client.is_model_ready("new"))
    for number in (2, 3):
        write(served.repository, "new", number)
        served.wait_until(lambda number=number: served.added("new") == number)
    write(served.repository, "new", 1, version=5)
    served.wait_until(lambda: served.added("new") == 1)
    served.wait_for_unloaded("new", "1")
    shutil.rmtree(model / "5")
    served.wait_until(lambda: served.added("new") == 3)
    replace(model / "config.pbtxt", b"nonsense")
    served.wait_until(
        lambda: "model new: the new files cannot be loaded, so the loaded model stays" in served.server.log.read_text()
    )
    assert served.added("new") == 3
    shutil.rmtree(model)
    served.wait_until(lambda: not [key for key in served.index() if key[0] == "new"])
    with pytest.raises(InferenceServerException, match="'new' is not found"):
        served.added("new")


def test_a_name_in_two_repositories_is_served_by_neither(served: Controlled) -> None:
    write(served.repository, "twin", 1)
    served.wait_until(lambda: served.client.is_model_ready("twin"))
    write(served.second, "twin", 2)
    served.wait_until(lambda: (("UNAVAILABLE", DUPLICATE)) in [served.state("twin"), served.state("twin", "")])
    assert not served.client.is_model_ready("twin")
    shutil.rmtree(served.repository / "twin")
    served.wait_until(lambda: served.client.is_model_ready("twin"))
    assert served.added("twin") == 2


def test_an_error_at_the_start_may_be_the_end(tmp_path: Path) -> None:
    write(tmp_path, "bare", 1)
    command = [*GANGWAY, "serve", f"--model-repository={tmp_path}", "--exit-on-error=true", "--grpc-port=0"]
    command += ["--http-port=0", "--metrics-port=0"]
    command += [f"--cache-dir={tmp_path}", "--disable-auto-complete-config"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "gangway serve: models cannot be loaded: bare"
    assert "the config does not say platform or backend, input, output" in done.stderr


@pytest.mark.parametrize(
    "options",
    [
        ["--load-model=m"],
        ["--model-control-mode=explicit", "--load-model=*", "--load-model=m"],
        ["--model-control-mode=sometimes"],
        ["--repository-poll-secs=-1"],
        ["--strict-readiness=maybe"],
        ["--model-load-thread-count=0"],
    ],
)
def test_options_that_make_no_sense(tmp_path: Path, options: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options([f"--model-repository={tmp_path}", *options])


def test_options(tmp_path: Path) -> None:
    flags = ["--model-control-mode=explicit", "--load-model=b", "--load-model=a", "--load-model=b", "--exit-on-error=1"]
    options = parse_options([f"--model-repository={tmp_path}", *flags]).repository
    assert options == RepositoryOptions((tmp_path,), "explicit", load_models=("b", "a"), exit_on_error=True)


def test_clients_cannot_load(served: Controlled) -> None:
    with pytest.raises(InferenceServerException, match="not allowed if polling is enabled"):
        served.client.load_model("first")
    assert served.added("first") == 1
