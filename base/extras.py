"""Packages that not everybody needs: the extras of pyproject.toml. Without any, models in the cache are served."""

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Final

COMPILER: Final = ("tvm", "onnx", "onnxruntime")  # what is imported to compile a model
ONNXRUNTIME: Final = ("onnxruntime",)
EXTRAS: Final[Mapping[str, str]] = {
    "PIL": "client",
    "grpc": "client",
    "matplotlib": "report",
    "mlperf_loadgen": "perf",
    "onnx": "compile",
    "onnxruntime": "onnxruntime",
    "onnxruntime_extensions": "extensions",
    "opentelemetry": "otel",
    "shtab": "completion",
    "tvm": "compile",
}
"""The extra that installs a package, by the name under which it is imported."""


def missing_packages(packages: Iterable[str]) -> str:
    """Return which of the packages are missing, and what installs them: "onnx: pip install ..."; empty: none is."""
    missing = [package for package in packages if find_spec(package) is None]
    return f"{', '.join(missing)}: {install_command(missing)}" if missing else ""


def install_command(packages: Iterable[str]) -> str:
    """Return the command that installs what belongs to extras; `packages` are keys of EXTRAS."""
    extras = {EXTRAS[package] for package in packages}
    if "compile" in extras:
        extras.discard("onnxruntime")  # which is a part of it
    return f"pip install 'gangway-serve[{','.join(sorted(extras))}]'"
