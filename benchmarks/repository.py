"""The zoo as files, for benchmarks: model repository, compiled artifacts, and inputs that fit."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gangway.artifact.profile import ProfileError, read_profile
from gangway.zoo import DEFAULT_NAMES

GANGWAY = [sys.executable, "-m", "gangway.server.cli"]
COMPILE_TIMEOUT_S = 300


def ensure_zoo(repository: Path, names: Sequence[str] = DEFAULT_NAMES) -> Path:
    """Write those of the zoo's models that the repository lacks."""
    missing = [name for name in names if not (repository / name / "1" / "model.onnx").exists()]
    if missing:
        subprocess.run([*GANGWAY, "zoo", str(repository), *missing], check=True, timeout=COMPILE_TIMEOUT_S)
    return repository


def onnx_file(repository: Path, model: str) -> Path:
    """Return where the model's first version stands."""
    return repository / model / "1" / "model.onnx"


def compile_model(repository: Path, model: str) -> Path:
    """Compile a model, unless the user's cache has it; return the artifact's folder."""
    command = [sys.executable, "-m", "gangway.compiler", "--json", str(onnx_file(repository, model))]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=COMPILE_TIMEOUT_S)
    return Path(json.loads(done.stdout.splitlines()[-1])["folder"])


def ensure_profiles(repository: Path, models: Sequence[str]) -> None:
    """Compile models and measure their layers (`gangway profile`), unless the user's cache has that."""
    for name in models:
        folder = compile_model(repository, name)
        if not any(_readable(path) for path in (folder.parent / "profiles").glob(f"{folder.name}-*.json")):
            subprocess.run([*GANGWAY, "profile", str(repository / name)], check=True, timeout=COMPILE_TIMEOUT_S)


def _readable(path: Path) -> bool:
    try:
        read_profile(path)
    except ProfileError:  # of an older format
        return False
    return True
