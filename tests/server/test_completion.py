"""`gangway completion`: the script completes in a real shell."""

import shutil
import subprocess
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from gangway.base.commands import COMMANDS
from gangway.server.completion_command import main
from testing.repository import GANGWAY


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("completion")
    made = {}
    for shell in ("bash", "zsh", "fish"):
        made[shell] = folder / shell
        with made[shell].open("w") as script, redirect_stdout(script):  # in this process: one import of TVM for all
            assert main([shell]) == 0
    return made


def completed(script: Path, *words: str) -> list[str]:
    """What bash offers for the last word."""
    quoted = " ".join(f"'{word}'" for word in ("gangway", *words))
    code = f"source {script}; COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; _shtab_gangway; echo ${{COMPREPLY[@]}}"
    ran = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return ran.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("",), set(COMMANDS)),
        (("pro",), {"profile"}),
        (("serve", "--metrics-p"), {"--metrics-port"}),
        (("serve", "--batching", ""), {"auto", "off"}),
        (("completion", "f"), {"fish"}),
    ],
)
def test_bash_completes(scripts: dict[str, Path], words: tuple[str, ...], offered: set[str]) -> None:
    found = set(completed(scripts["bash"], *words))
    assert offered <= found
    assert all(word.startswith(words[-1]) for word in found)


def test_bash_completes_files(scripts: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "net.onnx").touch()
    assert completed(scripts["bash"], "serve", f"{tmp_path}/ne") == [f"{tmp_path}/net.onnx"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_all_commands_and_flags(scripts: dict[str, Path], shell: str) -> None:
    text = scripts[shell].read_text()
    assert all(name in text for name in (*COMMANDS, "metrics-port", "cuda-memory-pool-byte-size"))
    if path := shutil.which(shell):
        subprocess.run([path, "-n", scripts[shell]], timeout=60, check=True)


def test_another_shell_is_refused() -> None:
    ran = subprocess.run([*GANGWAY, "completion", "csh"], capture_output=True, text=True, timeout=60, check=False)
    assert ran.returncode == 2
    assert "invalid choice: 'csh'" in ran.stderr
