"""What `gangway client MODEL --snippet` prints: a program and a command that send the model a request, as pasted."""

import json
import shlex
from collections.abc import Sequence
from urllib.parse import quote

from gangway.artifact.datatypes import example_input
from gangway.clients.addresses import USUAL_HTTP_PORT
from gangway.clients.inputs import BYTES, TensorMetadata, concrete_shape, dtype_of

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
    tensors = [example_input(each.name, each.datatype, concrete_shape(each, batch)) for each in inputs]
    if None in tensors:
        return ""
    path = f"/v2/models/{quote(model)}" + (f"/versions/{version}" if version else "") + "/infer"
    return f"curl http://{host}:{USUAL_HTTP_PORT}{path} -d {shlex.quote(json.dumps({'inputs': tensors}))}"
