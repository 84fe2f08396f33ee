"""The command that draws the papers' figures."""

from pathlib import Path

import pytest

from benchmarks.papers.__main__ import main


def test_an_unknown_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["absent", "-o", str(tmp_path)])
    assert exit_info.value.code == 2
    assert "unknown figure 'absent'; known: all" in capsys.readouterr().err
