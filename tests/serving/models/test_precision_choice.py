"""`gangway serve` with a model whose precision deadlines choose, beside the same model in each precision.

A processor without instructions for bf16 serves the model in fp32 alone, and says so.
"""

import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from gangway.artifact.precision import BF16
from gangway.clients.inputs import Array, outputs_of
from gangway.compiler.precision import NO_INSTRUCTIONS
from gangway.compiler.target import detect, for_precision
from testing.live_server import LiveServer, live_server
from testing.otlp_collector import OtlpCollector
from testing.waiting import until
from tests.conftest import CompiledZoo
from tests.helpers.scraped_metrics import Scraped
from tests.helpers.ways import by_http, parameters_of, request_of

pytestmark = pytest.mark.long

HAS_BF16 = bool(for_precision(detect(), BF16).extensions)
needs_bf16 = pytest.mark.skipif(not HAS_BF16, reason=NO_INSTRUCTIONS)
TIMEOUT_S = 60
PLENTY_US = 20_000_000
TIGHT_US = 5_000  # some requests of a burst wait for longer
BURST = 60
SETTINGS = {  # mobilenetv2 of random weights agrees with itself in bf16 to 0.998
    "choice": {"precision": "deadline", "precision_min_cosine": "0.99"},
    "exact": {"precision": "fp32"},
    "fast": {"precision": "bf16", "precision_min_cosine": "0.99"},
    "strict": {"precision": "deadline", "precision_min_cosine": "1"},
    "again": {"precision": "deadline", "precision_min_cosine": "0.99"},
}
PAIR = """platform: "ensemble" max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 1000 ] }
parameters { key: "qos_ms" value: { string_value: "20000" } }
ensemble_scheduling { step { model_name: "choice" model_version: -1
    input_map { key: "input" value: "x" } output_map { key: "output" value: "y" } } }"""


def pictures(number: int) -> Array:
    return np.random.default_rng(number).standard_normal((1, 3, 224, 224)).astype(np.float32)


@dataclass
class Answer:
    """What a client got: the numbers, and in which precision they are said to be."""

    logits: Array
    precision: str

    @classmethod
    def of(cls, result: Any) -> "Answer":
        return cls(result.as_numpy("output"), result.get_response().parameters["precision"].string_param)


@dataclass
class Served:
    """A server, and a client that knows the right answers."""

    server: LiveServer
    counted: Counter[str] = field(default_factory=Counter)  # answers of `choice`

    @cached_property
    def client(self) -> triton.InferenceServerClient:
        return triton.InferenceServerClient(self.server.url)

    @cached_property
    def right(self) -> dict[str, list[Array]]:
        """The answers to all pictures in each precision."""
        models = {"fp32": "exact", "bf16": "fast"}
        return {name: [self.infer(model, one).logits for one in range(BURST)] for name, model in models.items()}

    def infer(self, model: str, number: int, timeout_us: int = 0) -> Answer:
        answer = Answer.of(self.client.infer(model, inputs(number), timeout=timeout_us or None))
        self.counted[answer.precision] += model == "choice"
        return answer

    def is_right(self, number: int, answer: Answer) -> bool:
        """Whether an answer has the very numbers of the artifact that it names."""
        return bool((answer.logits == self.right[answer.precision][number]).all())

    def burst(self, timeout_us: Callable[[int], int], meanwhile: Callable[[], None] = lambda: None) -> list[Answer]:
        """Send all pictures at once; return the answers, each of which has come and is right.

        `meanwhile` is called when the first one has come.
        """
        assert self.right
        got: Queue[tuple[int, Any, Any]] = Queue()
        for number in range(BURST):
            callback = partial(lambda number, result, error: got.put((number, result, error)), number)
            self.client.async_infer("choice", inputs(number), callback=callback, timeout=timeout_us(number) or None)
        answers: dict[int, Answer] = {}
        while len(answers) < BURST:
            number, result, error = got.get(timeout=TIMEOUT_S)
            assert error is None
            if not answers:
                meanwhile()
            answers[number] = Answer.of(result)
            self.counted[answers[number].precision] += 1
        assert all(self.is_right(number, answer) for number, answer in answers.items())
        return [answers[number] for number in range(BURST)]

    def parameter(self, model: str, name: str) -> str:
        return str(self.client.get_model_config(model).config.parameters[name].string_value)

    def lines(self, *words: str) -> list[str]:
        return [line for line in self.server.log.read_text().splitlines() if all(word in line for word in words)]


