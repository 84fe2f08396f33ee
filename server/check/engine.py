"""What serves a model: what the server for trials says of it, and what the compiler makes of open sizes.

The server compiles a size when a request has it. Whether kernels can compute such sizes is known before by a look at
the file, which a process of the compiler takes: this room does not import it.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gangway.artifact.format import Engine
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.control.repository.repository import file_at
from gangway.server.models.config import (
    COMPILED_DIMENSIONS_PARAMETER,
    DEFAULT_MODEL_FILENAME,
    DIMENSIONS_PARAMETER,
    ENGINE_PARAMETER,
    FALLBACK_PARAMETER,
    bucket_sizes,
    composing_models,
    is_ensemble,
)
from gangway.server.models.config_table import parameter_of

FILE_CHECK: Final = (sys.executable, "-P", "-m", "gangway.compiler.check")
COMPILED: Final = {
    "kernels": "compiled",
    "kernels, with islands of onnxruntime": "compiled, with islands of onnxruntime",
}


def served_by(config: ModelConfig, folder: Path) -> str:
    """Return what serves a model that is loaded with this completed configuration. `folder`: its own."""
    if is_ensemble(config):
        return f"ensemble of {', '.join(composing_models(config))}"
    engine = parameter_of(config, ENGINE_PARAMETER)
    if engine == Engine.ONNXRUNTIME.value:
        return _served_by_onnxruntime(config, folder)
    return "compiled" if engine == Engine.NATIVE.value else "executed by its model.py"


def check_files(paths: Sequence[Path], sizes: Mapping[str, int], as_json: bool) -> Sequence[str]:
    """Return the command that says what serves ONNX files, with these sizes of dimensions."""
    flags = ["--json"] * as_json + [f"--dimension={name}={size}" for name, size in sizes.items()]
    return [*FILE_CHECK, *flags, "--", *map(str, paths)]


def latest_version(folder: Path) -> Path:
    """Return the folder of a model's latest version; its own if there is none."""
    versions = [item for item in folder.iterdir() if item.is_dir() and item.name.isdigit()]
    return max(versions, key=lambda item: int(item.name), default=folder)


def _served_by_onnxruntime(config: ModelConfig, folder: Path) -> str:
    """Return what serves a model that onnxruntime serves at first."""
    reason = parameter_of(config, FALLBACK_PARAMETER)
    if dimensions := parameter_of(config, COMPILED_DIMENSIONS_PARAMETER):
        file = file_at(latest_version(folder) / (config.default_model_filename or DEFAULT_MODEL_FILENAME))
        done = subprocess.run(
            check_files([file], _known_sizes(config), as_json=True), capture_output=True, text=True, check=False
        )
        found: dict[str, Any] = json.loads(done.stdout)[0] if done.stdout else {}
        if made := COMPILED.get(found.get("served_by", "")):
            names = ", ".join(json.loads(dimensions))
            return f"{made}, for each size of ({names}) that requests have; onnxruntime serves it until then"
        reason = found.get("reason", reason)
    return f"served by onnxruntime: {reason}"


def _known_sizes(config: ModelConfig) -> dict[str, int]:
    """Return the sizes of dimensions that dims fix, and of the others one that buckets name."""
    known = {name: min(sizes) for name, sizes in bucket_sizes(config).items()}
    names: Mapping[str, Sequence[str]] = json.loads(parameter_of(config, DIMENSIONS_PARAMETER) or "{}")
    for tensor in config.input:
        own = names.get(tensor.name, ())[config.max_batch_size > 0 :]
        known |= {name: size for name, size in zip(own, tensor.dims, strict=False) if name and size > 0}
    return known
