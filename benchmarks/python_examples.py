"""The examples of Triton's Python backend, unchanged, against a Gangway server: which of them pass.

    git clone https://github.com/triton-inference-server/python_backend
    python -m benchmarks.python_examples --examples python_backend/examples

Models and clients are theirs, and the clients speak to ports 8000 and 8001 of this machine, which must be free. In the
place of the model in PyTorch, which the examples of BLS ask for, stands a Python model with the same tensors. A client
passes if it ends with status 0.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.lib.live_server import stop, wait_until_ready
from benchmarks.lib.report import Row, option_parser, start_report
from benchmarks.lib.repository import GANGWAY

TIMEOUT_S = 60
URL = "localhost:8001"


@dataclass(frozen=True)
class Model:
    """A model of the repository: its file, and its configuration if it has one."""

    name: str
    code: str
    config: str = ""


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
)
CLIENTS = (
    "add_sub/client.py",
    "auto_complete/client.py",
    "bls/sync_client.py",
    "bls/async_client.py",
    "decoupled/square_client.py",
    "decoupled/repeat_client.py",
    "bls_decoupled/sync_client.py",
    "bls_decoupled/async_client.py",
)
NOT_APPLICABLE = {
    "custom_metrics": "custom metrics are not supported",
    "instance_kind": "its model needs PyTorch",
    "jax": "its model needs JAX",
    "preprocessing": "its models need torchvision and TensorRT",
    "pytorch": "its model needs PyTorch",
}


def write_repository(folder: Path, examples: Path) -> None:
    """Copy the models to where a server wants them."""
    for model in MODELS:
        _write(folder / model.name, examples, model)
    _write(folder / "pytorch", examples, ADD_SUB)
    config = folder / "pytorch" / "config.pbtxt"
    config.write_text(config.read_text().replace('"add_sub"', '"pytorch"'))


def run_client(script: Path) -> Row:
    """Run a client; return a row of the table."""
    name = f"{script.parent.name}/{script.name}"
    try:
        done = subprocess.run(
            [sys.executable, str(script)], check=False, capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return {"example": name, "": "FAILED", "why": f"it did not end within {TIMEOUT_S} s"}
    if done.returncode == 0:
        return {"example": name, "": "passed", "why": ""}
    return {"example": name, "": "FAILED", "why": (done.stderr.strip().splitlines() or [""])[-1][:120]}


def run_all(examples: Path, flags: Sequence[str] = ()) -> list[Row]:
    """Serve the models, and run every client."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        write_repository(root / "models", examples)
        command = [*GANGWAY, "serve", f"--model-repository={root / 'models'}", "--no-profile", *flags]
        with (root / "server.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            wait_until_ready(URL, process, root / "server.log")
            return [run_client(examples / script) for script in CLIENTS]
        finally:
            stop(process)


def main() -> int:
    """Print a table; return 0 if nothing failed."""
    parser: argparse.ArgumentParser = option_parser("Run the examples of Triton's Python backend.")
    parser.add_argument("--examples", type=Path, required=True, metavar="DIR", help="folder of the examples")
    options = parser.parse_args()
    missing = [script for script in CLIENTS if not (options.examples / script).is_file()]
    if missing:
        parser.error(f"argument --examples: {options.examples} has no {missing[0]}")
    report = start_report("Examples of Triton's Python backend")
    rows = run_all(options.examples.resolve())
    rows += [{"example": name, "": "not applicable", "why": why} for name, why in NOT_APPLICABLE.items()]
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
