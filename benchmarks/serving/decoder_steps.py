"""A greedy decoder, served step by step beside onnxruntime in this process: tokens a second, and what a step costs.

The client of gRPC keeps all large tensors in shared memory: a step reads the past keys and values from one region and
writes the present ones to another. Keys and values of a source text lie in a third one, logits in a fourth. The engines
take turns, after the server has compiled all lengths that occur. `floor`: tokens a second if a step were only a request
without a model, from this client.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import onnxruntime
import tritonclient.grpc as triton
from tritonclient.utils import np_to_triton_dtype, shared_memory

from testing.decoders import Sizes, save_decoder, save_translator, source_feeds
from testing.live_server import LiveServer, live_server
from testing.report import Cell, Report, option_parser, start_report

ResultT = TypeVar("ResultT")
NAME = "decoder"
CORES = 2
TOKENS = 64
FIRST_TOKEN = 5
FIRST_STEPS = 3  # without a past, and two that show that it grows
POLL_S = 0.2
READY_TIMEOUT_S = 600
RATE_AT_LEAST, COST_AT_MOST_MS = 1.3, 0.2
SIZES = {
    "small": Sizes(layers=4, heads=4, head_size=32, words=4000, positions=128),
    "medium": Sizes(layers=6, heads=8, head_size=64, words=8000, positions=128),
    "T5-small": Sizes(layers=6, heads=8, head_size=64, words=32128, positions=128, source=32),
    "GPT-2-small": Sizes(layers=12, heads=12, head_size=64, words=50257, positions=1024),
}
ROUND_TRIPS = 200


class InProcess:
    """onnxruntime, whose tensors stay where they are."""

    def __init__(self, path: Path, sizes: Sizes) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = CORES
        self._session = onnxruntime.InferenceSession(path, options)
        self._outputs = [output.name for output in self._session.get_outputs()]
        empty = np.zeros((1, sizes.heads, 0, sizes.head_size), np.float32)
        self._empty = {f"past.{layer}.{kind}": empty for layer, kind in sizes.caches}
        self._source = source_feeds(1, sizes)

    def tokens(self) -> list[int]:
        """Return what follows the first token."""
        past, found = self._empty, [FIRST_TOKEN]
        for _ in range(TOKENS):
            feeds = {"input_ids": np.array([[found[-1]]]), **self._source, **past}
            answer: dict[str, Any] = dict(zip(self._outputs, self._session.run(self._outputs, feeds), strict=True))
            found.append(int(answer["logits"][0, -1].argmax()))
            past = {name: answer[name.replace("past", "present")] for name in past}
        return found


class Served:
    """A client of the server, and its regions of shared memory. What it asks for again, it keeps."""

    def __init__(self, client: Any, sizes: Sizes, stack: ExitStack) -> None:
        self._client, self._sizes = client, sizes
        self._stride = 4 * sizes.width * (TOKENS + 1)
        for name in ("a", "b"):
            self._share(name, self._stride * len(sizes.caches), stack)
        logits = self._share("logits", 4 * sizes.words, stack)
        self._logits = shared_memory.get_contents_as_numpy(logits, np.float32, [sizes.words])
        self._requests: dict[int, tuple[list[Any], list[Any]]] = {}
        self._source = self._shared_source(stack)

    def _share(self, name: str, size_bytes: int, stack: ExitStack) -> Any:
        """Return a new region, which the server knows by this name."""
        region = shared_memory.create_shared_memory_region(name, f"/decoder_steps_{name}", size_bytes)
        stack.callback(shared_memory.destroy_shared_memory_region, region)
        self._client.register_system_shared_memory(name, f"/decoder_steps_{name}", size_bytes)
        stack.callback(self._client.unregister_system_shared_memory, name)
        return region

    def _shared_source(self, stack: ExitStack) -> list[Any]:
        """Return inputs that are the same at each step, in a region of their own."""
        feeds = source_feeds(1, self._sizes)
        if not feeds:
            return []
        region = self._share("source", sum(array.nbytes for array in feeds.values()), stack)
        shared_memory.set_shared_memory_region(region, list(feeds.values()))
        inputs, end = [], 0
        for name, array in feeds.items():
            inputs.append(triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
            inputs[-1].set_shared_memory("source", array.nbytes, end)
            end += array.nbytes
        return inputs

    def tokens(self, count: int = TOKENS) -> list[int]:
        """Return what follows the first token."""
        found = [FIRST_TOKEN]
        for past in range(count):
            found.append(self._step(found[-1], past))
        return found

    def costs(self) -> tuple[int, int]:
        """Return what requests have cost in the server beside computing, in nanoseconds, and how many they were."""
        (model,) = self._client.get_inference_statistics(NAME).model_stats
        parts = model.inference_stats
        return parts.queue.ns + parts.compute_input.ns + parts.compute_output.ns, parts.success.count

    def _step(self, token: int, past: int) -> int:
        if past not in self._requests:
            self._requests[past] = self._request(past)
        inputs, outputs = self._requests[past]
        inputs[0].set_data_from_numpy(np.array([[token]]))
        self._client.infer(NAME, inputs, outputs=outputs)
        return int(self._logits.argmax())

    def _request(self, past: int) -> tuple[list[Any], list[Any]]:
        """Return inputs, the token first, and outputs."""
        source, into = ("a", "b") if past % 2 else ("b", "a")
        inputs = [triton.InferInput("input_ids", [1, 1], "INT64"), *self._source]
        outputs = [triton.InferRequestedOutput("logits")]
        outputs[0].set_shared_memory("logits", 4 * self._sizes.words)
        row_bytes = 4 * self._sizes.width
        for place, (layer, kind) in enumerate(self._sizes.caches):
            shape = [1, self._sizes.heads, past, self._sizes.head_size]
            inputs.append(triton.InferInput(f"past.{layer}.{kind}", shape, "FP32"))
            if past:
                inputs[-1].set_shared_memory(source, row_bytes * past, place * self._stride)
            else:
                inputs[-1].set_data_from_numpy(np.zeros(shape, np.float32))
            outputs.append(triton.InferRequestedOutput(f"present.{layer}.{kind}"))
            outputs[-1].set_shared_memory(into, row_bytes * (past + 1), place * self._stride)
        return inputs, outputs

    def round_trip_s(self) -> float:
        """Return how long a request takes that executes nothing."""
        return min(timed(self._client.is_server_live)[0] for _ in range(ROUND_TRIPS))


def wait_until_compiled(server: LiveServer, served: Served) -> float:
    """Ask for two steps, which show what grows, and wait until all lengths are compiled; return how long that takes.

    More requests would only slow the compiler down, which gives way to them. Raises TimeoutError.
    """
    begin = time.monotonic()
    served.tokens(FIRST_STEPS)
    while f"past=1 to {TOKENS}: ready" not in server.log.read_text():
        if time.monotonic() - begin > READY_TIMEOUT_S:
            raise TimeoutError(f"not compiled within {READY_TIMEOUT_S} s: {server.log.read_text()}")
        time.sleep(POLL_S)
    return time.monotonic() - begin


def timed(run: Callable[[], ResultT]) -> tuple[float, ResultT]:
    """Return how long a run takes in seconds, and what it returns."""
    begin = time.perf_counter()
    found = run()
    return time.perf_counter() - begin, found


def measure(report: Report, name: str, sizes: Sizes, rounds: int) -> None:
    """Compare one decoder."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        save = save_translator if sizes.source else save_decoder
        path = save(Path(folder) / "models" / NAME / "1" / "model.onnx", sizes)
        own = InProcess(path, sizes)
        server = stack.enter_context(
            live_server(Path(folder) / "models", [f"--cache-dir={folder}/cache", f"--compile-ahead={TOKENS}"])
        )
        client = stack.enter_context(triton.InferenceServerClient(server.url))
        served = Served(client, sizes, stack)
        compile_s = wait_until_compiled(server, served)
        own.tokens()
        served.tokens()  # the first steps of each length find nothing prepared
        before_ns, before = served.costs()
        pairs = [(timed(own.tokens), timed(served.tokens)) for _ in range(rounds)]
        cost_ns, count = served.costs()
        cost_ms = (cost_ns - before_ns) / 1e6 / (count - before)
        ratio = statistics.median(there / here for (there, _), (here, _) in pairs)
        alike = all(there == here for (_, there), (_, here) in pairs)
        rates = [TOKENS / statistics.median(pair[side][0] for pair in pairs) for side in (0, 1)]
        row: dict[str, Cell] = {
            "decoder": name,
            "onnxruntime": rates[0],
            "gangway": rates[1],
            "ratio": ratio,
            "floor": 1 / served.round_trip_s(),
            "step's cost, ms": cost_ms,
            "compiled, s": compile_s,
            "same tokens": str(alike),
        }
        report.table(f"tokens a second, {TOKENS} tokens, {CORES} cores", [row])
        report.goal(f"{name}: tokens a second over onnxruntime's", ratio, RATE_AT_LEAST)
        report.target(f"{name}: cost of a step beside computing, ms", cost_ms, COST_AT_MOST_MS)
        report.goal(f"{name}: the same tokens", float(alike), 1.0)


def main(argv: list[str]) -> int:
    """Measure; return 1 if a bound was missed."""
    parser: argparse.ArgumentParser = option_parser(__doc__ or "")
    parser.add_argument("--size", choices=SIZES, action="append", help="which decoders; default: all")
    parser.add_argument("--rounds", type=int, default=5, help="by turns")
    options = parser.parse_args(argv)
    report = start_report("A decoder served step by step")
    for name in options.size or SIZES:
        measure(report, name, SIZES[name], options.rounds)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
