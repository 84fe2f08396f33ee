"""Arguments that several commands share: a model on disk and cores to measure it on, a positive number."""

import argparse
import asyncio
from pathlib import Path

from gangway.artifact.format import Manifest
from gangway.artifact.precision import WantedPrecision
from gangway.executor.launch import available_cores
from gangway.server.control.repository.compile_jobs import Compiler, CompileRequest
from gangway.server.control.repository.repository import BrokenModel, read_model
from gangway.server.errors import ConfigError
from gangway.server.models.config import QosConfig, qos_of


def find_target(path: Path) -> QosConfig:
    """Return the latency target of a model directory's configuration; none of an .onnx file. Raises ValueError."""
    entry = read_model(path.resolve())[-1] if path.is_dir() else None
    try:
        return QosConfig() if entry is None or isinstance(entry, BrokenModel) else qos_of(entry.config)
    except ConfigError as error:
        raise ValueError(f"{path}: {error}") from error


def find_model(path: Path) -> tuple[str, Path]:
    """Return name and ONNX file of an .onnx file or of a model directory's latest version. Raises ValueError."""
    if not path.is_dir():
        if not path.is_file():
            raise ValueError(f"{path} does not exist")
        in_repository = path.name == "model.onnx" and path.resolve().parent.name.isdigit()
        return (path.resolve().parents[1].name if in_repository else path.stem), path
    entry = read_model(path.resolve())[-1]
    if isinstance(entry, BrokenModel):
        raise ValueError(f"{path}: {entry.reason}")
    if entry.is_ensemble:
        raise ValueError(f"{path}: an ensemble has no ONNX file, only its models have")
    return entry.name, entry.path


def model_and_cores(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[str, Path, list[int]]:
    """Return name and ONNX file of the model, and the cores; exits with 2, as argparse does, if either is wrong."""
    try:
        cores = available_cores(options.cores)
        return *find_model(options.path), cores
    except ValueError as error:
        parser.error(str(error))


def in_each_precision(options: argparse.Namespace) -> list[argparse.Namespace]:
    """Return the options for each precision that they name: with `deadline` for fp32 and for bf16.

    What is written of the latter has `-bf16` in its name.
    """
    wanted = WantedPrecision(options.precision, options.min_cosine).each
    found = []
    for precision in wanted:
        own = {"precision": precision.name}
        for name in ("json", "output") if precision is not wanted[0] else ():
            if (path := getattr(options, name, None)) is not None:
                own[name] = path.with_name(f"{path.stem}-{precision.name}{path.suffix}")
        found.append(argparse.Namespace(**{**vars(options), **own}))
    return found


def compiled_manifest(options: argparse.Namespace, name: str, path: Path) -> Manifest:
    """Return the manifest of a model, compiled as the options say. Raises CompileError, OSError."""
    precision = WantedPrecision(options.precision, options.min_cosine)
    compiler = Compiler(options.cache_dir)
    request = CompileRequest(name, path, dict(options.dimension), precision=precision)
    return asyncio.run(compiler.compile(request))


def model_words(options: argparse.Namespace) -> str:
    """Return what a command was told of the model, for another command."""
    dimensions = (f"--dimension {name}={size}" for name, size in options.dimension)
    return " ".join([str(options.path), *dimensions, *WantedPrecision(options.precision, options.min_cosine).flags()])
