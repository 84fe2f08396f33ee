"""NVIDIA's load generators that stand on perf_analyzer or replace it: Model Analyzer, GenAI-Perf, AIPerf.

Each has an environment of its own in `tools/clients`. The server has Triton's example `simple`, and a decoupled Python
model with the tensors that Triton's vLLM backend has. A tokenizer of bytes takes the place of one from a hub.
"""

import csv
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.other_clients.client_checks import expect
from testing.fetch.perf_analyzer import fetch_newest
from testing.live_server import LiveServer, live_server
from testing.repository import ensure_zoo

TIMEOUT_S = 600
REQUESTS, PROMPT_TOKENS = 20, 24
TALKS = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input { name: "text_input" data_type: TYPE_STRING dims: [1] }
input { name: "stream" data_type: TYPE_BOOL dims: [1] optional: true }
input { name: "exclude_input_in_output" data_type: TYPE_BOOL dims: [1] optional: true }
input { name: "sampling_parameters" data_type: TYPE_STRING dims: [1] optional: true }
input { name: "max_tokens" data_type: TYPE_INT32 dims: [1] optional: true }
output { name: "text_output" data_type: TYPE_STRING dims: [1] }
"""
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender, stream = request.get_response_sender(), pb_utils.get_input_tensor_by_name(request, "stream")
            text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy()[0].decode()
            in_parts = stream is not None and bool(stream.as_numpy()[0])
            for part in [text[:8], text[8:16], text[16:]] if in_parts else [text]:
                tensor = pb_utils.Tensor("text_output", np.array([part.encode()], object))
                sender.send(pb_utils.InferenceResponse([tensor]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TOKENIZER = """
import sys
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

