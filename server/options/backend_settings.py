"""`--backend-config`: the few settings that count here, and why each other one that Triton documents does not.

A command line made for Triton starts with all of them: those that do not count are remarked upon.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from gangway.artifact.format import Engine
from gangway.base.numbers import integer
from gangway.base.suggestion import did_you_mean
from gangway.server.models.config_table import CORES_ARE_CHOSEN

BackendSetting: TypeAlias = tuple[str, str, str]  # the backend or "", what is set, the value

BATCH_SETTING = "default-max-batch-size"
ENVIRONMENT_SETTING = ("python", "execution-env-path")
START_SETTING = ("python", "stub-timeout-seconds")
DEFAULT_START_SECONDS = 600
MAX_START_SECONDS = 86400
BACKEND = Engine.ONNXRUNTIME.value
DEFAULT_MAX_BATCH_SIZE = 4  # Triton's for ONNX models with a symbolic first dimension and no config

_LIBRARIES: Final = "no shared libraries are loaded"
_SHARED_MEMORY: Final = "shared memory of Python models grows with their tensors"
WITHOUT_EFFECT: Final[Mapping[tuple[str, str], str]] = {
    ("", "backend-directory"): _LIBRARIES,
    ("", "min-compute-capability"): "no GPU is used",
    ("python", "shm-default-byte-size"): _SHARED_MEMORY,
    ("python", "shm-growth-byte-size"): _SHARED_MEMORY,
    ("python", "shm-region-prefix-name"): "shared memory of Python models has no names, so servers share none",
    ("python", "thread-pool-size"): "instances of Python models have no pool of threads",
    (BACKEND, "enable-global-threadpool"): CORES_ARE_CHOSEN,
    (BACKEND, "intra_op_thread_count"): CORES_ARE_CHOSEN,
    (BACKEND, "inter_op_thread_count"): CORES_ARE_CHOSEN,
}
"""Settings of Triton's that are accepted, by backend and name, each with the reason why it has no effect."""
_EXECUTING: Final = ("", "python", BACKEND)
_KNOWN: Final = (("", BATCH_SETTING), (BACKEND, BATCH_SETTING), ENVIRONMENT_SETTING, START_SETTING)


def read_default_max_batch_size(settings: Sequence[BackendSetting]) -> int:
    """Return the last one that is given; what is for the backend goes before what is for all."""
    of_all = _last(settings, ("", BATCH_SETTING), str(DEFAULT_MAX_BATCH_SIZE))
    return int(_last(settings, (BACKEND, BATCH_SETTING), of_all))


def read_python_environment(arguments: argparse.Namespace) -> str:
    """Return an absolute path; empty if none is given."""
    given = _last(arguments.backend_config, ENVIRONMENT_SETTING, "")
    return given and str(Path(given).absolute())


def read_python_start_seconds(arguments: argparse.Namespace) -> int:
    """Return how long `initialize` of a Python model may take."""
    return int(_last(arguments.backend_config, START_SETTING, str(DEFAULT_START_SECONDS)))


def settings_without_effect(arguments: argparse.Namespace) -> tuple[str, ...]:
    """Return a sentence for each setting that is given and does not count."""
    given = sorted({(backend, name) for backend, name, _ in arguments.backend_config} - set(_KNOWN))
    return tuple(
        f"--backend-config={','.join(filter(None, setting))} has no effect: {_reason(*setting)}" for setting in given
    )


def _reason(backend: str, name: str) -> str:
    """Return why a setting does not count."""
    if (reason := WITHOUT_EFFECT.get((backend, name))) is not None:
        return reason
    if backend not in _EXECUTING:
        return f"no model is executed by {backend}"
    known = [other for owner, other in (*_KNOWN, *WITHOUT_EFFECT) if owner == backend]
    return f"no setting has this name{did_you_mean(name, known)}"


def _last(settings: Sequence[BackendSetting], setting: tuple[str, str], default: str) -> str:
    """Return what is given last of a setting of a backend."""
    return next((value for backend, name, value in reversed(settings) if (backend, name) == setting), default)


def backend_setting(text: str) -> BackendSetting:
    """Read "BACKEND,SETTING=VALUE", or without the backend: then the first is empty."""
    setting, equals, value = text.partition("=")
    backend, _, name = setting.rpartition(",")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"expected '[BACKEND,]SETTING=VALUE', got '{text}'")
    if name == BATCH_SETTING:
        integer(0)(value)
    if (backend, name) == START_SETTING:
        integer(1, MAX_START_SECONDS)(value)
    if (backend, name) == ENVIRONMENT_SETTING and not Path(value).exists():
        raise argparse.ArgumentTypeError(f"{value} does not exist")
    return backend, name, value
