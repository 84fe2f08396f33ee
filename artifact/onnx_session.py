"""How a model is opened and run in onnxruntime: by the compiler, to see whether that works, and by the workers.

Importing this imports onnxruntime and numpy (15 MB of private memory). Who does not need them does not import it.
"""

import ctypes
import math
import os
import re
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

# Otherwise onnxruntime sends names, hashes and shapes of models to Microsoft. It reads the variable when imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime

from gangway.artifact.format import LEAST_MAPPED_BYTES
from gangway.base.extras import missing_packages
from gangway.base.host_limits import cpu_flags

_FATAL = 4  # errors come as exceptions
_BFLOAT16 = 16  # ONNX's number
_VNNI = ("avx512_vnni", "avx_vnni")
_PROVIDERS = ["CPUExecutionProvider"]
EXTENSION_DOMAINS = ("ai.onnx.contrib", "com.microsoft.extensions")  # of the operators of onnxruntime-extensions
_LONGEST, _LONGEST_REASON = 4000, 500  # characters of an exception, and of what is told of it
_CODE = re.compile(
    r"^\[ONNXRuntimeError\] : \d+ : \w+ : (Load model from .*? failed: ?)?(Exception during initialization: )?"
)
_NODE = re.compile(r"Non-zero status code returned while running (\S+) node\. Name:'(.*?)' Status Message: ")
# "PATH/file.cc:150 void function(...) [with T = ...] " before the sentence
_PLACE = re.compile(r"\S*\w+\.(cc|h|cpp|hpp):\d+ (.*?\) (const )?(\[with [^\]]*\] )?|(?=\w+ [A-Z]))(\w+ (?=Integer ))?")
onnxruntime.set_default_logger_severity(_FATAL)  # of messages outside of sessions


def open_session(
    model: Path | bytes,
    optimise: bool = True,
    threads: int = 1,
    save: Path | None = None,
    layouts: bool = True,
    beside: Path | None = None,
    exact: bool | None = None,
) -> Any:
    """Return an InferenceSession that computes in the calling thread and `threads - 1` of its own, which never spin
    between runs; `model`: a file, or what one holds.

    Without a memory arena: a worker runs many models in turn, and what one of them kept would be missing to all.

    `save`: where the optimised model is written, and its large weights beside it, as they are and as kernels read them.
    Every session that opens that file maps them: one copy in the machine. `layouts`: optimised, too, by layouts that
    only machines with registers of the same width read. `beside`: the folder of weights that `model` has in files.
    `exact`: products of uint8 and constant int8 do not saturate on any machine; None: not on this one.
    A model with operators of onnxruntime-extensions gets them from that package.

    Raises what onnxruntime raises; ModuleNotFoundError if that package is missing.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.add_session_config_entry("session.force_spinning_stop", "1")  # within a run its cores are its own
    options.enable_cpu_mem_arena = False
    options.log_severity_level = _FATAL
    if not optimise:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    elif not layouts:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    if products_saturate() if exact is None else exact:
        options.add_session_config_entry("session.x64quantprecision", "1")
    if beside is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(beside))
    if save is not None:
        options.optimized_model_filepath = str(save)
        prefix = "session.optimized_model_external_initializers_"
        options.add_session_config_entry(f"{prefix}file_name", f"{save.name}.data")
        options.add_session_config_entry(f"{prefix}min_size_in_bytes", str(LEAST_MAPPED_BYTES))
        options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
    try:
        return onnxruntime.InferenceSession(model, options, providers=_PROVIDERS)
    except Exception as error:  # onnxruntime's own exceptions have no common base
        if not any(f"{domain}:" in str(error) for domain in EXTENSION_DOMAINS):
            raise
    options.register_custom_ops_library(_extensions_library())
    return onnxruntime.InferenceSession(model, options, providers=_PROVIDERS)


@cache
def products_saturate() -> bool:
    """Whether onnxruntime's fastest products of uint8 and int8 are wrong on this processor.

    Without VNNI it adds two of them in 16 bits, which hold no more than 32767. Told to be exact, it makes the weights
    uint8, which takes more time.
    """
    flags = cpu_flags()
    return bool(flags) and flags.isdisjoint(_VNNI)


def _extensions_library() -> str:
    """Return the path of onnxruntime-extensions' library. Raises ModuleNotFoundError that says how to install it."""
    if missing := missing_packages(["onnxruntime_extensions"]):
        raise ModuleNotFoundError(f"its operators are those of {missing}", name="onnxruntime_extensions")
    from onnxruntime_extensions import get_library_path  # noqa: PLC0415 - few models need it

    return str(get_library_path())


def reason_of(error: Exception) -> str:
    """Return the node and the sentence of an exception of onnxruntime: no paths, no places in its source, one line."""
    text = " ".join(str(error)[:_LONGEST].split())
    node = _NODE.search(text)
    reason = _PLACE.sub("", text[node.end() :] if node else _CODE.sub("", text))
    if node:
        operator, name = node.groups()
        reason = f"{operator} node '{name}': {reason}" if name else f"{operator}: {reason}"
    return reason[:_LONGEST_REASON]


_NAMES = {"float": "float32", "double": "float64"}  # numpy's, where onnxruntime's differ


def element_type(kind: str) -> str:
    """Return numpy's name of what a tensor holds, of a type as sessions state it: "tensor(float)"."""
    element = kind.removeprefix("tensor(").removesuffix(")")
    return _NAMES.get(element, element)


def bind_static(session: Any, addresses: Sequence[int]) -> Any:
    """Return the binding with which a session reads and writes tensors of static shapes where they lie in memory.

    `addresses`: of its inputs, then of its outputs, in the order of the model. Who calls keeps the memory.
    """
    binding, inputs = session.io_binding(), session.get_inputs()
    for index, (tensor, address) in enumerate(zip((*inputs, *session.get_outputs()), addresses, strict=True)):
        bind = binding.bind_input if index < len(inputs) else binding.bind_output
        bind(tensor.name, "cpu", 0, np.dtype(element_type(tensor.type)), tensor.shape, address)
    return binding


def run_session(session: Any, outputs: Sequence[str], feeds: Mapping[str, Any], bfloat16: Collection[str]) -> list[Any]:
    """Return the outputs as arrays. `bfloat16` names the inputs and outputs of that type, whose arrays are of uint16.

    Raises what onnxruntime raises.
    """
    if not bfloat16:
        answers: list[Any] = session.run(outputs, feeds)
        return answers
    values = {
        name: onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array, _BFLOAT16)
        if name in bfloat16
        else onnxruntime.OrtValue.ortvalue_from_numpy(array)
        for name, array in feeds.items()
    }
    return [
        _bits(value) if name in bfloat16 else value.numpy()
        for name, value in zip(outputs, session.run_with_ort_values(outputs, values), strict=True)
    ]


def _bits(value: Any) -> Any:
    """Return a copy of a tensor that numpy has no type for, two bytes an element."""
    shape = value.shape()
    content = ctypes.string_at(value.data_ptr(), 2 * math.prod(shape))
    return np.frombuffer(content, np.uint16).reshape(shape)
