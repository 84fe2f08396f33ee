"""Repositories with Python models, servers of them, and requests."""

import textwrap
from pathlib import Path

import numpy as np

from tests.helpers.served import Array

HEAD = "import numpy as np\nimport triton_python_backend_utils as pb_utils\n\n\n"
ADD = """
    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", x + np.float32(1))]))
        return responses
"""
SLOW = """
    def execute(self, requests):
        import time
        time.sleep(0.2)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""

TEXTS = ("x:STRING:1", "y:STRING:1")  # of a model that `executes`


def executes(names: str, more: str = "") -> str:
    """A body that executes the text that it gets, with these `names`; what that calls `found` is the answer.

    `more`: lines of `execute` before that.
    """
    return f"""
    def execute(self, requests):{more}
        responses = []
        for request in requests:
            names = {{"pb": pb_utils, "found": None, {names}}}
            exec(pb_utils.get_input_tensor_by_name(request, "x").as_numpy()[0].decode(), names)
            y = np.array([str(names["found"]).encode()], dtype=object)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]))
        return responses
"""


def config_of(inputs: str = "x:FP32:4", outputs: str = "y:FP32:4", batch: int = 0, more: str = "") -> str:
    """A config.pbtxt; tensors as "name:TYPE:dim,dim name:TYPE:dim"."""
    lines = ['backend: "python"', f"max_batch_size: {batch}"]
    for group, tensors in (("input", inputs), ("output", outputs)):
        for tensor in tensors.split():
            name, datatype, dims = tensor.split(":")
            lines.append(f'{group} {{ name: "{name}" data_type: TYPE_{datatype} dims: [{dims}] }}')
    return "\n".join([*lines, more])


def parameter(key: str, value: object) -> str:
    """A parameter of config.pbtxt."""
    return f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}'


def write(repository: Path, name: str, body: str = ADD, config: str | None = None, head: str = HEAD) -> Path:
    """Write a model whose class has this body; without a configuration one of float32 x and y of four elements."""
    folder = repository / name
    (folder / "1").mkdir(parents=True, exist_ok=True)
    text = textwrap.indent(textwrap.dedent(body).strip("\n"), "    ")
    (folder / "1" / "model.py").write_text(f"{head}class TritonPythonModel:\n{text}\n")
    config = config_of() if config is None else config
    if config:
        (folder / "config.pbtxt").write_text(config)
    return folder


def four(value: float) -> Array:
    """Four numbers."""
    return np.full(4, value, np.float32)
