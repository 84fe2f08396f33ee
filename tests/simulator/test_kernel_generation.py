"""Shipped models are as new as the kernels, and whoever changes kernels is told what to do."""

import json
import shutil
from pathlib import Path

import pytest

from gangway.simulator import kernel_generation
from gangway.simulator.kernel_generation import COMPILER, GenerationError, current_generation, main, sources_digest
from gangway.simulator.measured import read_measured, shipped_models


def test_shipped_models_were_measured_with_these_kernels() -> None:
    generation = current_generation()
    old = [name for name, path in shipped_models().items() if read_measured(path).kernel_generation < generation.number]
    assert not old, f"measured before generation {generation.number} of kernels: {', '.join(old)}; measure them anew"


@pytest.mark.parametrize("name", sorted(shipped_models()))
def test_shipped_models_say_how_good_they_are(name: str) -> None:
    model = read_measured(shipped_models()[name])
    assert model.model_name == name
    assert model.sessions >= 1 and 0 < model.spread < 0.15, "the quietest sessions agree, or the runs of the only one"
    assert model.target == "avx512", "one machine for all studies"


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """A copy of the compiler's sources."""
    return Path(shutil.copytree(COMPILER, tmp_path / "compiler", ignore=shutil.ignore_patterns("__pycache__")))


def test_only_what_makes_kernels_counts(compiler: Path) -> None:
    digest = sources_digest(compiler)
    assert digest == sources_digest()
    template = compiler / "kernels" / "templates" / "matmul.py"
    other = compiler / "frontend" / "importer.py"
    other.write_text(other.read_text() + "\nANYTHING = 1\n")
    template.write_text("# a comment\n" + template.read_text().replace('"""', '"""Other words. ', 1))
    assert sources_digest(compiler) == digest
    template.write_text(template.read_text() + "\nANYTHING = 1\n")
    assert sources_digest(compiler) != digest


@pytest.mark.long
def test_who_changes_kernels_says_whether_times_change(
    tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kernels.json"
    path.write_text(json.dumps({"number": 3, "sources": sources_digest(compiler)}))
    assert current_generation(path, compiler).number == 3
    path.write_text(json.dumps({"number": 3, "sources": "0" * 16}))
    with pytest.raises(GenerationError, match=r"--same, else --next, and measure"):
        current_generation(path)
    monkeypatch.setattr(kernel_generation, "GENERATION_FILE", path)
    assert main(["--same"]) == 0 and current_generation(path).number == 3
    assert main(["--next"]) == 0 and current_generation(path).number == 4
    path.unlink()
    assert main(["--next"]) == 1
    assert "kernels.json" in capsys.readouterr().err
