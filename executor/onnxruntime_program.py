"""A model that onnxruntime executes, as a program of a worker. Imports onnxruntime and numpy."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from gangway.artifact.datatypes import DTYPES
from gangway.artifact.format import ONNX_FILE, Manifest, TensorSpec
from gangway.artifact.onnx_session import open_session
from gangway.executor import _native

Views = tuple[memoryview, ...]


class OnnxRuntimeModel:
    """One session: this process's own, since a gang of one runs it. Called by the C loop, a query at a time."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._manifest = manifest
        try:
            self._session = open_session(folder / ONNX_FILE)
        except Exception as error:  # onnxruntime's own exceptions have no common base
            raise ValueError(f"onnxruntime: {error}") from error
        self._outputs = [tensor.name for tensor in manifest.outputs]

    def __call__(self, rows: int, inputs: Views, outputs: Views) -> bool:
        """Compute all rows at once; False if that fails, after a line on standard error that says why."""
        try:
            self._run(rows, inputs, outputs)
        except Exception as error:  # whatever it was, it concerns this request only
            reason = " ".join(str(error).split())[:500]
            print(f"worker: {self._manifest.model_name}: onnxruntime: {reason}", file=sys.stderr, flush=True)
            return False
        return True

    def _run(self, rows: int, inputs: Views, outputs: Views) -> None:
        feeds = {
            tensor.name: _array(tensor, rows, view) for tensor, view in zip(self._manifest.inputs, inputs, strict=True)
        }
        answers = self._session.run(self._outputs, feeds)
        for tensor, view, answer in zip(self._manifest.outputs, outputs, answers, strict=True):
            target = _array(tensor, rows, view)
            if (answer.shape, answer.dtype) != (target.shape, target.dtype):
                found = f"{answer.dtype}{list(answer.shape)}"
                raise ValueError(f"output '{tensor.name}' is {found} instead of {target.dtype}{list(target.shape)}")
            np.copyto(target, answer)


def _array(tensor: TensorSpec, rows: int, view: memoryview) -> Any:
    shape = [rows if size == -1 else size for size in tensor.shape]
    return np.frombuffer(view, DTYPES[tensor.datatype]).reshape(shape)


def load_whole(folder: Path, manifest: Manifest) -> _native.Program:
    """Return the program of an artifact whose engine is onnxruntime. Raises ValueError where onnxruntime refuses it."""
    return _native.Program.whole(
        OnnxRuntimeModel(folder, manifest),
        [tensor.row_bytes for tensor in manifest.inputs],
        [tensor.row_bytes for tensor in manifest.outputs],
    )
