"""The environments in which exporters run: what is installed in each, and which scripts write files there.

A file in `requirements` pins every package. Packages are installed without their dependencies, since the pins are
complete: torch's lack the CUDA libraries, of which `cuda_stand_ins.py` makes stand-ins.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.exported.cuda_stand_ins import make_stand_ins

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Environment:
    """`requirements`: the file of pins; `scripts`: run one after the other, each to the folder of its name."""

    name: str
    scripts: dict[str, str]  # script -> folder of its files
    has_torch: bool = False


ENVIRONMENTS = (
    Environment(
        "torch",
        {
            "torch_modules": "torch",
            "torch_transformers": "torch",
            "torch_vision": "torch",
            "ultralytics_files": "ultralytics",
            "onnxruntime_files": "onnxruntime",  # last: it reads what the others write
        },
        has_torch=True,
    ),
    Environment("sklearn", {"sklearn_files": "sklearn"}),
    Environment("tensorflow", {"keras_files": "tensorflow"}),
    Environment("jax", {"jax_files": "jax"}),
    Environment("paddle", {"paddle_files": "paddle"}),
)


def install(environment: Environment, folder: Path) -> Path:
    """Make the environment below `folder`, unless it is there; return its Python. Raises CalledProcessError."""
    place = folder / environment.name
    python = place / "bin" / "python"
    if (place / "complete").exists():
        return python
    pins = HERE / "requirements" / f"{environment.name}.txt"
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(place)], check=True)
    subprocess.run(
        [str(python), "-m", "pip", "install", "--quiet", "--no-deps", "--requirement", str(pins)], check=True
    )
    if environment.has_torch:
        make_stand_ins(next((place / "lib").glob("python*")) / "site-packages")
    (place / "complete").touch()
    return python
