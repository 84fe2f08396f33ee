"""How a model is opened in onnxruntime: by the compiler, to see whether that works, and by the workers.

Importing this imports onnxruntime and numpy (15 MB of private memory). Who does not need them does not import it.
"""

import os
from pathlib import Path
from typing import Any

# Otherwise onnxruntime tells Microsoft about every model it opens: names, hashes, shapes. It looks when it is imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
import onnxruntime

_FATAL = 4  # errors come as exceptions


def open_session(path: Path) -> Any:
    """Return an InferenceSession that computes in the calling thread only. Raises what onnxruntime raises.

    Without a memory arena: a worker runs many models in turn, and what one of them kept would be missing to all.
    """
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    options.log_severity_level = _FATAL
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
