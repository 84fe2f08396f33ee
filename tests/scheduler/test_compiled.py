"""The scheduler compiled: it decides what it decides interpreted, and only where its sources are those compiled."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gangway.scheduler import compiled
from tests.scheduler.conftest import Server

ROOT = Path(__file__).parents[2]
FAILING = """
from gangway.scheduler.policies.gangway_order import in_order
in_order([None])
"""
TESTED_COMPILED = """
import sys, pytest
import gangway.scheduler  # before conftest.py, which would have the interpreted modules
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""
# Of what a turn consists of: pure, without clocks, and without values that no annotation allows.
OF_A_TURN = (
    "policies/test_precision_choice", "policies/test_turns", "batching/test_former", "test_arenas", "test_counters",
    "test_interference", "test_limits", "test_models", "test_requests", "test_waiting", "test_workers",
)  # fmt: skip


def python(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def fits() -> None:
    """Skip where somebody has edited the sources and not compiled them; `make test` compiles first."""
    why = python("-c", "from gangway.scheduler import WHY_INTERPRETED; print(WHY_INTERPRETED)").stdout.strip()
    if why:
        pytest.skip(f"the scheduler is interpreted: {why}")


@pytest.mark.usefixtures("fits")
def test_it_decides_the_same() -> None:
    compiled_runs, interpreted_runs = (
        decisions(python("-m", "tests.scheduler.every_decision", **variables))
        for variables in ({}, {compiled.INTERPRETED: "1"})
    )
    assert compiled_runs["why interpreted"] == "" != interpreted_runs["why interpreted"]
    assert compiled_runs["runs"] == interpreted_runs["runs"]
    assert compiled_runs["values"] == interpreted_runs["values"]
    assert sum(count for count, _ in compiled_runs["runs"].values()) > 5000


def decisions(run: "subprocess.CompletedProcess[str]") -> Any:
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.usefixtures("fits")
def test_values_are_what_annotations_say() -> None:
    """Compiled code raises TypeError where they are not; stubs may be wrong, as of `frozenset | dict.keys()`."""
    files = [f"tests/scheduler/{name}.py" for name in OF_A_TURN]
    ran = python("-c", TESTED_COMPILED, *files)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]


@pytest.mark.usefixtures("fits")
def test_a_traceback_names_files_and_lines() -> None:
    failed = python("-c", FAILING)
    assert 'scheduler/policies/gangway_order.py", line ' in failed.stderr and ", in in_order" in failed.stderr
    assert "AttributeError" in failed.stderr or "TypeError" in failed.stderr


@pytest.fixture
def server(tiny_model: tuple[Path, str]) -> Iterator[Server]:
    server = Server(*tiny_model, "gangway")
    yield server
    server.kill_all()


@pytest.mark.usefixtures("fits")
def test_a_server_runs_it(server: Server) -> None:
    with server.request() as request:
        server.outcome(request)
    assert f"{compiled.extension_name().rpartition('.')[2]}." in Path(f"/proc/{server.scheduler.pid}/maps").read_text()


def test_other_sources_have_another_extension(tmp_path: Path) -> None:
    for room in compiled.ROOMS:
        (tmp_path / room).mkdir()
    source, before = tmp_path / "executor" / "leases.py", compiled.extension_name(tmp_path)
    source.write_text("MAX_RANKS = 64")
    changed = compiled.extension_name(tmp_path)
    assert changed != before
    source.write_text("MAX_RANKS = 65")
    assert compiled.extension_name(tmp_path) != changed


def test_what_was_made_of_other_sources_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "scheduler"
    folder.mkdir()
    assert compiled.use(folder) == compiled.NOT_MADE
    (folder / "compiled_00000bad__mypyc.so").touch()
    assert compiled.use(folder) == compiled.CHANGED
    monkeypatch.setenv(compiled.INTERPRETED, "1")
    assert compiled.INTERPRETED in compiled.use(folder)