def inputs(number: int) -> list[triton.InferInput]:
    given = triton.InferInput("input", [1, 3, 224, 224], "FP32")
    given.set_data_from_numpy(pictures(number))
    return [given]


@pytest.fixture(scope="module")
def cache(compiled_zoo: CompiledZoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled_zoo.linked_cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def repository(compiled_zoo: CompiledZoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("choice")
    for name, parameters in SETTINGS.items():
        (folder / name).mkdir()
        (folder / name / "1").symlink_to(compiled_zoo.onnx_file("mobilenetv2").parent)
        text = "".join(f'parameters {{ key: "{k}" value: {{ string_value: "{v}" }} }}\n' for k, v in parameters.items())
        (folder / name / "config.pbtxt").write_text(f"max_batch_size: 8\n{text}")
    (folder / "pair" / "1").mkdir(parents=True)
    (folder / "pair" / "config.pbtxt").write_text(PAIR)
    return folder


@pytest.fixture(scope="module")
def served(repository: Path, cache: Path) -> Iterator[Served]:
    loaded = [f"--load-model={name}" for name in (*SETTINGS, "pair") if name != "again"]
    with live_server(repository, [f"--cache-dir={cache}", "--model-control-mode=explicit", *loaded]) as live:
        yield Served(live)


def test_an_idle_server_answers_in_fp32(served: Served) -> None:
    for timeout_us in (0, PLENTY_US):
        for number in range(5):
            answer = served.infer("choice", number, timeout_us)
            assert answer.precision == "fp32" and served.is_right(number, answer)


@needs_bf16
def test_what_fp32_would_make_late_is_in_bf16(served: Served) -> None:
    """It may be late in bf16, too: it is so by less."""
    for number in range(5):
        answer = served.infer("choice", number, timeout_us=500)
        assert answer.precision == "bf16" and served.is_right(number, answer)


@needs_bf16
def test_a_burst_is_in_bf16_where_fp32_would_be_late(served: Served) -> None:
    """Every fifth request has no deadline."""
    answers = served.burst(lambda number: TIGHT_US * (number % 5 > 0))
    assert {answer.precision for answer in answers[::5]} == {"fp32"}
    timed = [answer.precision for number, answer in enumerate(answers) if number % 5]
    assert timed.count("bf16") >= len(timed) / 4
    assert {answer.precision for answer in served.burst(lambda number: PLENTY_US)} == {"fp32"}


@needs_bf16
def test_the_counts_are_those_of_the_answers(served: Served) -> None:
    before = served.counted.copy()
    served.burst(lambda number: TIGHT_US)
    assert served.counted["bf16"] > before["bf16"]
    scrape = Scraped(served.server).scrape()
    for precision, count in served.counted.items():
        if precision:
            assert scrape("gangway_precision_requests_total", model="choice", precision=precision) == count
    assert scrape("nv_inference_request_success", model="choice") == served.counted["fp32"] + served.counted["bf16"]
    assert scrape("gangway_bf16", model="choice") == 1
    statistics = served.client.get_inference_statistics("choice").model_stats[0]
    assert statistics.response_stats["gangway_bf16"].success.count == served.counted["bf16"]


def test_models_of_one_precision_say_nothing(served: Served) -> None:
    for model in ("exact", "fast"):
        assert "precision" not in served.client.infer(model, inputs(0)).get_response().parameters
        samples = Scraped(served.server).scrape().samples
        counted = [labels for name, labels in samples if name == "gangway_precision_requests_total"]
        assert not any(("model", model) in labels for labels in counted)


@needs_bf16
def test_http_says_it_too(served: Served) -> None:
    for options, precision in (({}, "fp32"), ({"timeout": 500}, "bf16")):
        response = by_http(served.server, request_of("choice", {"input": pictures(3)}, **options))
        served.counted[precision] += 1
        assert parameters_of(response) == {"precision": precision}
        assert (outputs_of(response)["output"] == served.right[precision][3]).all()


@needs_bf16
def test_clients_are_told_that_both_are_there(served: Served) -> None:
    assert served.parameter("choice", "gangway_precision") == "fp32, bf16"
    assert served.parameter("choice", "gangway_precision_note").startswith("cosine 0.99")
    assert served.lines("choice, version 1: in fp32 and in bf16, whose weights take ", " MiB more")
    weights = Scraped(served.server).scrape()
    both, exact, fast = (weights("gangway_weights_bytes", model=model) for model in ("choice", "exact", "fast"))
    assert both == exact + fast


def test_too_little_agreement_leaves_fp32(served: Served) -> None:
    assert served.infer("strict", 0, timeout_us=500).precision == "fp32"
    assert served.parameter("strict", "gangway_precision") == "fp32"
    reason = "answers in bf16 agree too little: cosine 0.99" if HAS_BF16 else NO_INSTRUCTIONS
    assert served.parameter("strict", "gangway_precision_note").startswith(reason)
    assert served.lines("strict: all requests are computed in fp32", reason)


def test_a_step_of_an_ensemble_has_one_of_both(served: Served) -> None:
    for number in range(3):
        given = triton.InferInput("x", [1, 3, 224, 224], "FP32")
        given.set_data_from_numpy(pictures(number))
        got = served.client.infer("pair", [given]).as_numpy("y")
        served.counted["fp32"] += 1
        assert (got == served.right["fp32"][number]).all()


@needs_bf16
@pytest.mark.parametrize("role", ["worker", "scheduler"])
def test_a_killed_process_loses_no_request(served: Served, role: str) -> None:
    """Requests of both precisions run and wait; all of them are answered, by the numbers of the precision they name."""
    victim = served.server.pids()[role][0]
    kill = partial(os.kill, victim, signal.SIGKILL)
    answers = served.burst(lambda number: TIGHT_US if number % 2 else PLENTY_US, kill)
    assert {answer.precision for answer in answers} == {"fp32", "bf16"}


def mapped_by_workers(server: LiveServer, keys: set[str]) -> set[str]:
    """Those of these artifacts that a worker maps a file of."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in server.pids()["worker"])
    return {key for key in keys if key in maps}


@needs_bf16
def test_unloading_frees_both_and_loading_brings_both_back(served: Served) -> None:
    client = served.client
    for model in ("pair", "choice", "exact", "fast", "strict"):  # all are the same two artifacts
        client.unload_model(model)
    keys: set[str] = set()
    for _ in range(2):
        client.load_model("again")
        answers = [served.infer("again", 0, timeout_us).precision for timeout_us in (PLENTY_US, 500)]
        assert answers == ["fp32", "bf16"]
        scrape = Scraped(served.server).scrape()
        for precision in ("fp32", "bf16"):
            assert scrape("gangway_precision_requests_total", model="again", precision=precision) == 1
        keys = {path.name for path in Path(flag(served.server, "--cache-dir")).iterdir() if len(path.name) == 64}
        assert len(mapped_by_workers(served.server, keys)) == 2
        client.unload_model("again")
        until(lambda keys=keys: not mapped_by_workers(served.server, keys))  # type: ignore[misc]


def flag(server: LiveServer, name: str) -> str:
    """What the server was started with."""
    words = Path(f"/proc/{server.process.pid}/cmdline").read_text().split("\0")
    return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))


@needs_bf16
def test_decisions_and_traces_say_which(repository: Path, cache: Path, tmp_path: Path) -> None:
    flags = [f"--cache-dir={cache}", "--model-control-mode=explicit", "--load-model=again"]
    file = tmp_path / "decisions.jsonl"
    with OtlpCollector() as collector:
        traces = ("mode=opentelemetry", "level=TIMESTAMPS", "rate=1", f"opentelemetry,url={collector.url}")
        flags += [f"--trace-decisions={file}", *[f"--trace-config={setting}" for setting in traces]]
        with live_server(repository, flags) as live:
            client = triton.InferenceServerClient(live.url)
            for timeout_us in (PLENTY_US, 500):
                client.infer("again", inputs(0), timeout=timeout_us)
            spans = collector.wait_for(lambda spans: sum(span.name == "again" for span in spans) == 2)
    said = [span.attributes["gangway.precision"] for span in spans if span.name == "again"]
    assert sorted(map(str, said)) == ["bf16", "fp32"]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    chosen = [line for line in lines if line["decision"] == "Start" and line["precision"]]
    assert [line["precision"] for line in chosen] == ["fp32", "bf16"]
    assert [line["model"] for line in chosen] == ["again, version 1"] * 2
    assert chosen[0]["reason"].endswith("there is time for fp32")
    assert chosen[1]["reason"].endswith("in fp32 it would be late")
