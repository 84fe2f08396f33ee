"""perf_analyzer's less usual flags: each with a model that it makes sense for, and the files that it names.

`{folder}` in a flag is the folder that `write_files` has written.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from testing.perf_analyzer import GRPC, HTTP, Mode

ROWS = 8  # different rows in a file of input data
INTERVALS_US = (5_000, 15_000, 10_000)


@dataclass(frozen=True)
class Case:
    """One call. `per_s`: the rate that was asked for, which the result must have, give or take a third; 0: none."""

    model: str
    mode: Mode
    protocol: str = GRPC
    per_s: float = 0.0


def _on(model: str, *flags: str, protocol: str = GRPC, per_s: float = 0.0, **mode: Any) -> Case:
    return Case(model, Mode(flags, **mode), protocol, per_s)


_SEARCH = ("--binary-search", "--latency-threshold", "500")
_RATE = ("--request-rate-range", "50")
_STREAM = ("--streaming", "--async")
_SHORT = ("--sequence-length", "5", "--sequence-length-variation", "0")
_HTTP: Mapping[str, Any] = {"protocol": HTTP}

CASES: Mapping[str, Case] = {
    # how much load
    "search of concurrency": _on("mlp", *_SEARCH, "--concurrency-range", "1:8:2", searches=True),
    "search of rate": _on("mlp", *_SEARCH, "--request-rate-range", "50:200:50", searches=True),
    "search of rate, Poisson": _on(
        "mlp", *_SEARCH, "--request-rate-range", "50:200:50", "--request-distribution", "poisson", searches=True
    ),
    "linear search": _on("mlp", "--latency-threshold", "500", "--concurrency-range", "1:4:1", levels=4),
    "rate": _on("mlp", *_RATE, per_s=50),
    "rate, stream": _on("mlp", *_RATE, *_STREAM, per_s=50),
    "intervals": _on("mlp", "--request-intervals", "{folder}/intervals.txt", per_s=100),
    "batch": _on("mlp", "-b", "16"),
    "threads": _on("mlp", "--async", "--concurrency-range", "8", "--max-threads", "2"),
    "periodic concurrency": _on(
        "mlp",
        *_STREAM,
        "--periodic-concurrency-range",
        "1:4:1",
        "--request-period",
        "1",
        "--profile-export-file",
        "{folder}/periodic.json",
        levels=0,
    ),
    # how long, and what is reported
    "windows of requests": _on("mlp", "--measurement-mode", "count_windows", "--measurement-request-count", "50"),
    "number of requests": _on("mlp", "--request-count", "200"),
    "requests to warm up": _on("mlp", "--warmup-request-count", "20"),
    "percentile": _on("mlp", "--percentile", "95", "--verbose-csv"),
    "profile export": _on("mlp", "--profile-export-file", "{folder}/profile.json"),
    "very verbose": _on("mlp", "-v", "-v"),
    # what is sent
    "version": _on("mlp", "-x", "1"),
    "parameters": _on(
        "mlp",
        *("--request-parameter", "own:7:int"),
        *("--request-parameter", "text:x:string"),
        *("--request-parameter", "flag:true:bool"),
        *("--request-parameter", "priority:1:int"),
    ),
    "parameters, stream": _on("mlp", *_STREAM, "--request-parameter", "own:7:int"),
    "values in a file": _on("simple", "--input-data", "{folder}/values.json"),
    "base64 in a file": _on("simple", "--input-data", "{folder}/base64.json"),
    "answers in a file": _on("simple", "--input-data", "{folder}/checked.json"),
    "several streams in a file": _on("simple", "--input-data", "{folder}/streams.json"),
    "several files": _on("simple", "--input-data", "{folder}/values.json", "--input-data", "{folder}/base64.json"),
    "folder of raw files": _on("simple", "--input-data", "{folder}/raw"),
    "zeros": _on("simple", "--input-data", "zero"),
    "strings": _on("simple_string", "--string-data", "7"),
    "strings in a file": _on("simple_string", "--input-data", "{folder}/strings.json"),
    "strings of a length": _on("simple_identity", "--shape", "INPUT0:4", "--string-length", "16"),
    "shape": _on("simple_identity", "--shape", "INPUT0:8", "--string-data", "abc"),
    "strings in shared memory": _on(
        "simple_string", *("--string-data", "7", "--shared-memory", "system", "--output-shared-memory-size", "1024")
    ),
    # how it is sent
    "gzip": _on("mobilenetv2", "--grpc-compression-algorithm", "gzip"),
    "deflate": _on("mlp", "--grpc-compression-algorithm", "deflate"),
    "HTTP": _on("mlp", "-H", "own-header:value", **_HTTP),
    "HTTP, async": _on("mlp", "--async", "--concurrency-range", "4", **_HTTP),
    "HTTP, JSON": _on("simple", "--input-tensor-format", "json", "--output-tensor-format", "json", **_HTTP),
    "HTTP, shared memory": _on("mlp", "--shared-memory", "system", **_HTTP),
    "HTTP, rate": _on("mlp", *_RATE, per_s=50, **_HTTP),
    "HTTP, strings": _on("simple_string", "--string-data", "7", **_HTTP),
    "HTTP, answers in a file": _on("simple", "--input-data", "{folder}/checked.json", **_HTTP),
    # sequences
    "sequences": _on("simple_sequence", *_SHORT, "--concurrency-range", "4"),
    "sequences, async": _on("simple_sequence", *_SHORT, "--async", "--concurrency-range", "4"),
    "sequences, stream": _on("simple_sequence", *_SHORT, *_STREAM, "--concurrency-range", "4"),
    "sequences, HTTP": _on("simple_sequence", *_SHORT, "--concurrency-range", "4", **_HTTP),
    "sequences, shared memory": _on("simple_sequence", *_SHORT, "--shared-memory", "system"),
    "sequences of other ids": _on("simple_dyna_sequence", *_SHORT, "--sequence-id-range", "100:200"),
    "sequences of varying length": _on("accumulator", "--sequence-length", "10", "--sequence-length-variation", "50"),
    "sequences, rate": _on("simple_sequence", *_SHORT, *_RATE, "--num-of-sequences", "8", per_s=50),
    "sequences, rate, serial": _on(
        "simple_sequence", *_SHORT, *_RATE, *_STREAM, "--num-of-sequences", "8", "--serial-sequences", per_s=50
    ),
    "sequences, values in a file": _on("simple_sequence", "--input-data", "{folder}/sequences.json"),
    # what the server is told
    "traces": _on("mlp", "--trace-level", "TIMESTAMPS", "--trace-rate", "100", "--trace-count", "10"),
    "traces, HTTP": _on("mlp", "--trace-level", "TIMESTAMPS", "--log-frequency", "5", **_HTTP),
}


def models() -> set[str]:
    """Return what the server must have."""
    return {case.model for case in CASES.values()}


def write_files(folder: Path) -> None:
    """Write everything that a case names. Inputs are those of `simple`, or the same as strings."""
    generator = np.random.default_rng(0)
    first, second = generator.integers(-100, 100, (2, ROWS, 16), dtype=np.int32)
    rows = list(zip(first, second, strict=True))
    lists = [_named("INPUT", a.tolist(), b.tolist()) for a, b in rows]
    answers = [_named("OUTPUT", (a + b).tolist(), (a - b).tolist()) for a, b in rows]
    _write(folder / "values.json", {"data": lists})
    _write(folder / "base64.json", {"data": [_named("INPUT", _base64(a), _base64(b)) for a, b in rows]})
    _write(folder / "checked.json", {"data": lists, "validation_data": answers})
    _write(folder / "streams.json", {"data": [lists[:3], lists[3:]]})
    _write(folder / "sequences.json", _sequences(generator.integers(-100, 100, (2, ROWS)).tolist()))
    strings = [_named("INPUT", [str(n) for n in a.tolist()], [str(n) for n in b.tolist()]) for a, b in rows]
    _write(folder / "strings.json", {"data": strings})
    (folder / "raw").mkdir()
    for name, values in (("INPUT0", first[0]), ("INPUT1", second[0])):
        (folder / "raw" / name).write_bytes(values.tobytes())
    (folder / "intervals.txt").write_text("".join(f"{interval}\n" for interval in INTERVALS_US))


def _sequences(rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return rows as sequences. Without right answers: perf_analyzer cuts a sequence short when it stops."""
    return {"data": [[{"INPUT": [number]} for number in row] for row in rows]}


def _named(side: str, first: Any, second: Any) -> dict[str, Any]:
    return {f"{side}0": first, f"{side}1": second}


def _base64(values: "np.ndarray[Any, np.dtype[np.int32]]") -> dict[str, Any]:
    return {"b64": base64.b64encode(values.tobytes()).decode(), "shape": [16]}


def _write(path: Path, content: Mapping[str, Sequence[Any]]) -> None:
    path.write_text(json.dumps(content))
