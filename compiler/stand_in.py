"""What serves a model until its kernels are compiled: onnxruntime, by an artifact that takes a second, not minutes.

The file is read and lowered as a compilation does, so inputs, outputs and the meaning of the first dimension are those
that the compiled artifact will have. No code is made, TVM is imported only for operators that nothing else computes.
"""

import os
import time
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO

import onnx

from gangway.artifact.format import LEAST_MAPPED_BYTES, STAND_IN, Engine, Manifest, align_up
from gangway.artifact.onnx_session import open_session, reason_of
from gangway.artifact.writer import OnnxArtifactWriter
from gangway.base.host_limits import allocated_by
from gangway.compiler.arguments import ModelSource
from gangway.compiler.errors import UnreadableModelError, UnsupportedModelError
from gangway.compiler.fallback import SessionTrials, check_tensors, make_readable_copy, whole_layer
from gangway.compiler.frontend.importer import count_parameters, read_graph
from gangway.compiler.frontend.ml_operators import drop_zip_maps
from gangway.compiler.frontend.onnx_file import Stretch
from gangway.compiler.kernels.plain_specs import TailSpec
from gangway.compiler.key import compiler_version, external_files, files_stamp
from gangway.compiler.lower.lowering import lower_model
from gangway.compiler.lower.reference import working_apart
from gangway.compiler.lower.signature import signature_of
from gangway.compiler.model_file import make_readable, parse


def make_stand_in(source: ModelSource, folder: Path, stamp: tuple[tuple[int, ...], ...]) -> Manifest:
    """Make the artifact `folder` of an ONNX file, whose files had this stamp when the key was computed.

    Raises ModelError if the compiler refuses the model, or onnxruntime does not open it; OSError.
    """
    start_ns, path = time.monotonic_ns(), source.path
    with OnnxArtifactWriter(folder, is_brief=True) as writer:
        _write(writer, path)
        with working_apart(_opens(writer.model_path), is_limited=False) as session_bytes:
            graph = read_graph(path)
            layers = lower_model(graph, slow=(), is_checked=False).layers
            tail = last if layers and isinstance(last := layers[-1].spec, TailSpec) else None
            inputs, outputs = signature_of(graph, path, tail)
            own_bytes = session_bytes()
        if files_stamp(path) != stamp:
            raise UnreadableModelError(f"{path.name} changed while it was read")
        manifest = Manifest(
            key=source.key,
            model_name=source.model_name,
            batched=graph.batched,
            inputs=inputs,
            outputs=outputs,
            layers=(whole_layer(),),
            arena_bytes=0,
            target=source.target,
            files={},  # the writer knows them
            engine=Engine.ONNXRUNTIME,
            fallback_reason=STAND_IN,
            phase_us={"onnxruntime": (time.monotonic_ns() - start_ns) // 1000},
            parameters=count_parameters(path),
            session_bytes=own_bytes,
            compiler_version=compiler_version(),
        )
        return writer.commit(manifest)


def _write(writer: OnnxArtifactWriter, path: Path) -> None:
    """Write the model as onnxruntime reads it, with large weights beside it, which all sessions map.

    So a session of hundreds of megabytes is opened in a quarter of the time.
    """
    external = list(external_files(path))
    model, weights = parse(path)
    if external or not weights:
        writer.copy(path, external)
        make_readable_copy(writer)
        return
    drop_zip_maps(model)
    make_readable(model)
    writer.model_path.parent.mkdir()
    with path.open("rb") as source, writer.data_path.open("wb", buffering=0) as data:
        for tensor in model.graph.initializer:
            stretch = weights.pop(tensor.name, None)
            if stretch is not None:
                _move(tensor, stretch, source, data)
    writer.model_path.write_bytes(model.SerializeToString())


def _move(tensor: onnx.TensorProto, stretch: Stretch, source: BinaryIO, data: FileIO) -> None:
    """Let a tensor have its content again, in the file `data` if it is worth a mapping."""
    if stretch.size_bytes < LEAST_MAPPED_BYTES:
        source.seek(stretch.begin)
        tensor.raw_data = source.read(stretch.size_bytes)
        return
    offset = data.seek(align_up(data.tell()))
    begin, end = stretch.begin, stretch.begin + stretch.size_bytes
    while begin < end:
        sent = os.sendfile(data.fileno(), source.fileno(), begin, end - begin)  # no byte comes into this process
        if not sent:
            raise UnreadableModelError("the file became shorter while it was read")
        begin += sent
    tensor.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", Path(data.name).name), ("offset", offset), ("length", stretch.size_bytes)):
        tensor.external_data.add(key=key, value=str(value))


def _opens(path: Path) -> Callable[[], int]:
    """Return what opens a file in onnxruntime, runs it once if zeros are possible, and returns the session's memory."""

    def opened() -> int:
        try:
            session, session_bytes = allocated_by(lambda: open_session(path))
        except Exception as error:  # onnxruntime's own exceptions have no common base
            raise UnsupportedModelError(f"onnxruntime refuses it: {reason_of(error)}") from error
        check_tensors(session.get_inputs(), session.get_outputs())
        with suppress(Exception):  # whatever it does not like about zeros
            SessionTrials(session, are_apart=False).run(session.get_inputs(), rows=1, sizes={})
        return session_bytes

    return opened
