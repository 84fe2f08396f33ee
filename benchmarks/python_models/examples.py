"""The examples of Triton's Python backend, unchanged, against a Gangway server: which of them pass.

    git clone https://github.com/triton-inference-server/python_backend
    python -m benchmarks.python_models.examples --examples python_backend/examples [--python PYTHON]

Models and clients are theirs, and the clients speak to ports 8000 to 8002 of this machine, which must be free. A client
passes if it ends with status 0. What some examples need beside numpy and tritonclient is looked for in PYTHON, which
then executes all Python models and these clients: torch and torchvision, onnx and onnxscript, jax, requests.

- In the place of TensorRT's plan of `preprocessing` stands the ONNX file that its own `onnx_exporter.py` writes.
- `TORCH_HOME` names a folder of torch.hub with the weights and NVIDIA's tools for pictures. Without it random weights
  and a few lines of our own stand in their place, since the examples download them.
- Where there is no torch, the model `pytorch`, which the examples of BLS ask for, is one in numpy with its tensors.
"""

import argparse
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from testing.live_server import stop, wait_until_ready
from testing.report import Row, option_parser, start_report
from testing.repository import GANGWAY

TIMEOUT_S = 120
URL = "localhost:8001"
PORTS = (8000, 8001, 8002)


@dataclass(frozen=True)
class Model:
    """A model of the repository: its file, and its configuration if it has one."""

    name: str
    code: str
    config: str = ""


@dataclass(frozen=True)
class Client:
    """A client, what it is called with, the packages that it and its models need, and what stands in for others.

    `{scratch}` in arguments is a folder with the file picture.jpg.
    """

    script: str
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    note: str = ""

    @property
    def example(self) -> str:
        """The example's name."""
        return self.script.partition("/")[0]


ADD_SUB = Model("add_sub", "add_sub/model.py", "add_sub/config.pbtxt")
MODELS = (
    ADD_SUB,
    Model("nobatch_auto_complete", "auto_complete/nobatch_model.py"),
    Model("batch_auto_complete", "auto_complete/batch_model.py"),
    Model("bls_sync", "bls/sync_model.py", "bls/sync_config.pbtxt"),
    Model("bls_async", "bls/async_model.py", "bls/async_config.pbtxt"),
    Model("square_int32", "decoupled/square_model.py", "decoupled/square_config.pbtxt"),
    Model("repeat_int32", "decoupled/repeat_model.py", "decoupled/repeat_config.pbtxt"),
    Model("bls_decoupled_sync", "bls_decoupled/sync_model.py", "bls_decoupled/sync_config.pbtxt"),
    Model("bls_decoupled_async", "bls_decoupled/async_model.py", "bls_decoupled/async_config.pbtxt"),
    Model("custom_metrics", "custom_metrics/model.py", "custom_metrics/config.pbtxt"),
)
MORE_MODELS = {
    "pytorch": Model("pytorch", "pytorch/model.py", "pytorch/config.pbtxt"),
    "jax": Model("jax", "jax/model.py", "jax/config.pbtxt"),
    "instance_kind": Model("resnet50", "instance_kind/model.py", "instance_kind/config.pbtxt"),
}
PICTURE = "{scratch}/picture.jpg"
CLIENTS = (
    Client("add_sub/client.py"),
    Client("auto_complete/client.py"),
    Client("bls/sync_client.py"),
    Client("bls/async_client.py"),
    Client("decoupled/square_client.py"),
    Client("decoupled/repeat_client.py"),
    Client("bls_decoupled/sync_client.py"),
    Client("bls_decoupled/async_client.py"),
    Client("custom_metrics/client.py", needs=("requests",)),
    Client("pytorch/client.py", needs=("torch",)),
    Client("jax/client.py", needs=("jax",)),
    Client(
        "preprocessing/client.py",
        ("--image", PICTURE),
        ("torch", "torchvision", "PIL", "onnx", "onnxscript"),
        "ONNX for TensorRT",
    ),
    Client("instance_kind/client.py", ("--image_url", PICTURE), ("torch", "torchvision", "PIL")),
)
FIND = "import importlib.util, sys; print(*(name for name in sys.argv[1:] if not importlib.util.find_spec(name)))"
# Random weights under the names of those that torchvision would download.
WEIGHTS = """
import pathlib, sys, torch
from torchvision import models
folder = pathlib.Path(sys.argv[1], "hub", "checkpoints")
folder.mkdir(parents=True)
for weights in models.ResNet50_Weights:
    torch.save(models.resnet50().state_dict(), folder / pathlib.Path(weights.url).name)
"""
HUB_NAME = "NVIDIA_DeepLearningExamples"  # of a repository, as torch.hub calls it
HUB_CODE = """
import torch
from PIL import Image
from torchvision.transforms import functional


class Utils:
    @staticmethod
    def prepare_input_from_uri(path):
        picture = functional.to_tensor(Image.open(path).convert("RGB").resize((224, 224)))
        return functional.normalize(picture, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])[None]


def nvidia_convnets_processing_utils():
    return Utils
"""
DRAW = """
import sys
from PIL import Image
Image.linear_gradient("L").resize((320, 240)).convert("RGB").save(sys.argv[1])
"""


