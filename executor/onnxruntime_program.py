"""A model that onnxruntime executes, as a program of a worker. Imports onnxruntime and numpy."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from gangway.artifact.datatypes import STORAGE
from gangway.artifact.format import ONNX_FILE, Manifest, TensorSpec
from gangway.artifact.onnx_session import open_session, run_session
from gangway.executor import _native
from gangway.executor.complain import complain
from gangway.executor.frames import Part, is_absent, join_strings, plan_frame, read_frame, split_strings, write_header


class OnnxRuntimeModel:
    """One session: this process's own, since a gang of one runs it. Called by the C loop, a query at a time."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._manifest = manifest
        try:
            self._session = open_session(folder / ONNX_FILE)
        except Exception as error:  # onnxruntime's own exceptions have no common base
            raise ValueError(f"onnxruntime: {error}") from error
        self._outputs = [tensor.name for tensor in manifest.outputs]
        self._bfloat16 = {tensor.name for tensor in (*manifest.inputs, *manifest.outputs) if tensor.datatype == "BF16"}

    def __call__(self, request: memoryview, answer: memoryview) -> bool:
        """Compute a query from frame to frame; False if that fails, after a line on standard error that says why.

        An answer without room is no failure: its frame says how much is needed.
        """
        try:
            self._run(request, answer)
        except Exception as error:  # whatever it was, it concerns this request only
            reason = " ".join(str(error).split())[:500]
            complain(f"{self._manifest.model_name}: onnxruntime: {reason}")
            return False
        return True

    def _run(self, request: memoryview, answer: memoryview) -> None:
        parts = read_frame(request).parts
        feeds = {
            tensor.name: _array(tensor, part, request)
            for tensor, part in zip(self._manifest.inputs, parts, strict=True)
            if not (tensor.optional and is_absent(part))
        }
        arrays = run_session(self._session, self._outputs, feeds, self._bfloat16)
        contents = [_contents(tensor, array) for tensor, array in zip(self._manifest.outputs, arrays, strict=True)]
        frame = plan_frame([(array.shape, len(content)) for array, content in zip(arrays, contents, strict=True)])
        if write_header(answer, frame):
            for part, content in zip(frame.parts, contents, strict=True):
                answer[part.offset : part.offset + part.size_bytes] = content


def _array(tensor: TensorSpec, part: Part, request: memoryview) -> Any:
    content = request[part.offset : part.offset + part.size_bytes]
    if tensor.datatype == "BYTES":
        array = np.empty(math.prod(part.shape), object)
        array[:] = split_strings(content, array.size)
        return array.reshape(part.shape)
    return np.frombuffer(content, STORAGE[tensor.datatype]).reshape(part.shape)


def _contents(tensor: TensorSpec, array: Any) -> memoryview | bytes:
    if tensor.datatype == "BYTES":
        return join_strings(array.ravel().tolist())
    if array.dtype != STORAGE[tensor.datatype]:
        raise ValueError(f"output '{tensor.name}' is {array.dtype} instead of {tensor.datatype}")
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else b""


def load_whole(folder: Path, manifest: Manifest) -> _native.Program:
    """Return the program of an artifact whose engine is onnxruntime. Raises ValueError where onnxruntime refuses it."""
    return _native.Program.whole(OnnxRuntimeModel(folder, manifest))
