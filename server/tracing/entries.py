"""What Triton writes about one request into its trace file."""

import base64
import json
import math
from collections.abc import Iterable

from gangway.server.tracing.record import TensorRecord, TraceRecord


def text_of(record: TraceRecord, number: int) -> str:
    """Return who it was, its instants in their order, its tensors, as JSON without the brackets of the list around it.

    `number` is the trace's id; the steps of an ensemble have the next ones, and that as their parent's.
    """
    who: dict[str, object] = {"id": number, "model_name": record.model, "model_version": record.version}
    if record.request_id:
        who["request_id"] = record.request_id
    parts = [_json(who)]
    if record.timestamps:
        read, sent = record.of_root()[:2], record.of_root()[2:]
        parts += _timestamps(number, [*read, *record.of_compute(), *record.of_model(), *sent])
    parts += [_json(_tensor_entry(tensor, number)) for tensor in record.tensors]
    for place, step in enumerate(record.steps, number + 1):
        parts.append(_json({"id": place, "model_name": step.model, "model_version": step.version, "parent_id": number}))
        if record.timestamps:
            parts += _timestamps(place, [*step.of_model(), *step.of_compute()])
    return ",".join(parts)


def _timestamps(number: int, instants: Iterable[tuple[str, int]]) -> list[str]:
    """Formatted by hand: their names need no escaping, and there are many."""
    in_order = sorted(instants, key=lambda instant: instant[1])
    return [f'{{"id":{number},"timestamps":[{{"name":"{name}","ns":{ns}}}]}}' for name, ns in in_order]


def _tensor_entry(tensor: TensorRecord, number: int) -> dict[str, object]:
    return {
        "id": number,
        "activity": tensor.activity,
        "tensor": {
            "name": tensor.name,
            "data": _values_of(tensor),
            "shape": ",".join(map(str, tensor.shape)),
            "dtype": tensor.datatype,
        },
    }


def _json(entry: dict[str, object]) -> str:
    return json.dumps(entry, separators=(",", ":"))


def _values_of(tensor: TensorRecord) -> str:
    import numpy as np  # noqa: PLC0415 - an exporter without tensors never needs it

    from gangway.artifact.datatypes import STORAGE  # noqa: PLC0415
    from gangway.executor.frames import split_strings  # noqa: PLC0415

    data = base64.b64decode(tensor.data)
    if tensor.datatype == "BYTES":
        return ",".join(map(json.dumps, split_strings(data, math.prod(tensor.shape))))
    values = np.frombuffer(data, STORAGE[tensor.datatype])
    if tensor.datatype == "BF16":  # the upper half of an FP32
        values = (values.astype(np.uint32) << 16).view(np.float32)
    return ",".join(map(str, values.tolist()))
