"""How processes of the server are started: what Python gets, and where it looks for modules."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gangway.base.python_process import python_environment, start_of


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (None, None),
        ("", None),
        (":", None),
        ("/a:/b", "/a:/b"),
        ("/a:", "/a"),
        (":/a::/b", "/a:/b"),
        ("lib:/a", "{here}/lib:/a"),
        ("../lib", "{above}/lib"),
    ],
)
def test_folders_of_pythonpath(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, passed: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OTHER", "kept")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    if given is not None:
        monkeypatch.setenv("PYTHONPATH", given)
    expected = passed and passed.format(here=tmp_path, above=tmp_path.parent)
    assert (
        python_environment() == {**os.environ, "PYTHONPATH": expected}
        if expected
        else {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    )


@pytest.mark.parametrize("modes", [[], ["-I"], ["-P"]])
def test_a_started_module_imports_nothing_from_the_current_folder(tmp_path: Path, modes: list[str]) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "lib").mkdir()
    (tmp_path / "here" / "json.py").write_text("raise SystemExit('the current folder was imported')")
    (tmp_path / "lib" / "gangway_probe.py").write_text("import json, sys; print(json.dumps([sys.path, sys.argv[1:]]))")
    code = (
        "import subprocess; from gangway.base.python_process import start_of;"
        "start = start_of('gangway_probe', ['--x=1']);"
        "raise SystemExit(subprocess.run(start.command, env=start.environment).returncode)"
    )
    # The starting process has the current folder on its path, unless a mode keeps it away.
    variables = {**os.environ, "PYTHONPATH": f"../lib:{os.pathsep}"}
    done = subprocess.run(
        [sys.executable, *modes, "-c", code],
        cwd=tmp_path / "here",
        env=variables,
        text=True,
        capture_output=True,
        timeout=60,
        check=False,
    )
    if "-I" in modes:  # neither has PYTHONPATH
        assert "No module named gangway_probe" in done.stderr
        return
    path, arguments = json.loads(done.stdout)
    assert str(tmp_path / "here") not in path and "" not in path
    assert path[0] == str(tmp_path / "lib") and arguments == ["--x=1"]


def test_the_interpreter_is_this_one() -> None:
    assert start_of("gangway", ["zoo"]).command == [sys.executable, "-P", "-m", "gangway", "zoo"]