letters = sorted(pre_tokenizers.ByteLevel.alphabet())
made = Tokenizer(models.BPE({letter: at for at, letter in enumerate(["<s>", "</s>", *letters])}, []))
made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>"}
PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(sys.argv[1])
"""


@dataclass(frozen=True)
class Bench:
    """A server, a folder for what a generator writes, the folder of its programs, and perf_analyzer's program."""

    server: LiveServer
    repository: Path
    folder: Path
    programs: Path
    perf_analyzer: Path

    def call(self, program: str, *arguments: str) -> None:
        """Run one of the generator's programs. Raises AssertionError with the end of what it says."""
        path = f"{self.perf_analyzer.parent}:{self.programs}:{os.environ['PATH']}"
        done = subprocess.run(
            [str(self.programs / program), *arguments],
            env={**os.environ, "PATH": path},
            cwd=self.folder,
            check=False,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        if done.returncode != 0:
            raise AssertionError(f"status {done.returncode}: {(done.stdout + done.stderr).strip()[-300:]}")

    def tokenizer(self) -> str:
        """Return the folder of a tokenizer whose tokens are bytes."""
        self.call("python", "-c", TOKENIZER, str(self.folder / "tokenizer"))
        return str(self.folder / "tokenizer")

    def only(self, pattern: str) -> Path:
        """Return the one file that has this name. Raises AssertionError."""
        found = sorted(self.folder.rglob(pattern))
        if len(found) != 1:
            raise AssertionError(f"{len(found)} files are called {pattern}")
        return found[0]


def remote(bench: Bench) -> None:
    """Model Analyzer in its remote mode measures two levels of load; it also loads and unloads the model."""
    server, made = bench.server, bench.folder / "made"
    addresses = [f"--triton-http-endpoint={server.http_url}", f"--triton-grpc-endpoint={server.url}"]
    folders = [f"--checkpoint-directory={bench.folder}", f"--export-path={bench.folder}"]
    load = ["--run-config-search-disable", "--concurrency=1,2", "--batch-sizes=1", "--gpus=[]", "--collect-cpu-metrics"]
    made_flags = [f"--output-model-repository-path={made}", "--override-output-model-repository"]
    bench.call(
        *("model-analyzer", "profile", f"--model-repository={bench.repository}", "--profile-models=simple"),
        *("--triton-launch-mode=remote", f"--triton-metrics-url={server.metrics_url}", *addresses, *folders),
        *(*load, *made_flags, f"--perf-analyzer-path={bench.perf_analyzer}"),
    )
    with bench.only("metrics-model-inference.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    expect({row["Concurrency"] for row in rows} == {"1", "2"}, rows)
    expect(all(float(row["Throughput (infer/sec)"]) > 0 for row in rows), rows)


def by_perf_analyzer(bench: Bench, *flags: str) -> None:
    """GenAI-Perf sends prompts, and counts the tokens of what it gets."""
    load = [f"--request-count={REQUESTS}", "--num-prompts=5", f"--synthetic-input-tokens-mean={PROMPT_TOKENS}"]
    to = [f"--tokenizer={bench.tokenizer()}", f"--artifact-dir={bench.folder}", "--output-tokens-mean=8"]
    bench.call("genai-perf", "profile", "-m", "talks", *to, *load, *flags)
    told = json.loads(bench.only("profile_export_genai_perf.json").read_text())
    counts = [len(each["response_timestamps"]) for each in _requests(bench.only("profile_export.json"))]
    expect(len(counts) >= REQUESTS and min(counts) >= 3, f"responses: {counts}")
    expect(told["output_sequence_length"]["avg"] >= PROMPT_TOKENS / 2, told["output_sequence_length"])


def _requests(file: Path) -> list[Mapping[str, list[int]]]:
    (experiment,) = json.loads(file.read_text())["experiments"]
    return list(experiment["requests"])


def streamed(bench: Bench) -> None:
    """GenAI-Perf over a stream of gRPC."""
    by_perf_analyzer(bench, "--backend=vllm", "--endpoint-type=kserve", "--streaming", "-u", bench.server.url)


def events(bench: Bench) -> None:
    """GenAI-Perf over events of HTTP."""
    path = "--endpoint=v2/models/talks/generate_stream"
    by_perf_analyzer(bench, "--endpoint-type=generate", path, "--streaming", "-u", bench.server.http_url)


def template(bench: Bench) -> None:
    """AIPerf with a template of its own for `generate`; it reads the metrics, too."""
    body = 'payload_template:{"text_input": {{ text|tojson }} }'
    where = [f"--url=http://{bench.server.http_url}", "--endpoint=/v2/models/talks/generate"]
    where += [f"--server-metrics={bench.server.metrics_url}", f"--artifact-dir={bench.folder}"]
    what = ["--endpoint-type=template", "--extra-inputs", body, "--extra-inputs", "response_field:text_output"]
    load = [f"--request-count={REQUESTS}", "--concurrency=2", f"--synthetic-input-tokens-mean={PROMPT_TOKENS}"]
    bench.call(
        *("aiperf", "profile", "-m", "talks", "--tokenizer", bench.tokenizer(), *where, *what, *load, "--ui=none")
    )
    told = json.loads(bench.only("profile_export_aiperf.json").read_text())
    expect(told["request_count"]["avg"] == REQUESTS, told["request_count"])
    expect("gangway_" in bench.only("server_metrics_export.json").read_text(), "none of the server's own metrics")


@dataclass(frozen=True)
class Generator:
    """What pip is to install, a module of it, and checks by their names."""

    requirement: str
    module: str
    checks: Mapping[str, Callable[[Bench], None]]


GENERATORS: Mapping[str, Generator] = {
    "model-analyzer": Generator("triton-model-analyzer==1.58.0", "model_analyzer", {"remote mode": remote}),
    "genai-perf": Generator("genai-perf==0.0.16", "genai_perf", {"gRPC stream": streamed, "HTTP events": events}),
    "aiperf": Generator("aiperf==0.13.0", "aiperf", {"generate, metrics": template}),
}


def write_repository(folder: Path) -> Path:
    """Write Triton's example and the model `talks`; return the folder."""
    ensure_zoo(folder, ["simple"])
    version = folder / "talks" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(TALKS)
    (version / "model.py").write_text(MODEL)
    return folder


def ask_generator(generator: Generator, python: Path) -> Iterator[tuple[str, str]]:
    """Yield each check of a generator and its problem, "" if there is none. `python`: its own. Raises FetchError."""
    perf_analyzer = fetch_newest()
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        repository = write_repository(scratch / "models")
        flags: Sequence[str] = ("--model-control-mode=explicit", "--load-model=*")
        server = stack.enter_context(live_server(repository, flags))
        for name, check in generator.checks.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            try:
                check(Bench(server, repository, folder, python.parent, perf_analyzer))
            except (AssertionError, KeyError, subprocess.TimeoutExpired) as error:
                yield name, f"{type(error).__name__}: {error}"[:300]
            else:
                yield name, ""
