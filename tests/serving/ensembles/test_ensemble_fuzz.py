"""Ensembles of a real server, drawn at random: right numbers whatever the graph, a refusal whatever the request.

Nothing may be left of any of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
import tritonclient.grpc as triton
from hypothesis import given, settings
from hypothesis import strategies as st

from gangway.artifact.cache import Cache
from gangway.clients.connection import SERVICE
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from gangway.executor.frames import join_strings
from gangway.protos import grpc_service_pb2 as pb
from gangway.zoo import write_model
from gangway.zoo.repository import write_ensemble
from testing.waiting import until
from tests.conftest import CompiledZoo
from tests.helpers import ensemble_configs, onnx_text
from tests.helpers.ensemble_configs import config_of
from tests.helpers.mutated_requests import REFUSALS, TIMEOUT_S, mutated, sent, streamed
from tests.helpers.raw_stream import RawStream
from tests.helpers.served import Served, serving
from tests.helpers.stopped_workers import stopped_workers

pytestmark = pytest.mark.long

Array = npt.NDArray[np.int32]
ZOO = ("simple", "simple_identity", "simple_string")
BATCH = 8
AT_ONCE = 4
TOGETHER = 10
GRAPHS = settings(max_examples=25, deadline=None)
HOSTILE = settings(max_examples=100, deadline=None)
FAILED = "the execution of model"  # strings that are no numbers

BOTH_IN, BOTH_OUT = "INPUT0=INPUT0 INPUT1=INPUT1", "OUTPUT0=OUTPUT0 OUTPUT1=OUTPUT1"
STRINGS = "INPUT0:STRING:16 INPUT1:STRING:16", "OUTPUT0:STRING:16 OUTPUT1:STRING:16"
WORDS = [("simple_identity", "INPUT0=INPUT0", "OUTPUT0=same"), ("simple_string", "INPUT0=same INPUT1=INPUT1", BOTH_OUT)]
LENGTHS = [("simple_identity", "INPUT0=INPUT0", "OUTPUT0=same"), ("simple_identity", "INPUT0=same", "OUTPUT0=OUTPUT0")]
NESTED = [("simple_diamond", BOTH_IN, "OUTPUT0=a OUTPUT1=b"), ("simple", "INPUT0=a INPUT1=b", BOTH_OUT)]
CONFIGS = {
    "words": config_of(*STRINGS, WORDS, BATCH),
    "lengths": config_of("INPUT0:STRING:-1", "OUTPUT0:STRING:-1", LENGTHS, BATCH),
    "nested": config_of("INPUT0:INT32:16 INPUT1:INT32:16", "OUTPUT0:INT32:16 OUTPUT1:INT32:16", NESTED, BATCH),
}


# `simple` again, by way of strings: for onnxruntime, since strings are not compiled.
SPELLED = """(int32[N, 16] INPUT0, int32[N, 16] INPUT1) => (int32[N, 16] OUTPUT0, int32[N, 16] OUTPUT1) {
    text0 = Cast<to=8>(INPUT0)
    text1 = Cast<to=8>(INPUT1)
    back0 = Cast<to=6>(text0)
    back1 = Cast<to=6>(text1)
    OUTPUT0 = Add(back0, back1)
    OUTPUT1 = Sub(back0, back1)
}"""


@pytest.fixture(scope="module")
def served(compiled_zoo: CompiledZoo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("models")
    cache_dir = compiled_zoo.cache_dir
    files = [write_model(repository, name) / "1" / "model.onnx" for name in ZOO]
    for path in (*files, onnx_text.save(repository, "spelled", SPELLED, f"max_batch_size: {BATCH}")):
        with (path.parents[1] / "config.pbtxt").open("a") as config:
            config.write("\ndynamic_batching { }\n")  # joined although nothing has been measured
        compile_model(path, path.parts[-3], Cache(cache_dir), detect(), lambda *_: None)
    write_ensemble(repository, "simple_diamond")
    for name, config in CONFIGS.items():
        ensemble_configs.write(repository, name, config)
    flags = (f"--cache-dir={cache_dir}", "--model-control-mode=explicit", "--load-model=*")
    with serving(repository, *flags) as served:
        pids = served.server.pids()
        yield served
        served.await_rest()
        assert served.server.pids() == pids


def sum_and_difference(a: Array, b: Array) -> tuple[Array, Array]:
    return a + b, a - b


MODELS = {
    "simple": sum_and_difference,
    "spelled": sum_and_difference,
    "simple_diamond": lambda a, b: (2 * a + 2 * b, 2 * a - 2 * b),
}


@dataclass(frozen=True)
class DrawnStep:
    """`reads`: two tensors; `writes`: names of its outputs, those that anybody wants to have."""

    model: str
    reads: tuple[str, str]
    writes: Mapping[str, str]

    @property
    def config(self) -> ensemble_configs.Step:
        inputs = " ".join(f"INPUT{place}={tensor}" for place, tensor in enumerate(self.reads))
        return self.model, inputs, " ".join(f"{name}={tensor}" for name, tensor in self.writes.items())


@dataclass(frozen=True)
class DrawnGraph:
    """Steps in an order in which they can be computed; `listed`: that of the configuration."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    steps: tuple[DrawnStep, ...]
    listed: tuple[int, ...]

    def config(self) -> str:
        inputs, outputs = (" ".join(f"{name}:INT32:16" for name in names) for names in (self.inputs, self.outputs))
        return config_of(inputs, outputs, [self.steps[place].config for place in self.listed], BATCH)

    def computed(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        values = dict(feeds)
        for step in self.steps:
            results = MODELS[step.model](*(values[name] for name in step.reads))
            found = dict(zip(("OUTPUT0", "OUTPUT1"), results, strict=True))
            values |= {tensor: found[name] for name, tensor in step.writes.items()}
        return {name: values[name] for name in self.outputs}


@st.composite
def graphs(draw: Any) -> DrawnGraph:
    tensors = [f"in{number}" for number in range(draw(st.integers(1, 3)))]
    given = set(tensors)
    steps: list[DrawnStep] = []
    for number in range(draw(st.integers(1, 7))):
        kept = draw(st.sampled_from([("OUTPUT0",), ("OUTPUT1",), ("OUTPUT0", "OUTPUT1")]))
        reads = draw(st.sampled_from(tensors)), draw(st.sampled_from(tensors))
        writes = {name: f"t{number}_{name[-1]}" for name in kept}
        steps.append(DrawnStep(draw(st.sampled_from(sorted(MODELS))), reads, writes))
        tensors += writes.values()
    read = {name for step in steps for name in step.reads}
    outputs = [name for name in tensors if name not in given and (name not in read or draw(st.booleans()))]
    listed = draw(st.permutations(range(len(steps))))
    return DrawnGraph(tuple(sorted(given & read)), tuple(outputs), tuple(steps), tuple(listed))


def inputs_of(feeds: Mapping[str, Array]) -> list[triton.InferInput]:
    inputs = [triton.InferInput(name, list(value.shape), "INT32") for name, value in feeds.items()]
    for tensor, value in zip(inputs, feeds.values(), strict=True):
        tensor.set_data_from_numpy(value)
    return inputs


def assert_right(served: Served, graph: DrawnGraph, rows: int, seed: int, asked: Sequence[str]) -> None:
    random = np.random.default_rng(seed)
    limits = np.iinfo(np.int32)
    feeds = {name: random.integers(limits.min, limits.max, (rows, 16), np.int32) for name in graph.inputs}
    outputs = [triton.InferRequestedOutput(name) for name in asked]
    result = served.client.infer("drawn", inputs_of(feeds), outputs=outputs, client_timeout=20)
    expected = graph.computed(feeds)
    for name in asked:
        np.testing.assert_array_equal(result.as_numpy(name), expected[name])


@GRAPHS
@given(graph=graphs(), data=st.data())
def test_any_graph(served: Served, graph: DrawnGraph, data: st.DataObject) -> None:
    """Several requests at a time, of other sizes and for other outputs each."""
    ensemble_configs.write(served.repository, "drawn", graph.config())
    served.client.load_model("drawn")
    asked = st.lists(st.sampled_from(graph.outputs), min_size=1, unique=True)
    requests = data.draw(st.lists(st.tuples(st.integers(1, BATCH), asked), min_size=1, max_size=AT_ONCE))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = [
            pool.submit(assert_right, served, graph, rows, seed, names) for seed, (rows, names) in enumerate(requests)
        ]
        for each in running:
            each.result()


def request_for(model: str, datatype: str, shape: Sequence[int], content: bytes, inputs: int) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, id="7", raw_input_contents=[content] * inputs)
    for number in range(inputs):
        request.inputs.add(name=f"INPUT{number}", datatype=datatype, shape=shape)
    return request


