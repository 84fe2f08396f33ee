"""Relative paths of flags, variables and files: absolute once they are read, whatever folder a process works in."""

from pathlib import Path

import pytest

from gangway.artifact.cache import usable_cache_dir
from gangway.server.options.command_line import ServeOptions, parse_options

FILES = ("model.onnx", "other.onnx", "chain.pem")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which holds a repository, files and a link to a folder."""
    for name in FILES:
        (tmp_path / name).touch()
    (tmp_path / "models").mkdir()
    (tmp_path / "link").symlink_to("models")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def paths_of(options: ServeOptions) -> list[Path]:
    """Every path that options hold."""
    repository, general = options.repository, options.general
    files = [path for _, path in repository.files]
    texts = [Path(text) for text in (options.logs.file, options.traces.file, options.models.python_environment) if text]
    written = [path for path in (general.trace_decisions, general.timeline) if path]
    return [*repository.folders, *files, general.cache_dir, *texts, *written]


def test_flags(here: Path) -> None:
    flags = ["models", "--model-repository=link", "model.onnx", "second=other.onnx", "--cache-dir=made/cache"]
    flags += ["--log-file=log", "--trace-config=triton,file=traces", "--trace-decisions=decisions", "--timeline=times"]
    flags += ["--backend-config=python,execution-env-path=models"]
    expected = ["models", "link", "model.onnx", "other.onnx", "made/cache", "log", "traces", "models", "decisions"]
    assert paths_of(parse_options(flags)) == [here / name for name in (*expected, "times")]


def test_variables_and_files(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "settings.toml").write_text('model-repository = ["./link"]\n[serve]\nlog-file = "there.log"\n')
    monkeypatch.setenv("GANGWAY_CACHE_DIR", "cache")
    monkeypatch.setenv("GANGWAY_TIMELINE", "times")
    options = parse_options(["--config=settings.toml"])
    assert paths_of(options) == [here / name for name in ("link", "cache", "there.log", "times")]


def test_the_home_may_be_relative(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "models")
    assert usable_cache_dir("") == here / "models" / ".cache" / "gangway"


def test_what_is_wrong_is_said_in_the_words_that_were_given(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["absent"])
    assert "error: argument MODELS: absent does not exist" in capsys.readouterr().err
