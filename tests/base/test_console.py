"""What users have named is text in whatever is shown, and what cannot be shown ends nothing that matters."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gangway.base.console import Console, ProgressBars, Table

NAMES = ("[/* columns */ 4]", "[bold]x[/bold]", ":smile:", "[link=http://x]y")


def test_names_are_no_markup() -> None:
    console = Console(record=True, width=60)
    table = Table("name", title=NAMES[0] + "\x1b[31m")
    for name in (*NAMES, "a\x1b[31mb\rc"):
        table.add_row(name)
    console.print(table)
    console.print(*NAMES, markup=True, emoji=True, soft_wrap=True)
    text = console.export_text()
    assert all(text.count(name) >= 2 for name in NAMES)
    assert r"a\x1b[31mb\rc" in text and "\x1b" not in text


def test_nothing_of_a_table_is_left_out_in_narrow_terminals() -> None:
    words = [f"{letter}" * 30 for letter in "abcdefgh"]
    for width in (40, 80, 200):
        console = Console(record=True, width=width)
        table = Table(*words, title="a title that is longer than its table")
        table.add_row(*(word.upper() for word in words))
        console.print(table)
        text = console.export_text()
        assert all(text.count(letter) >= 30 for letter in "abcdefghABCDEFGH")
        assert "…" not in text


def test_no_line_of_a_table_ends_with_blanks() -> None:
    console = Console(record=True, width=160)
    table = Table("model", "status", title="a title")
    table.add_row("first", "ready", style="bold")
    table.add_section()
    table.add_row("second", f"not ready: {'why ' * 60}")
    console.print(table)
    lines = console.export_text().splitlines()
    assert [line for line in lines if line != line.rstrip()] == []
    assert (lines[0], lines[1].split(), lines[2].split()) == ("a title", ["model", "status"], ["first", "ready"])


def test_a_bar_leaves_nothing_where_there_is_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for console in (Console(), Console(stderr=True)):
        with ProgressBars(console) as bar:
            bar.update(bar.add_task("x", total=1.0), completed=1)
    assert capsys.readouterr() == ("", "")


def test_names_are_no_markup_beside_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", shown := io.StringIO())
    console = Console(stderr=True, force_terminal=True, width=80)
    with ProgressBars(console, columns=24) as bar:
        bar.add_task("[/x] {y} :smile:", total=1.0)
    assert "[/x] {y} :smile:" in shown.getvalue()


def test_a_bar_that_nobody_can_see_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        with ProgressBars(Console(stderr=True, force_terminal=True)) as bar:
            bar.add_task("x", total=1.0)
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


@pytest.mark.parametrize(
    ("redirection", "status", "said"),
    [
        ("> /dev/full", 1, "No space left on device\n"),
        (">&-", 0, ""),
        ("2>&- > {out}", 0, ""),
        ("2> /dev/full > {out}", 0, ""),
    ],
)
def test_a_command_whose_output_goes_nowhere(tmp_path: Path, redirection: str, status: int, said: str) -> None:
    command = f"{sys.executable} -m gangway.server.cli zoo {tmp_path}/models simple"
    script = f"{command} {redirection.format(out=tmp_path / 'out')}"
    done = subprocess.run(["sh", "-c", script], check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr.rpartition(": ")[2]) == (status, said)
    assert (tmp_path / "models" / "simple" / "1" / "model.onnx").exists()


def test_an_encoding_without_the_character(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    command = [sys.executable, "-m", "gangway.server.cli", "zoo", str(tmp_path / "mödels"), "simple"]
    done = subprocess.run(command, capture_output=True, env=environment, check=True, timeout=60)
    assert rb"m\xf6dels" in done.stdout