ROW = np.arange(16, dtype=np.int32)
NUMBERS = join_strings([str(number).encode() for number in ROW])


def request_of_numbers(model: str, numbers: Array, text: str = "") -> pb.ModelInferRequest:
    """`text`: in place of the first number of an ensemble that reads strings."""
    if model == "simple_diamond":
        return request_for(model, "INT32", numbers.shape, numbers.tobytes(), 2)
    texts = [str(number) for number in numbers.flat]
    texts[0] = text or texts[0]
    return request_for(model, "BYTES", numbers.shape, join_strings(texts), 1 if model == "lengths" else 2)


def executions(served: Served, model: str) -> int:
    return int(served.client.get_inference_statistics(model).model_stats[0].execution_count)


def test_steps_of_several_requests_are_executed_together(served: Served) -> None:
    """Each gets its own rows, of its own length; one that fails takes no other with it."""
    random = np.random.default_rng(3)
    drawn = [random.integers(-99, 99, (1 + place % 3, 16), np.int32) for place in range(TOGETHER)]
    before = {name: executions(served, name) for name in ZOO}
    call = served.channel.unary_unary(
        SERVICE + "ModelInfer",
        request_serializer=pb.ModelInferRequest.SerializeToString,
        response_deserializer=pb.ModelInferResponse.FromString,
    )
    with stopped_workers(served.server):
        diamonds = [call.future(request_of_numbers("simple_diamond", numbers)) for numbers in drawn]
        words = [call.future(request_of_numbers("words", numbers)) for numbers in drawn]
        wrong = call.future(request_of_numbers("words", drawn[0], text="no number"))
        lengths = [call.future(request_of_numbers("lengths", drawn[place][:, :place])) for place in range(1, TOGETHER)]
        until(lambda: served.server.busy_slots() == 3 * TOGETHER)
    for numbers, diamond, word in zip(drawn, diamonds, words, strict=True):
        assert diamond.result(TIMEOUT_S).raw_output_contents[0] == (4 * numbers).tobytes()
        sums = join_strings([str(2 * number) for number in numbers.flat])
        assert word.result(TIMEOUT_S).raw_output_contents[0] == sums
    for place, length in enumerate(lengths, 1):
        numbers = drawn[place][:, :place]
        assert list(length.result(TIMEOUT_S).outputs[0].shape) == list(numbers.shape)
        assert length.result().raw_output_contents[0] == join_strings([str(number) for number in numbers.flat])
    assert wrong.exception(TIMEOUT_S).code() is grpc.StatusCode.INTERNAL
    steps = {"simple": 4 * TOGETHER, "simple_identity": 3 * TOGETHER - 1, "simple_string": TOGETHER + 1}
    assert all(executions(served, name) - before[name] < steps[name] for name in ZOO)


