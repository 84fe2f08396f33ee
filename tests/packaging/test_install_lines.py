"""The install lines of README and tutorials, as they are written, in a fresh environment; then servers anywhere.

The checkout is read-only and holds what an earlier build has left. Who installs and serves has no privileges.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.hostile_folder import ALL, hostile_folder, imported
from tests.packaging.check_wheel import COMPILED, NUMBERS, STRINGS, add, server

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]  # it downloads half a gigabyte

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]
LINE = re.compile(r"^(pip install .*)$|`(pip install [^`\n]*)`", re.MULTILINE)
# Permissions hold for root, too, without its capabilities.
UNPRIVILEGED = ("setpriv", "--inh-caps=-all", "--bounding-set=-all") if os.getuid() == 0 else ()
INSTALLED = ("artifact", "compiler", "protos", "zoo")  # rooms to look at


def install_lines() -> list[str]:
    """Each line once, in the order of the pages."""
    found = [line or quoted for page in PAGES for line, quoted in LINE.findall(page.read_text())]
    return list(dict.fromkeys(line.partition("#")[0].strip() for line in found))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that are checked in, or are about to be."""
    folder = tmp_path_factory.mktemp("install") / "checkout"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)
    for name in ("lib/gangway/compiler/stale.py", "lib/gangway/executor/_native.abi3.so"):
        (folder / "build" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "build" / name).write_text("of an earlier build")
    return folder


@pytest.fixture(scope="module")
def environment(checkout: Path) -> Iterator[Path]:
    """What the lines install, typed in the checkout. Too large to be kept."""
    environment = checkout.parent / "environment"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    subprocess.run(["chmod", "-R", "a-w", checkout], check=True)
    for line in install_lines():
        subprocess.run([*UNPRIVILEGED, "bash", "-c", line], cwd=checkout, env=variables(environment), check=True)
    yield environment
    shutil.rmtree(environment)
    subprocess.run(["chmod", "-R", "u+w", checkout], check=True)


def variables(environment: Path) -> dict[str, str]:
    """An environment that is activated."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return {**kept, "PATH": f"{environment / 'bin'}{os.pathsep}{os.environ['PATH']}", "VIRTUAL_ENV": str(environment)}


def test_lines_are_found() -> None:
    lines = install_lines()
    assert lines[0] == "pip install '.[all]'"
    assert any("tritonclient" in line for line in lines)


def test_what_is_installed_is_the_checkout(environment: Path, checkout: Path) -> None:
    (package,) = environment.glob("lib/python*/site-packages/gangway")
    for room in INSTALLED:
        made = {path.name for path in (package / room).glob("*.py") if not path.name.endswith("_pb2.py")}
        assert made == {path.name for path in (checkout / room).glob("*.py")}, room
    assert (package / "executor" / "_native.abi3.so").read_bytes()[:4] == b"\x7fELF"
    assert not any(checkout.glob("*.egg-info"))


@pytest.fixture(scope="module")
def models(environment: Path) -> Path:
    """A folder with a repository; models that the server compiles, and that it leaves to onnxruntime."""
    folder = environment.parent / "served"
    command = [environment / "bin" / "gangway", "zoo", folder / "models", COMPILED, STRINGS]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return folder


@pytest.mark.parametrize("place", ["checkout", "root", "read-only", "hostile"])
def test_a_server_serves_wherever_it_is_started(
    environment: Path, checkout: Path, models: Path, tmp_path: Path, place: str
) -> None:
    cwd = {"checkout": checkout, "root": Path("/")}.get(place, tmp_path / "here")
    if place == "hostile":
        hostile_folder(cwd, ALL)
    elif place == "read-only":
        cwd.mkdir(mode=0o555)
    with server(environment, models, cwd, UNPRIVILEGED) as port:
        assert add(port, COMPILED, NUMBERS) == add(port, STRINGS, [*map(str, NUMBERS)]) == [n + 1 for n in NUMBERS]
    assert imported(cwd) == []
