"""What the page of a model shows: its state and versions, inputs and outputs, and an example request."""

import math
from typing import Any, Final

import numpy as np

from gangway.artifact.datatypes import MOST_EXAMPLE_VALUES
from gangway.artifact.example_requests import ExampleTensor, example_of, plausible_values
from gangway.artifact.snippets import SEQUENCE
from gangway.server.errors import RequestError
from gangway.server.messages import WHOLE_MODEL, ModelUnavailable
from gangway.server.models.config import bucket_sizes
from gangway.server.models.served import Models, ServedModel
from gangway.server.models.tensors import Tensor

FEW_VALUES: Final = 16  # of a tensor that is too large to be read
MOST_LABELS: Final = 1024
DIGITS: Final = 4  # behind the point
COLOURS: Final = (1, 3)
PIXELS: Final = ("FP32", "FP16", "FP64", "UINT8")
Json = dict[str, Any]


def described(models: Models, name: str, version: str, metrics_port: str) -> Json:
    """Return all that the page shows; `problem` says why the version answers no requests, if so.

    `metrics_port`: "" if there are no metrics. `texts`: what the page of a model offers that reads texts; else None.
    Raises RequestError for a model or a version that is not known.
    """
    states = [models.state_of(entry) for key, entry in models.entries.items() if key[0] == name]
    content: Json = {
        "name": name,
        "versions": [_version(state, models) for state in states],
        "metrics_port": metrics_port,
    }
    try:
        model = models.find(name, version)
    except RequestError as error:
        if not states:
            raise
        return content | {"problem": error.message}
    declared_size = least_declared_size(model)
    examples = {each.name: example_of(each, declared_size) for each in model.inputs.values()}
    generator = np.random.default_rng(0)  # as of `gangway client` without --seed
    return content | {
        "version": model.version,
        "max_batch_size": model.max_batch_size,
        "target_ms": None if model.qos_us is None else model.qos_us / 1000,
        "decoupled": model.is_decoupled,
        "parameters": dict(SEQUENCE) if model.sequence else {},
        "inputs": [
            _tensor(model, each)
            | {
                "optional": each.optional,
                "example": _example(examples[each.name], generator),
                "channel_axis": channel_axis(each),
                "is_file": is_file(each),
            }
            for each in model.inputs.values()
        ],
        "outputs": [
            _tensor(model, each) | {"labels": list(model.labels.get(each.name, ()))[:MOST_LABELS]}
            for each in model.outputs.values()
        ],
        "texts": _texts(model),
    }


def _texts(model: ServedModel) -> Json | None:
    """Return what `/v1/embeddings` or `/v1/rerank` does with texts; None if the model reads none."""
    settings = model.embeddings
    if settings is None or (model.tokenizer is None and not model.takes_texts):
        return None
    return {"task": settings.task}


def least_declared_size(model: ServedModel) -> int | None:
    """Return the least size that a configuration declares, if it declares those of one dimension, else None."""
    buckets = bucket_sizes(model.config)
    return min(next(iter(buckets.values()))) if len(buckets) == 1 else None


def channel_axis(tensor: Tensor) -> int | None:
    """Return the dimension of colours of a tensor that holds pictures, [N, C, H, W], [N, H, W, C] or without N."""
    rank = len(tensor.shape)
    if rank not in (3, 4) or tensor.datatype not in PIXELS:
        return None
    return next((axis for axis in (rank - 3, rank - 1) if tensor.shape[axis] in COLOURS), None)


def is_file(tensor: Tensor) -> bool:
    """Whether a tensor may hold a whole file: one element of BYTES, or bytes in a line."""
    sizes = list(tensor.shape)
    if tensor.datatype == "BYTES":
        return all(size in (-1, 1) for size in sizes)
    return tensor.datatype == "UINT8" and sizes in ([-1], [-1, -1])


def _version(state: ServedModel | ModelUnavailable, models: Models) -> Json:
    if isinstance(state, ServedModel):
        return {"version": state.version, "state": "READY", "reason": models.note_of(state)}
    version = None if state.version == WHOLE_MODEL else state.version
    return {"version": version, "state": state.state, "reason": state.reason}


def dims_of(model: ServedModel, tensor: Tensor) -> list[str]:
    """Return what a tensor's dimensions are called: a size, the model's own name of an open one, else "any".

    Rows that have no name are called as those of an input, or "N".
    """
    rows = next((each.symbols[0] for each in model.inputs.values() if each.symbols and each.symbols[0]), "N")
    names = tensor.symbols or ("",) * len(tensor.shape)
    unnamed = [rows if model.has_rows and not axis else "any" for axis in range(len(names))]
    return [
        (name or other) if size < 0 else str(size)
        for name, other, size in zip(names, unnamed, tensor.shape, strict=True)
    ]


def _tensor(model: ServedModel, tensor: Tensor) -> Json:
    return {"name": tensor.name, "datatype": tensor.datatype, "dims": dims_of(model, tensor)}


def _example(tensor: ExampleTensor, generator: np.random.Generator) -> Json:
    """Return shape and values, of a large tensor the first values only."""
    few = tensor if math.prod(tensor.shape) <= MOST_EXAMPLE_VALUES else tensor._replace(shape=(FEW_VALUES,))
    values = plausible_values(few, generator).ravel().tolist()
    return {"shape": list(tensor.shape), "values": list(map(_plain, values))}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode()
    return round(value, DIGITS) if isinstance(value, float) else value
