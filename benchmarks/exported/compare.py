"""Serves exported files and compares every answer with onnxruntime's.

    python -m benchmarks.exported.compare [--cache DIR] [--only REGEX ...] [--json FILE]

Each model is loaded alone, without a config.pbtxt, and answers all requests of its description twice: as it is loaded,
and when its sizes are compiled. Weights that are one number, again and again, are varied before. `--json` keeps a row
for each file, and adds to those that are there already.
"""

import argparse
import json
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from benchmarks.exported.graphs import Exported, exported_files, vary
from benchmarks.exported.make import CACHE
from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.frontend.widened_file import or_widened
from testing.live_server import LiveServer, live_server

COMPILE_S = 180  # of all sizes of a model
FLAT = 1e-4  # of the largest number of an answer: what numbers differ by, at most, in one that shows nothing
REFUSED_BY_BOTH = "onnxruntime refuses it"  # in what the server says of a model that it does not load
FLAGS = ("--model-control-mode=explicit", "--strict-readiness=false")
Row = dict[str, Any]
Request = dict[str, Any]
Answers = dict[str, Any]


def main() -> int:
    """Compare the files; return 1 if an answer is wrong, or a model that is ready refuses a request."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument(
        "--cache", type=Path, default=CACHE, metavar="DIR", help=f"of benchmarks.exported.make ({CACHE})"
    )
    parser.add_argument("--only", action="append", default=[], metavar="REGEX", help="names of files")
    parser.add_argument("--json", type=Path, help="rows of all files")
    parser.add_argument("--compiled", type=Path, help="folder of compiled models (a new one)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server is stopped
    rows = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    files = [
        file for file in exported_files(options.cache) if _is_wanted(file.name, options.only) and file.name not in rows
    ]
    files.sort(key=lambda file: file.path.stat().st_size)  # what is quick comes first
    with tempfile.TemporaryDirectory() as scratch:
        repository = Path(scratch, "models")
        repository.mkdir()
        compiled = options.compiled or Path(scratch, "compiled")
        with live_server(repository, [*FLAGS, f"--cache-dir={compiled}"]) as server:
            for file in files:
                folder = repository / file.name
                varied = replace(file, path=folder / "1" / "model.onnx")
                varied.path.parent.mkdir(parents=True)
                vary(file.path, varied.path)
                rows[file.name] = row = _compared(server, varied)
                shutil.rmtree(folder)
                print(_line(file.name, row), flush=True)
                if options.json:
                    options.json.write_text(json.dumps(rows, indent=1, sort_keys=True) + "\n")
    bad = [name for name, row in rows.items() if row["wrong"] or row["refusals"]]
    print(
        f"{len(rows)} files, {sum(bool(row['compared']) for row in rows.values())} compared: "
        f"{sum(bool(row['wrong']) for row in rows.values())} wrong, {len(bad)} wrong or refusing"
    )
    return 1 if bad else 0


def _is_wanted(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(re.fullmatch(pattern, name) for pattern in patterns)


def _compared(server: LiveServer, file: Exported) -> Row:
    """Return what serves a file, how far its answers are from onnxruntime's, and what it refuses."""
    row: Row = {"exporter": file.described["exporter"], "versions": file.described["versions"]}
    row |= {"engine": "refused", "compared": 0, "error": 0.0, "wrong": "", "refusals": [], "sizes": 0}
    row |= {"reason": "", "unanswered": "", "varied": True}
    with triton.InferenceServerClient(server.url) as client:
        try:
            client.load_model(file.name, client_timeout=COMPILE_S)
        except InferenceServerException as error:
            said = error.message()
            return {**row, "reason": said, "refusals": [said] * (REFUSED_BY_BOTH not in said)}
        described: Any = client.get_model_config(file.name, as_json=True)
        settings = described["config"].get("parameters", {})
        row["engine"] = settings["gangway_engine"]["string_value"]
        row["reason"] = settings.get("gangway_fallback_reason", {}).get("string_value", "")
        wanted, row["unanswered"] = reference(file)
        row["flat"] = sorted({name for _, (first, *_) in wanted for name, answer in first.items() if _is_flat(answer)})
        for _ in range(2 if wanted else 0):
            row["refusals"] = []
            for request, right in wanted:
                try:
                    served = ask(client, file.name, request, list(right[0]))
                except InferenceServerException as error:
                    row["refusals"].append(error.message())
                    continue
                row["compared"] += 1
                for name in right[0]:
                    found = min(difference(served[name], answers[name]) for answers in right)
                    row["error"] = max(row["error"], found)
                    if not found <= file.described["tolerance"]:
                        row["wrong"] = name
            if row["engine"] != "onnxruntime":
                break
            row["sizes"], row["left"] = _wait_for_sizes(server, file.name)
        client.unload_model(file.name)
    return row


