"""The models of the pipeline: files that both servers read, an image, and what numpy and onnxruntime make of it."""

import importlib.util
import io
import shutil
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import PIL
from PIL import Image

from gangway.clients.inputs import Array, infer_request
from testing.reference import open_session
from testing.repository import onnx_file

PIPELINE, ECHO, CLASSIFIER = "pipeline", "echo", "mobilenetv2"
FOLDER = Path(__file__).parent
WIDTH, HEIGHT, QUALITY = 640, 480, 90
CONFIGS = {
    "preprocess": """
        backend: "python" max_batch_size: 1
        input { name: "IMAGE" data_type: TYPE_UINT8 dims: [-1] }
        output { name: "PIXELS" data_type: TYPE_FP32 dims: [3, 224, 224] }
        instance_group { count: INSTANCES kind: KIND_CPU }
    """,
    "postprocess": """
        backend: "python" max_batch_size: 1
        input { name: "LOGITS" data_type: TYPE_FP32 dims: [1000] }
        output { name: "LABELS" data_type: TYPE_STRING dims: [5] }
        output { name: "PROBABILITIES" data_type: TYPE_FP32 dims: [5] }
        instance_group { count: INSTANCES kind: KIND_CPU }
    """,
    ECHO: """
        backend: "python"
        input { name: "X" data_type: TYPE_FP32 dims: [16] }
        output { name: "Y" data_type: TYPE_FP32 dims: [16] }
        instance_group { count: INSTANCES kind: KIND_CPU }
    """,
    PIPELINE: """
        platform: "ensemble" max_batch_size: 1
        input { name: "IMAGE" data_type: TYPE_UINT8 dims: [-1] }
        output { name: "LABELS" data_type: TYPE_STRING dims: [5] }
        output { name: "PROBABILITIES" data_type: TYPE_FP32 dims: [5] }
        ensemble_scheduling {
          step {
            model_name: "preprocess" model_version: -1
            input_map { key: "IMAGE" value: "IMAGE" } output_map { key: "PIXELS" value: "pixels" }
          }
          step {
            model_name: "mobilenetv2" model_version: -1
            input_map { key: "input" value: "pixels" } output_map { key: "output" value: "logits" }
          }
          step {
            model_name: "postprocess" model_version: -1
            input_map { key: "LOGITS" value: "logits" }
            output_map { key: "LABELS" value: "LABELS" } output_map { key: "PROBABILITIES" value: "PROBABILITIES" }
          }
        }
    """,
}


def write_pipeline(folder: Path, instances: int) -> None:
    """Write the Python models, with so many instances each, and the ensemble. The classifier is another's to write."""
    for name, config in CONFIGS.items():
        version = folder / name / "1"
        version.mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(config.replace("INSTANCES", str(instances)))
        if name != PIPELINE:
            shutil.copy(FOLDER / f"{name}.py", version / "model.py")
    (folder / "postprocess" / "1" / "labels.txt").write_text("".join(f"{label_of(place)}\n" for place in range(1000)))


def label_of(place: int) -> str:
    """Return a label of the classifier, which has random weights."""
    return f"class {place}"


def image_file() -> bytes:
    """Return a photograph's size in JPEG: a smooth picture with noise, the same every time."""
    generator = np.random.default_rng(0)
    small = Image.fromarray(generator.integers(0, 256, (12, 16, 3), np.uint8))
    smooth = np.asarray(small.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC), np.int16)
    noisy = smooth + generator.integers(-12, 13, smooth.shape, np.int16)
    stream = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(stream, "JPEG", quality=QUALITY)
    return stream.getvalue()


@dataclass(frozen=True)
class Asked:
    """A serialised ModelInfer request, and the right outputs."""

    request: bytes
    outputs: dict[str, Array]


def asked(models: Path) -> Asked:
    """Return a request, answered by the code of the models without a server; `models` has the classifier."""
    content = image_file()
    preprocess, postprocess = code_of("preprocess"), code_of("postprocess")
    session = open_session(onnx_file(models, CLASSIFIER), threads=1)
    (logits,) = session.run(None, {"input": preprocess.normalised(content)})
    best, probabilities = postprocess.ranked(np.asarray(logits))
    labels = np.array([[label_of(place).encode() for place in row] for row in best], dtype=object)
    message = infer_request(PIPELINE, "", {"IMAGE": ("UINT8", np.frombuffer(content, np.uint8)[None])})
    return Asked(message.SerializeToString(), {"LABELS": labels, "PROBABILITIES": probabilities})


def echo_asked() -> Asked:
    """Return a request to the model that does nothing, and what it answers."""
    values = np.arange(16, dtype=np.float32)
    return Asked(infer_request(ECHO, "", {"X": ("FP32", values)}).SerializeToString(), {"Y": values})


def code_of(name: str) -> Any:
    """Return the module of a Python model, whose functions need no server."""
    spec = importlib.util.spec_from_file_location(f"pipeline_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, {"triton_python_backend_utils": types.ModuleType("backend")}):
        spec.loader.exec_module(module)
    return module


def link_pillow(folder: Path) -> None:
    """Let another Python of this version find our Pillow beside the model that needs it."""
    own = Path(PIL.__file__).parent
    for path in filter(Path.exists, (own, own.parent / "pillow.libs")):
        (folder / "preprocess" / "1" / path.name).symlink_to(path)
