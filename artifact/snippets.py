"""Programs and commands that send a model an example request, as pasted: by Triton's Python clients, and by curl."""

import json
import math
import shlex
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote

from gangway.artifact.datatypes import DTYPES, MOST_EXAMPLE_VALUES, example_input
from gangway.artifact.example_requests import ExampleTensor

PYTHON: Final = """\
# pip install 'tritonclient[grpc]' numpy{more_packages}
{more_imports}import numpy as np
import tritonclient.grpc as triton

client = triton.InferenceServerClient({address!r}{ssl})
{inputs}
answer = client.infer({model!r}, [{names}]{options})
for output in answer.get_response().outputs:
    print(output.name, answer.as_numpy(output.name))
"""
STREAM: Final = """\
import json
import urllib.request

request = urllib.request.Request({url!r}, json.dumps({content!r}).encode())
for line in urllib.request.urlopen(request):
    print(line.decode(), end="")
"""
SEQUENCE: Final[Mapping[str, Any]] = MappingProxyType(
    {"sequence_id": 1, "sequence_start": True, "sequence_end": True}
)  # the parameters of a request that is a whole sequence
NONE: Final[Mapping[str, Any]] = MappingProxyType({})


def python_snippet(
    address: str,
    model: str,
    version: str,
    inputs: Sequence[ExampleTensor],
    parameters: Mapping[str, Any] = NONE,
    ssl: bool = False,
) -> str:
    """Return a program for Triton's client of gRPC, whose values are ones.

    `parameters`: those that the client's `infer` has arguments for.
    """
    lines, names = [], []
    for place, (name, datatype, sizes) in enumerate(inputs):
        shape, variable = list(sizes), f"input{place}"
        dtype = repr(DTYPES[datatype].name) if datatype in DTYPES else "ml_dtypes.bfloat16"
        value = f'np.full({shape}, b"0", object)' if datatype == "BYTES" else f"np.ones({shape}, {dtype})"
        lines.append(f"{variable} = triton.InferInput({name!r}, {shape}, {datatype!r})")
        lines.append(f"{variable}.set_data_from_numpy({value})")
        names.append(variable)
    options = {**({"model_version": version} if version else {}), **parameters}
    has_bf16 = any(each.datatype == "BF16" for each in inputs)
    return PYTHON.format(
        more_packages=" ml_dtypes" * has_bf16,
        more_imports="import ml_dtypes\n" * has_bf16,
        address=address,
        ssl=", ssl=True" if ssl else "",
        inputs="\n".join(lines),
        model=model,
        names=", ".join(names),
        options="".join(f", {name}={value!r}" for name, value in options.items()),
    )


def curl_snippet(
    url: str, model: str, version: str, inputs: Sequence[ExampleTensor], parameters: Mapping[str, Any] = NONE
) -> str:
    """Return a command for the HTTP port at `url`; empty if no command line holds an input."""
    tensors = [example_input(*each) for each in inputs]
    if None in tensors:
        return ""
    content = {**({"parameters": dict(parameters)} if parameters else {}), "inputs": tensors}
    return f"curl {shlex.quote(url + model_path(model, version))}/infer -d {shlex.quote(json.dumps(content))}"


def stream_snippets(url: str, model: str, version: str, inputs: Sequence[ExampleTensor]) -> tuple[str, str]:
    """Return a program and a command for a model of many answers, which come as events; empty if it is too large."""
    if any(math.prod(each.shape) > MOST_EXAMPLE_VALUES for each in inputs):
        return "", ""
    content = generate_content(inputs)
    target = f"{url}{model_path(model, version)}/generate_stream"
    command = f"curl -N {shlex.quote(target)} -d {shlex.quote(json.dumps(content))}"
    return STREAM.format(url=target, content=content), command


def generate_content(inputs: Sequence[ExampleTensor]) -> Mapping[str, Any]:
    """Return the JSON of a generate request, whose values are ones: a value alone, else an array."""
    found = {}
    for tensor in inputs:
        example = example_input(*tensor)
        values: Any = example["data"] if example else []
        found[tensor.name] = values[0] if len(values) == 1 else values
    return found


def model_path(model: str, version: str) -> str:
    """Return the path of a model, or of one version of it."""
    return f"/v2/models/{quote(model, safe='')}" + (f"/versions/{version}" if version else "")