def reference(file: Exported) -> tuple[list[tuple[Request, list[Answers]]], str]:
    """Return requests with onnxruntime's answers, and why it answers no others: exporters fix lengths of an example.

    What it refuses of halves it computes in float32. Where numbers are quantised by the range that those of a request
    have, rows influence each other; kernels take the range of each row. So right are two answers: of rows together, and
    of each alone.
    """
    pairs: list[tuple[Request, list[Answers]]] = []
    why = ""
    try:
        session = or_widened(file.path, lambda parts: _opened(str(file.path) if parts is None else b"".join(parts)))
    except UnsupportedModelError as error:
        return [], str(error)
    outputs, by_rows = [each.name for each in session.get_outputs()], _inputs_by_rows(file)
    for request in file.requests():
        try:
            values = session.run(None, request)
        except Exception as error:
            why = _shown(error)
            continue
        right = [{name: _as_array(value) for name, value in zip(outputs, values, strict=True)}]
        if by_rows and (rows := max(len(request[name]) for name in by_rows)) > 1:
            lone = [{**request, **{name: request[name][row : row + 1] for name in by_rows}} for row in range(rows)]
            parts = [session.run(None, each) for each in lone]
            right.append({name: np.concatenate(each) for name, *each in zip(outputs, *parts, strict=True)})
        pairs.append((request, right))
    return pairs, why


def _inputs_by_rows(file: Exported) -> list[str]:
    """Return the inputs that have the batch, if ranges of a request are what quantises."""
    nodes = onnx.load(file.path, load_external_data=False).graph.node
    if not any(node.op_type.startswith("DynamicQuantize") for node in nodes):
        return []
    return [name for name, (described, _) in file.inputs().items() if described["shape"][:1] == ["B"]]


def _opened(model: str | bytes) -> Any:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    try:
        return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own exceptions have no common base
        raise UnsupportedModelError(_shown(error)) from error


def _is_flat(answer: Any) -> bool:
    """Whether an answer is about one number, again and again: that would hide what is wrong before it."""
    return answer.dtype.kind == "f" and answer.size > 1 and bool(np.ptp(answer) <= FLAT * np.abs(answer).max())


def _shown(error: Exception) -> str:
    return f"onnxruntime does not answer: {' '.join(str(error).split())[:300]}"


def _as_array(value: Any) -> Any:
    """Return an answer as served: a sequence of maps is a tensor of their values."""
    if isinstance(value, list):
        return np.array([list(each.values()) for each in value], np.float32)
    return np.asarray(value)


def ask(client: Any, name: str, request: Mapping[str, Any], outputs: Sequence[str]) -> dict[str, Any]:
    """Return a served model's answer. Raises InferenceServerException."""
    tensors = []
    for key, value in request.items():
        tensors.append(triton.InferInput(key, list(value.shape), np_to_triton_dtype(value.dtype)))
        tensors[-1].set_data_from_numpy(value)
    answer = client.infer(name, tensors, client_timeout=COMPILE_S)
    return {output: answer.as_numpy(output) for output in outputs}


def difference(served: Any, wanted: Any) -> float:
    """Return the largest difference over the largest number; infinite if the two are of another kind."""
    if served is None or served.shape != wanted.shape:
        return float("inf")
    if wanted.dtype.kind in "OSU":
        texts = [[each.decode() if isinstance(each, bytes) else str(each) for each in a.flat] for a in (served, wanted)]
        return 0.0 if texts[0] == texts[1] else float("inf")
    if served.dtype != wanted.dtype:
        return float("inf")
    a, b = served.astype(np.float64), wanted.astype(np.float64)
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return float("inf")
    if not finite.any():
        return 0.0
    return float(np.abs(a - b)[finite].max() / max(np.abs(b[finite]).max(), 1e-30))


def _wait_for_sizes(server: LiveServer, name: str) -> tuple[int, list[str]]:
    """Return how many sizes have been compiled, and why others were not, once none is being compiled."""
    deadline, quiet_since, last = time.monotonic() + COMPILE_S, time.monotonic(), (-1, -1)
    ready, left = 0, list[str]()
    while time.monotonic() < deadline:
        text = server.log.read_text(errors="replace")
        title = rf" {re.escape(name)}, version 1, .*?"
        begun = len(re.findall(rf"compiling{title}", text))
        ready = len(re.findall(rf"{title}: ready", text))
        left = re.findall(rf"{title}: onnxruntime serves these sizes.*?: (.*)", text)
        if (begun, ready + len(left)) != last:
            last, quiet_since = (begun, ready + len(left)), time.monotonic()
        if begun <= ready + len(left) and time.monotonic() - quiet_since > 3:
            return ready, left
        time.sleep(0.2)
    return ready, [*left, f"not compiled in {COMPILE_S} s"]


def _line(name: str, row: Row) -> str:
    remarks = [f"WRONG {row['wrong']}"] * bool(row["wrong"]) + [f"REFUSES {row['refusals'][:1]}"] * bool(
        row["refusals"]
    )
    remarks += (
        [row["unanswered"]] + [f"{row['sizes']} sizes"] * bool(row["sizes"]) + row.get("left", [])[:1] + [row["reason"]]
    )
    return f"{name:34} {row['engine']:12} {row['error']:.0e} {'; '.join(filter(None, remarks))[:200]}"


if __name__ == "__main__":
    sys.exit(main())
