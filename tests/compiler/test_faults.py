"""Faults of the compiler, and of what onnxruntime computes for it: neither refuses a model that can be served."""

import faulthandler
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import tvm

from gangway.artifact.format import Engine
from gangway.artifact.onnx_session import open_session
from gangway.artifact.reader import read_manifest, verify
from gangway.compiler import fallback
from gangway.compiler.errors import CompilerFaultError, UnsupportedModelError
from gangway.compiler.fallback import SessionTrials, read_signature
from gangway.compiler.kernels.templates import registry
from gangway.compiler.lower.operators import LOWERINGS

TIMEOUT_S = 60
CHAIN = """(float[n, 4] x) => (float[n, 4] y) {
    [first] t = Tanh(x)
    [second] y = Softmax<axis = 1>(t)
}"""
OPEN = "(float[n, w] x) => (float[n, w] y) { [first] t = Tanh(x) [second] y = Softmax<axis = 1>(t) }"
STRINGS = "(float[n, w] x, string[n, 1] s) => (float[n, w] y, string[n, 1] t) { y = Relu(x) t = Identity(s) }"


def save(path: Path, text: str) -> Path:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {text}')
    onnx.save(model, path)
    return path


def fail(*arguments: object) -> None:
    raise AssertionError("not one of its rows")


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    return save(tmp_path / "model.onnx", CHAIN)


def test_a_fault_of_lowering_leaves_the_model_to_onnxruntime(
    chain: Path, compile_file: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patched:
        patched.setitem(LOWERINGS, "Softmax", fail)
        manifest = compile_file(chain).manifest
        assert compile_file(chain).cached, "what onnxruntime needs is kept"
    assert manifest.engine is Engine.ONNXRUNTIME
    assert manifest.fallback_reason == (
        "a fault of the compiler at node 'second' (Softmax): AssertionError: not one of its rows"
    )
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 2, "one an attempt"
    assert all(manifest.fallback_reason in line for line in warnings)
    assert compile_file(chain).manifest.engine is Engine.NATIVE, "the next attempt compiles it"


@pytest.mark.parametrize("kind", [tvm.error.InternalError, KeyError, MemoryError])
def test_a_fault_of_a_kernel_leaves_the_model_to_onnxruntime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compile_file: Callable[..., Any], kind: type[Exception]
) -> None:
    def emit(*arguments: object) -> None:
        raise kind("no such loop")

    path = save(tmp_path / "model.onnx", "(float[n, 61] x) => (float[n, 61] y) { [only] y = Tanh(x) }")
    monkeypatch.setattr(registry, "emit", emit)
    manifest = compile_file(path).manifest
    assert manifest.engine is Engine.ONNXRUNTIME and "no such loop" in manifest.fallback_reason
    if kind is not MemoryError:
        assert f"at layer 'only' (Tanh): {kind.__name__}" in manifest.fallback_reason


def test_a_fault_with_given_sizes_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compile_file: Callable[..., Any]
) -> None:
    path = save(tmp_path / "model.onnx", OPEN)
    monkeypatch.setitem(LOWERINGS, "Softmax", fail)
    with pytest.raises(CompilerFaultError, match="second"):
        compile_file(path, dimensions={"w": 5})
    assert compile_file(path).manifest.trial_sizes == {"n": 1, "w": 8}, "onnxruntime serves all sizes"


def test_a_job_with_a_fault_succeeds_and_shows_the_traceback(chain: Path, tmp_path: Path) -> None:
    code = "import sys; from gangway.compiler.__main__ import main"
    code += "; from gangway.compiler.lower.operators import LOWERINGS; LOWERINGS['Softmax'] = lambda *_: 1 / 0"
    code += "; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(chain), f"--cache-dir={tmp_path / 'cache'}", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    (warning,) = [line["warning"] for line in lines if "warning" in line]
    assert "node 'second' (Softmax): ZeroDivisionError" in warning
    assert "Traceback" in done.stderr and "lower_model" in done.stderr
    assert "ZeroDivisionError" in read_manifest(Path(lines[-1]["folder"])).fallback_reason


def die(*arguments: object) -> None:
    faulthandler.disable()  # pytest's would tell
    os.kill(os.getpid(), signal.SIGFPE)


class Dying:
    """A session that ends its process when it runs so many rows or more."""

    def __init__(self, session: Any, rows: int) -> None:
        self._session = session
        self._rows = rows

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run(self, names: list[str], feeds: dict[str, Any]) -> Any:
        if len(next(iter(feeds.values()))) >= self._rows:
            die()
        return self._session.run(names, feeds)


@pytest.mark.parametrize(
    ("rows", "batched", "trial_sizes"), [(1, True, {}), (2, False, {"n": 1, "w": 8}), (3, True, {"n": 1, "w": 8})]
)
def test_a_trial_that_ends_its_process_shows_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compile_file: Callable[..., Any],
    rows: int,
    batched: bool,
    trial_sizes: dict[str, int],
) -> None:
    path = save(tmp_path / "model.onnx", STRINGS)
    assert read_signature(SessionTrials(Dying(open_session(path), rows), are_apart=True)).trial_sizes == trial_sizes
    monkeypatch.setattr(fallback, "open_session", lambda *args, **keys: Dying(open_session(*args, **keys), rows))
    compiled = compile_file(path)
    manifest = verify(compiled.folder)
    assert (manifest.engine, manifest.batched, manifest.trial_sizes) == (Engine.ONNXRUNTIME, batched, trial_sizes)


def test_a_model_whose_opening_ends_the_process_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compile_file: Callable[..., Any]
) -> None:
    monkeypatch.setattr(fallback, "open_session", die)
    with pytest.raises(UnsupportedModelError, match="it ends the process by SIGFPE that opens the model; nor can it"):
        compile_file(save(tmp_path / "model.onnx", STRINGS))
