"""What `gangway client MODEL --snippet` prints: a program and a command that send the model a request, as pasted."""

import json
import math
import shlex
from collections.abc import Sequence
from urllib.parse import quote

from gangway.clients.inputs import BYTES, TensorMetadata, concrete_shape, dtype_of

MOST_VALUES = 1024  # of an input on a command line

PYTHON = """\
# pip install 'tritonclient[grpc]' numpy
import numpy as np
import tritonclient.grpc as triton

client = triton.InferenceServerClient({url!r})
{inputs}
answer = client.infer({model!r}, [{names}]{version})
for output in answer.get_response().outputs:
    print(output.name, answer.as_numpy(output.name))
"""


def python_snippet(url: str, model: str, version: str, inputs: Sequence[TensorMetadata], batch: int) -> str:
    """Return a program for Triton's client of gRPC. Raises InputError if `batch` rows are not possible."""
    lines, names = [], []
    for place, tensor in enumerate(inputs):
        shape, name = list(concrete_shape(tensor, batch)), f"input{place}"
        value = f'np.full({shape}, b"0", object)' if tensor.datatype == BYTES else _ones(tensor, shape)
        lines.append(f"{name} = triton.InferInput({tensor.name!r}, {shape}, {tensor.datatype!r})")
        lines.append(f"{name}.set_data_from_numpy({value})")
        names.append(name)
    asked = f", model_version={version!r}" if version else ""
    return PYTHON.format(url=url, model=model, inputs="\n".join(lines), names=", ".join(names), version=asked)


def _ones(tensor: TensorMetadata, shape: Sequence[int]) -> str:
    return f"np.ones({shape}, {dtype_of(tensor.datatype).name!r})"


def curl_snippet(host: str, model: str, version: str, inputs: Sequence[TensorMetadata], batch: int) -> str:
    """Return a command for the usual port of HTTP; empty if an input has too many values for one."""
    tensors = []
    for tensor in inputs:
        shape = list(concrete_shape(tensor, batch))
        count = math.prod(shape)
        if count > MOST_VALUES:
            return ""
        value: object = {BYTES: "0", "BOOL": True}.get(tensor.datatype, 1)
        tensors.append({"name": tensor.name, "datatype": tensor.datatype, "shape": shape, "data": [value] * count})
    path = f"/v2/models/{quote(model)}" + (f"/versions/{version}" if version else "") + "/infer"
    return f"curl http://{host}:8000{path} -d {shlex.quote(json.dumps({'inputs': tensors}))}"
