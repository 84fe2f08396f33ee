"""The zoo's models, and how one is written into a model repository. onnx is imported only when a model is built."""

import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import cast

Tensors = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class ZooModel:
    """What config.pbtxt says about a model, and where its architecture stands."""

    summary: str
    module: str
    function: str
    max_batch_size: int
    inputs: Tensors  # name and dims without the batch dimension
    outputs: Tensors
    datatype: str = "TYPE_FP32"
    paper_qos_ms: str | None = None  # the latency target in VELTAIR's evaluation (64 cores)


_IMAGE: Tensors = (("input", (3, 224, 224)),)
_LOGITS: Tensors = (("output", (1000,)),)

MODELS: Mapping[str, ZooModel] = MappingProxyType(
    {
        "resnet50": ZooModel(
            "ResNet-50 v1.5, 25.6 M parameters, 224 x 224 images",
            "resnet50",
            "build",
            8,
            _IMAGE,
            _LOGITS,
            paper_qos_ms="15",
        ),
        "mobilenetv2": ZooModel(
            "MobileNetV2 1.0, 3.5 M parameters, 224 x 224 images",
            "mobilenetv2",
            "build",
            8,
            _IMAGE,
            _LOGITS,
            paper_qos_ms="10",
        ),
        "mlp": ZooModel(
            "multilayer perceptron, 16 floats to 10",
            "small",
            "build_mlp",
            64,
            (("input", (16,)),),
            (("output", (10,)),),
        ),
        "simple": ZooModel(
            "Triton's example: sum and difference of 16 INT32 numbers",
            "small",
            "build_simple",
            8,
            (("INPUT0", (16,)), ("INPUT1", (16,))),
            (("OUTPUT0", (16,)), ("OUTPUT1", (16,))),
            "TYPE_INT32",
        ),
    }
)
NAMES: tuple[str, ...] = tuple(MODELS)


def write_model(directory: Path, name: str, *, paper_qos: bool = False) -> Path:
    """Write DIRECTORY/NAME/1/model.onnx and DIRECTORY/NAME/config.pbtxt, replacing old ones; return DIRECTORY/NAME.

    The same name always gives the same bytes. Raises ValueError if the zoo has no such model.
    """
    if name not in MODELS:
        raise ValueError(f"the zoo has no model '{name}'; it has {', '.join(NAMES)}")
    entry = MODELS[name]
    build = getattr(import_module(f"gangway.zoo.{entry.module}"), entry.function)
    content = cast(bytes, build(seed=zlib.crc32(name.encode())).SerializeToString(deterministic=True))
    folder = directory / name
    (folder / "1").mkdir(parents=True, exist_ok=True)
    _replace(folder / "1" / "model.onnx", content)
    qos = entry.paper_qos_ms if paper_qos and entry.paper_qos_ms else "3x"
    _replace(folder / "config.pbtxt", config_text(name, entry, qos).encode())
    return folder


def config_text(name: str, entry: ZooModel, qos: str) -> str:
    """Return the model's config.pbtxt."""

    def tensors(field: str, side: Tensors) -> str:
        items = (
            f'  {{\n    name: "{tensor}"\n    data_type: {entry.datatype}\n'
            f"    dims: [ {', '.join(map(str, dims))} ]\n  }}"
            for tensor, dims in side
        )
        return f"{field} [\n" + ",\n".join(items) + "\n]\n"

    return (
        f"# {entry.summary}\n"
        f'name: "{name}"\nplatform: "onnxruntime_onnx"\nmax_batch_size: {entry.max_batch_size}\n'
        f"{tensors('input', entry.inputs)}{tensors('output', entry.outputs)}"
        "# Latency target in milliseconds, or 3x = three times the model's isolated latency on the server's cores.\n"
        f'parameters {{\n  key: "qos_ms"\n  value: {{ string_value: "{qos}" }}\n}}\n'
    )


def _replace(path: Path, content: bytes) -> None:
    """Write atomically: a server that watches the repository never reads half a file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.replace(path)