class Workplace:
    """Models, pictures and weights of one run, in a folder. `python`: the interpreter that has the packages."""

    def __init__(self, root: Path, examples: Path, python: str, clients: Sequence[Client] = CLIENTS) -> None:
        self._root, self._examples, self._python = root, examples, python
        self.models, self.variables = root / "models", dict(os.environ)
        needed = sorted({package for client in clients for package in client.needs})
        self._missing = set(self._run("-c", FIND, *needed).split())
        self._has_own_weights = "TORCH_HOME" not in os.environ

    def lacks(self, client: Client) -> list[str]:
        """Return the packages that a client or its models need and that are not there."""
        return [package for package in client.needs if package in self._missing]

    def prepare(self) -> None:
        """Write all models that the packages suffice for."""
        runnable = {client.example for client in CLIENTS if not self.lacks(client)}
        for model in MODELS:
            _write(self.models / model.name, self._examples, model)
        if "pytorch" not in runnable:
            _write(self.models / "pytorch", self._examples, ADD_SUB)
            config = self.models / "pytorch" / "config.pbtxt"
            config.write_text(config.read_text().replace('"add_sub"', '"pytorch"'))
        for example in runnable & MORE_MODELS.keys():
            model = MORE_MODELS[example]
            _write(self.models / model.name, self._examples, model)
        if runnable & {"preprocessing", "instance_kind"}:
            self._run("-c", DRAW, str(self._root / "picture.jpg"))
            if self._has_own_weights:
                self._write_weights()
        if "preprocessing" in runnable:
            self._write_preprocessing()

    def call(self, client: Client) -> Row:
        """Run a client; return a row of the table."""
        if missing := self.lacks(client):
            return {"example": client.script, "": "not run", "why": f"not installed: {', '.join(missing)}"}
        script = self._examples / client.script
        arguments = [argument.format(scratch=self._root) for argument in client.arguments]
        try:
            done = subprocess.run(
                [self._python, str(script), *arguments],
                cwd=script.parent,
                env=self.variables,
                stdin=subprocess.DEVNULL,
                check=False,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
        except subprocess.TimeoutExpired:
            return {"example": client.script, "": "FAILED", "why": f"it did not end within {TIMEOUT_S} s"}
        if done.returncode == 0:
            random = "random weights" if self._has_own_weights and "torchvision" in client.needs else ""
            return {"example": client.script, "": "passed", "why": ", ".join(filter(None, (client.note, random)))}
        return {"example": client.script, "": "FAILED", "why": (done.stderr.strip().splitlines() or [""])[-1][:120]}

    def _write_weights(self) -> None:
        home = self._root / "torch"
        self._run("-c", WEIGHTS, str(home))
        (home / "hub" / f"{HUB_NAME}_torchhub").mkdir()
        (home / "hub" / f"{HUB_NAME}_torchhub" / "hubconf.py").write_text(HUB_CODE)
        (home / "hub" / "trusted_list").write_text(f"{HUB_NAME}\n")
        self.variables["TORCH_HOME"] = str(home)

    def _write_preprocessing(self) -> None:
        example = self._examples / "preprocessing"
        shutil.copytree(example / "model_repository", self.models, dirs_exist_ok=True)
        for name in ("ensemble_python_resnet50", "preprocess", "resnet50_trt"):
            (self.models / name / "1").mkdir()
        shutil.copy(example / "model.py", self.models / "preprocess" / "1")
        config = self.models / "resnet50_trt" / "config.pbtxt"
        config.write_text(config.read_text().replace('platform: "tensorrt_plan"', 'platform: "onnxruntime_onnx"'))
        file = self.models / "resnet50_trt" / "1" / "model.onnx"
        self._run(str(example / "onnx_exporter.py"), "--save", str(file))

    def _run(self, *arguments: str) -> str:
        """Run Python; return what it prints. Raises RuntimeError with the end of its errors."""
        command = [self._python, *arguments]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=self.variables)
        if done.returncode:
            raise RuntimeError(f"{self._python} {arguments[0]} failed:\n{done.stderr[-2000:]}")
        return done.stdout


def run_all(examples: Path, python: str, flags: Sequence[str] = ()) -> list[Row]:
    """Serve the models, and run every client. Raises RuntimeError if a model cannot be loaded."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        workplace = Workplace(root, examples, python)
        workplace.prepare()
        command = [*GANGWAY, "serve", f"--model-repository={workplace.models}", "--no-profile", *flags]
        if python != sys.executable:
            command.append(f"--backend-config=python,execution-env-path={python}")
        with (root / "server.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=workplace.variables)
        try:
            wait_until_ready(URL, process, root / "server.log")
            return [workplace.call(client) for client in CLIENTS]
        finally:
            stop(process)


def main() -> int:
    """Print a table; return 0 if nothing failed."""
    parser: argparse.ArgumentParser = option_parser("Run the examples of Triton's Python backend.")
    parser.add_argument("--examples", type=Path, required=True, metavar="DIR", help="folder of the examples")
    parser.add_argument("--python", default=sys.executable, metavar="FILE",
        help="interpreter with tritonclient[all] and the packages of the examples (this one)")  # fmt: skip
    options = parser.parse_args()
    for port in PORTS:
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                parser.error(f"port {port} is taken, and the clients have it in their code")
    missing = [client.script for client in CLIENTS if not (options.examples / client.script).is_file()]
    if missing:
        parser.error(f"argument --examples: {options.examples} has no {missing[0]}")
    report = start_report("Examples of Triton's Python backend")
    rows = run_all(options.examples.resolve(), options.python)
    report.table("examples", rows)
    report.target("clients that failed", sum(row[""] == "FAILED" for row in rows), 0)
    return report.finish(options.json)


def _write(folder: Path, examples: Path, model: Model) -> None:
    (folder / "1").mkdir(parents=True)
    shutil.copy(examples / model.code, folder / "1" / "model.py")
    if model.config:
        shutil.copy(examples / model.config, folder / "config.pbtxt")


if __name__ == "__main__":
    sys.exit(main())
