"""The zoo as files, for benchmarks: model repository, compiled artifacts, and inputs that fit."""

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gangway.artifact.format import Precision
from gangway.artifact.profile import Profile, ProfileError, profile_path, read_profile, whole_machine_id
from gangway.artifact.reader import read_manifest
from gangway.zoo import DEFAULT_NAMES
from testing.quiet import QuietMachine

GANGWAY = [sys.executable, "-m", "gangway"]
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


def compile_model(repository: Path, model: str, precision: Precision = "fp32", min_cosine: float | None = None) -> Path:
    """Compile a model, unless the user's cache has it; return the artifact's folder.

    `min_cosine`: of answers in a lower precision, if not the default.
    """
    return compile_file(onnx_file(repository, model), precision, min_cosine)


def compile_file(
    path: Path, precision: Precision = "fp32", min_cosine: float | None = None, target: str | None = None
) -> Path:
    """The same of an ONNX file; `target`: if not the best one here."""
    command = [sys.executable, "-m", "gangway.compiler", "--json", f"--precision={precision}", str(path)]
    if target is not None:
        command.append(f"--target={target}")
    if min_cosine is not None:
        command.append(f"--min-cosine={min_cosine}")
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=COMPILE_TIMEOUT_S)
    return Path(json.loads(done.stdout.splitlines()[-1])["folder"])


def ensure_profiles(
    repository: Path,
    models: Sequence[str],
    seconds: float | None = None,
    precision: Precision = "fp32",
    min_cosine: float | None = None,
) -> None:
    """Compile models and measure their layers (`gangway profile`, for so long), unless the user's cache has that.

    Each is measured once the machine is quiet, or does not become so. `min_cosine`: as of `compile_model`.
    """
    quiet = QuietMachine()
    for name in models:
        if find_profile(compile_model(repository, name, precision, min_cosine)) is None:
            command = [*GANGWAY, "profile", str(repository / name), f"--precision={precision}"]
            if min_cosine is not None:
                command.append(f"--min-cosine={min_cosine}")
            if seconds is not None:
                command.append(f"--seconds={seconds}")
            quiet.wait()
            subprocess.run(command, check=True, timeout=COMPILE_TIMEOUT_S)


def find_profile(artifact: Path) -> Profile | None:
    """Return the profile of an artifact of the cache on this machine, if it has one of today's format."""
    with suppress(ProfileError):
        machine = whole_machine_id(read_manifest(artifact).target.name)
        return read_profile(profile_path(artifact.parent, artifact.name, machine))
    return None
