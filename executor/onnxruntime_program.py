"""A model that onnxruntime executes, as a program of a worker. Imports onnxruntime and numpy."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from gangway.artifact.datatypes import STORAGE
from gangway.artifact.format import ONNX_FILE, Manifest, TensorSpec
from gangway.artifact.onnx_session import open_session, run_session
from gangway.executor import _native
from gangway.executor.complain import complain
from gangway.executor.frames import Part, is_absent, join_strings, plan_frame, read_frame, split_strings, write_header
from gangway.executor.joined_rows import join_rows, rows_of, split_rows

Frames = tuple[memoryview, memoryview]  # of a request, and for its answer


class OnnxRuntimeModel:
    """One session: this process's own, since a gang of one runs it. Called by the C loop, a lease at a time."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._manifest = manifest
        try:
            self._session = open_session(folder / ONNX_FILE)
        except Exception as error:  # onnxruntime's own exceptions have no common base
            raise ValueError(f"onnxruntime: {error}") from error
        self._outputs = [tensor.name for tensor in manifest.outputs]
        self._bfloat16 = {tensor.name for tensor in (*manifest.inputs, *manifest.outputs) if tensor.datatype == "BF16"}

    def __call__(self, frames: list[Frames]) -> list[bool]:
        """Compute requests from frame to frame; False for each that fails, after a line on standard error why.

        Several are computed in one run. If that fails each is computed alone, so that a wrong one costs only itself. An
        answer without room is no failure: its frame says how much is needed.
        """
        if len(frames) > 1 and self._manifest.batched and self._succeeds(frames):
            return [True] * len(frames)
        return [self._succeeds([each]) for each in frames]

    def _succeeds(self, frames: list[Frames]) -> bool:
        try:
            self._run(frames)
        except Exception as error:  # whatever it was, it concerns these requests only
            reason = " ".join(str(error).split())[:500]
            together = f"{len(frames)} requests together: " if len(frames) > 1 else ""
            complain(f"{self._manifest.model_name}: onnxruntime: {together}{reason}")
            return False
        return True

    def _run(self, frames: list[Frames]) -> None:
        feeds = [self._feeds(request) for request, _ in frames]
        if len(feeds) == 1:
            answers = [run_session(self._session, self._outputs, feeds[0], self._bfloat16)]
        else:
            rows = [rows_of(each) for each in feeds]
            arrays = run_session(self._session, self._outputs, join_rows(feeds), self._bfloat16)
            answers = split_rows(arrays, rows)
        for (_, answer), arrays in zip(frames, answers, strict=True):
            self._write(answer, arrays)

    def _feeds(self, request: memoryview) -> dict[str, Any]:
        parts = read_frame(request).parts
        return {
            tensor.name: _array(tensor, part, request)
            for tensor, part in zip(self._manifest.inputs, parts, strict=True)
            if not (tensor.optional and is_absent(part))
        }

    def _write(self, answer: memoryview, arrays: Sequence[Any]) -> None:
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