GOOD = (
    request_for("simple_diamond", "INT32", [1, 16], ROW.tobytes(), 2),
    request_for("nested", "INT32", [2, 16], 2 * ROW.tobytes(), 2),
    request_for("words", "BYTES", [1, 16], NUMBERS, 2),
    request_for("lengths", "BYTES", [1, 3], join_strings([b"a", b"", "é".encode()]), 1),
    request_for("lengths", "BYTES", [1, 0], b"", 1),
)
NAMES = ("INPUT0", "INPUT1", "OUTPUT0", "OUTPUT1", "same", "a", "", "\x00")


def test_what_is_made_into_hostile_requests_is_right(served: Served) -> None:
    answers = [sent(served.channel, request) for request in GOOD]
    assert all(isinstance(answer, pb.ModelInferResponse) for answer in answers), answers
    assert answers[0].raw_output_contents[0] == (4 * ROW).tobytes()
    assert answers[2].raw_output_contents[0] == join_strings([str(2 * number).encode() for number in ROW])
    assert [list(answer.outputs[0].shape) for answer in answers[3:]] == [[1, 3], [1, 0]]
    engines = {
        name: served.client.get_model_config(name).config.parameters["gangway_engine"].string_value
        for name in ("simple", "spelled")
    }
    assert engines == {"simple": "native", "spelled": "onnxruntime"}


@HOSTILE
@given(request=mutated(GOOD, NAMES))
def test_any_request(served: Served, request: pb.ModelInferRequest) -> None:
    answer = sent(served.channel, request)
    if isinstance(answer, pb.ModelInferResponse):
        assert len(answer.outputs) == len(answer.raw_output_contents) > 0
    else:
        failed = answer.code() is grpc.StatusCode.INTERNAL and FAILED in answer.details()
        assert failed or answer.code() in REFUSALS, answer.details()


@pytest.fixture(scope="module")
def stream(served: Served) -> Iterator[RawStream]:
    with RawStream(served.server.url, timeout_s=100) as opened:
        yield opened


@HOSTILE
@given(request=mutated(GOOD, NAMES))
def test_any_request_in_a_stream(stream: RawStream, request: pb.ModelInferRequest) -> None:
    answer = streamed(stream, request)
    assert isinstance(answer, str) or len(answer.raw_output_contents) > 0
