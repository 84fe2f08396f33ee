"""What the models of the comparison are made of: a class body, a configuration, further files."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HEAD = """import asyncio
import json
import sys
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils


def text(request, name="do"):
    return pb_utils.get_input_tensor_by_name(request, name).as_numpy().ravel()[0].decode()


def told(value):
    value = value if isinstance(value, (str, bytes)) else json.dumps(value)
    return pb_utils.Tensor("y", np.array([value], dtype=object))


def answer(*tensors, **more):
    return pb_utils.InferenceResponse(list(tensors), **more)


"""


def lambdas(expressions: Mapping[str, str]) -> str:
    """Return a dictionary in Python: functions without arguments, by name."""
    return f"{{{', '.join(f'{name!r}: lambda: {code}' for name, code in expressions.items())}}}"


def telling(expressions: Mapping[str, str]) -> str:
    """Return an `execute` that tells the value of the expression that a request names, or the type of its error."""
    return f"""
    def execute(self, requests):
        found = []
        for r in requests:
            made = {lambdas(expressions)}
            try:
                value = json.dumps(made[text(r)]())
            except Exception as error:
                value = type(error).__name__
            found.append(answer(told(value)))
        return found
"""


Step = tuple[str, str, str]  # model, "input=tensor ...", "tensor=output ..."


@dataclass(frozen=True)
class Model:
    """One model. Without a body it has no model.py; without a configuration no config.pbtxt. `base`: of its class."""

    name: str
    body: str = ""
    config: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    head: str = HEAD
    versions: Sequence[int] = (1,)
    base: str = ""

    def write(self, repository: Path) -> None:
        """Write its folder."""
        for version in self.versions:
            folder = repository / self.name / str(version)
            folder.mkdir(parents=True)
            if self.body:
                base = f"({self.base})" if self.base else ""
                body = textwrap.indent(textwrap.dedent(self.body).strip("\n"), "    ")
                (folder / "model.py").write_text(f"{self.head}class TritonPythonModel{base}:\n{body}\n")
        for path, content in self.files.items():
            (repository / self.name / path).parent.mkdir(exist_ok=True)
            (repository / self.name / path).write_text(content)
        if self.config:
            (repository / self.name / "config.pbtxt").write_text(self.config)


def config_of(inputs: str, outputs: str, batch: int = 0, more: str = "") -> str:
    """Return a config.pbtxt; tensors as "name:TYPE:dim,dim ...", with a question mark behind an optional input."""
    return "\n".join(['backend: "python"', f"max_batch_size: {batch}", *_tensors(inputs, outputs), more])


def text_config(batch: int = 0, more: str = "") -> str:
    """Return the config.pbtxt of a model that is told what to do, and tells what it found."""
    return config_of("do:STRING:1", "y:STRING:1", batch, more)


def ensemble_of(inputs: str, outputs: str, steps: Sequence[Step], batch: int = 0, more: str = "") -> str:
    """Return the config.pbtxt of an ensemble."""
    lines = ['platform: "ensemble"', f"max_batch_size: {batch}", *_tensors(inputs, outputs), more]
    return "\n".join([*lines, "ensemble_scheduling {", *(_step(*step) for step in steps), "}"])


def _tensors(inputs: str, outputs: str) -> list[str]:
    lines = []
    for group, tensors in (("input", inputs), ("output", outputs)):
        for tensor in tensors.split():
            name, datatype, dims = tensor.split(":")
            more = " optional: true" if dims.endswith("?") else ""
            lines.append(f'{group} {{ name: "{name}" data_type: TYPE_{datatype} dims: [{dims.rstrip("?")}]{more} }}')
    return lines


def _step(model: str, inputs: str, outputs: str) -> str:
    pairs = [
        (group, *pair.split("="))
        for group, text in (("input_map", inputs), ("output_map", outputs))
        for pair in text.split()
    ]
    maps = " ".join(f'{group} {{ key: "{key}" value: "{value}" }}' for group, key, value in pairs)
    return f'step {{ model_name: "{model}" model_version: -1 {maps} }}'


TEXT = text_config()
