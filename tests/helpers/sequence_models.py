"""Models that add up what a sequence sends, and clients that send it: one compiled, one that onnxruntime executes."""

import queue
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from tritonclient.utils import InferenceServerException

from gangway.artifact.cache import Cache
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from gangway.zoo import write_model
from tests.helpers import onnx_text
from tests.helpers.served import Served

TIMEOUT_S = 60
NEVER_US = 600_000_000
STATE = 'state { input_name: "SUM_IN" output_name: "SUM_OUT" data_type: TYPE_INT32 dims: [ 1 ] }'


def config_of(strategy: str, batch: int = 8, instances: int = 1, more: str = "") -> str:
    """Inputs and outputs are completed from the ONNX file, but for the state, which clients do not see."""
    batching = f"sequence_batching {{ {strategy} max_sequence_idle_microseconds: {NEVER_US} {STATE} }}"
    tensors = 'input { name: "INPUT" } output { name: "OUTPUT" }'
    return f"max_batch_size: {batch} instance_group {{ count: {instances} }} {tensors} {batching} {more}"


def oldest(candidates: int) -> str:
    return f"oldest {{ max_candidate_sequences: {candidates} }}"


# What is no number makes a request fail.
SPELLED = """(string[N, 1] INPUT, int32[N, 1] SUM_IN) => (int32[N, 1] OUTPUT, int32[N, 1] SUM_OUT) {
    number = Cast<to=6>(INPUT)
    OUTPUT = Add(number, SUM_IN)
    SUM_OUT = Add(SUM_IN, number)
}"""


def save(repository: Path, cache_dir: Path, compiled: dict[str, str], spelled: dict[str, str]) -> None:
    """Write models and their configurations, by name, and compile them."""
    with tempfile.TemporaryDirectory() as folder:
        accumulator = (write_model(Path(folder), "accumulator") / "1" / "model.onnx").read_bytes()
    for name, config in (compiled | spelled).items():
        path = onnx_text.save(repository, name, SPELLED, config)
        if name in compiled:
            path.write_bytes(accumulator)
        compile_model(path, name, Cache(cache_dir), detect(), lambda *_: None)


class Sums(Served):
    """A server of such models."""

    def add(self, model: str, identity: int | str, value: int | str, start: bool = False, end: bool = False) -> int:
        """Send a value of a sequence; return the sum."""
        given = {"sequence_id": identity, "sequence_start": start, "sequence_end": end}
        return total_of(self.client.infer(model, number(value), client_timeout=TIMEOUT_S, **given))

    def answered(self, model: str) -> int:
        """How many requests of a model have been answered."""
        return int(self.statistics(model).inference_stats.success.count)


def number(value: int | str, module: Any = triton) -> list[Any]:
    """The input of a request; text for the model that reads it."""
    tensor = module.InferInput("INPUT", [1, 1], "BYTES" if isinstance(value, str) else "INT32")
    tensor.set_data_from_numpy(np.array([[value]], object if isinstance(value, str) else np.int32))
    return [tensor]


def total_of(result: Any) -> int:
    answer = result.as_numpy("OUTPUT")
    assert answer.shape == (1, 1)
    return int(answer[0, 0])


def run_unary(url: str, module: Any, model: str, identity: int | str, values: Sequence[int | str]) -> list[int]:
    """Send the values of a sequence one after the other, over gRPC or HTTP; return the sums that were answered."""
    with module.InferenceServerClient(url) as client:
        return [
            total_of(client.infer(model, number(value, module), sequence_id=identity, **flags(index, values)))
            for index, value in enumerate(values)
        ]


def run_stream(url: str, model: str, identities: Sequence[int | str], values: Sequence[int | str]) -> list[list[int]]:
    """Send the values to each sequence by one stream, without waiting for answers; return the sums, by sequence."""
    answers: queue.Queue[Any] = queue.Queue()
    sums: list[list[int]] = [[] for _ in identities]
    with triton.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        for index, value in enumerate(values):
            for place, identity in enumerate(identities):
                options = {"request_id": str(place), "sequence_id": identity, **flags(index, values)}
                client.async_stream_infer(model, number(value), **options)
        for _ in range(len(values) * len(identities)):
            result = answers.get(timeout=TIMEOUT_S)
            if isinstance(result, InferenceServerException):
                raise result
            sums[int(result.get_response().id)].append(total_of(result))
    return sums


def flags(index: int, values: Sequence[Any]) -> dict[str, bool]:
    return {"sequence_start": not index, "sequence_end": index == len(values) - 1}


MODULES = {"grpc": triton, "http": triton_http}
