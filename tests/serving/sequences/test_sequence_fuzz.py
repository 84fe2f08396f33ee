"""Sequences of a real server, drawn at random: what one client would add up, whatever the ways that requests come.

A sequence may begin anew before it has ended, a request may fail in the middle, or be hostile; nothing may be left.
"""

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property

import grpc
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException

from gangway.executor.frames import join_strings
from gangway.protos import grpc_service_pb2 as pb
from tests.conftest import CompiledZoo
from tests.helpers import sequence_models
from tests.helpers.mutated_requests import REFUSALS, mutated, sent, streamed
from tests.helpers.raw_stream import RawStream
from tests.helpers.sequence_models import MODULES, TIMEOUT_S, config_of, number, oldest, run_stream, run_unary, total_of
from tests.helpers.served import Served, serving

pytestmark = pytest.mark.long

PROGRAMS = settings(max_examples=40, deadline=None)
SIDE_BY_SIDE = settings(max_examples=12, deadline=None)
HOSTILE = settings(max_examples=100, deadline=None)
FEW_SLOTS = 2
MANY = 10_000  # slots: what is drawn begins sequences that nobody ends
COMPILED = {"sums": config_of(oldest(MANY)), "narrow": config_of("direct { }", batch=FEW_SLOTS)}
SPELLED = {"words": config_of(oldest(MANY))}  # those that fail
FAILED = "the execution of model"
INVALID, INTERNAL = "INVALID_ARGUMENT", "INTERNAL"


class Fuzzed(Served):
    @cached_property
    def runs(self) -> "itertools.count[int]":
        """Each has ids of its own."""
        return itertools.count(1)

    @cached_property
    def http_client(self) -> triton_http.InferenceServerClient:
        return triton_http.InferenceServerClient(self.server.http_url)


@pytest.fixture(scope="module")
def served(compiled_zoo: CompiledZoo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    repository = tmp_path_factory.mktemp("models")
    sequence_models.save(repository, compiled_zoo.cache_dir, COMPILED, SPELLED)
    flags = (f"--cache-dir={compiled_zoo.cache_dir}", "--model-control-mode=explicit", "--load-model=*")
    with serving(repository, *flags, kind=Fuzzed) as served, closing(served.http_client):
        pids = served.server.pids()
        yield served
        for name in (*COMPILED, *SPELLED):
            served.client.unload_model(name)  # which ends its sequences
        served.await_rest()
        assert served.server.pids() == pids


@dataclass(frozen=True)
class Step:
    """One request. `value` None: it fails in the model."""

    identity: int | str
    value: int | None
    start: bool
    end: bool
    way: str


STEPS = st.builds(
    Step,
    identity=st.sampled_from([1, "1", 2, "é"]),
    value=st.one_of(st.none(), st.integers(-9, 9), st.integers(-9, 9)),
    start=st.booleans(),
    end=st.booleans(),
    way=st.sampled_from(["grpc", "http", "stream"]),
)


class Sums:
    """What a server does that has one request at a time: sums of open sequences."""

    def __init__(self) -> None:
        self.open: dict[int | str, int] = {}

    def answer(self, step: Step) -> int | str:
        if step.identity not in self.open and not step.start:
            return INVALID
        before = 0 if step.start else self.open[step.identity]
        after = before + (step.value or 0)
        self.open[step.identity] = after
        if step.end:
            del self.open[step.identity]
        return INTERNAL if step.value is None else after


def identity_in(run: int, identity: int | str) -> int | str:
    return run << 8 | identity if isinstance(identity, int) else f"{run} {identity}"


def value_for(model: str, value: int | None) -> int | str:
    if model in COMPILED:
        return value or 0
    return "no number" if value is None else str(value)


def ask(served: Fuzzed, stream: RawStream, model: str, step: Step, identity: int | str) -> int | str:
    """The sum that is answered, or the status. A stream has no statuses: they are told from the message."""
    value = value_for(model, step.value)
    options = {"sequence_id": identity, "sequence_start": step.start, "sequence_end": step.end}
    if step.way == "stream":
        answer = streamed(stream, request_of(model, identity, value, step.start, step.end))
        if isinstance(answer, str):
            return INTERNAL if FAILED in answer else INVALID
        return int.from_bytes(answer.raw_output_contents[0], "little", signed=True)
    client, module = (served.client, triton) if step.way == "grpc" else (served.http_client, triton_http)
    try:
        return total_of(client.infer(model, number(value, module), **options))
    except InferenceServerException as error:
        return {"400": INVALID, "500": INTERNAL}.get(str(error.status()), str(error.status()).split(".")[-1])


def request_of(
    model: str, identity: int | str, value: int | str, start: bool = False, end: bool = False
) -> pb.ModelInferRequest:
    text = isinstance(value, str)
    content = join_strings([value]) if isinstance(value, str) else value.to_bytes(4, "little", signed=True)
    name = f"{model} {identity} {value}"  # answers of a stream that have no ids wait for each other
    request = pb.ModelInferRequest(model_name=model, id=name, raw_input_contents=[content])
    request.inputs.add(name="INPUT", datatype="BYTES" if text else "INT32", shape=[1, 1])
    kind = "int64_param" if isinstance(identity, int) else "string_param"
    setattr(request.parameters["sequence_id"], kind, identity)
    request.parameters["sequence_start"].bool_param = start
    request.parameters["sequence_end"].bool_param = end
    return request


@pytest.fixture(scope="module")
def stream(served: Fuzzed) -> Iterator[RawStream]:
    with RawStream(served.server.url, timeout_s=100) as opened:
        yield opened


@pytest.mark.parametrize("model", ["sums", "words"])
@PROGRAMS
@given(steps=st.lists(STEPS, max_size=15))
def test_any_order(served: Fuzzed, stream: RawStream, model: str, steps: list[Step]) -> None:
    """One request after the other, each by another way."""
    run, sums = next(served.runs), Sums()
    if model in COMPILED:
        steps = [step for step in steps if step.value is not None]
    for step in steps:
        assert ask(served, stream, model, step, identity_in(run, step.identity)) == sums.answer(step), step
    for identity, total in sums.open.items():
        last = Step(identity, 0, start=False, end=True, way="grpc")
        assert ask(served, stream, model, last, identity_in(run, identity)) == total


VALUES = st.lists(st.integers(-9, 9), min_size=1, max_size=8)


@pytest.mark.parametrize("model", ["sums", "narrow", "words"])
@SIDE_BY_SIDE
@given(sequences=st.lists(st.tuples(st.sampled_from(["grpc", "http", "stream"]), VALUES), min_size=1, max_size=8))
def test_any_sequences_side_by_side(served: Fuzzed, model: str, sequences: Sequence[tuple[str, list[int]]]) -> None:
    """Each by a client of its own, also if there are fewer slots than sequences."""
    run = next(served.runs)

    def totals(place: int, way: str, values: list[int]) -> list[int]:
        identity, own = run << 8 | place, [value_for(model, value) for value in values]
        if way == "stream":
            return run_stream(served.server.url, model, [identity], own)[0]
        url = served.server.url if way == "grpc" else served.server.http_url
        return run_unary(url, MODULES[way], model, identity, own)

    with ThreadPoolExecutor(len(sequences)) as pool:
        running = [pool.submit(totals, place, way, values) for place, (way, values) in enumerate(sequences, 1)]
        answers = [each.result(TIMEOUT_S) for each in running]
    assert answers == [list(itertools.accumulate(values)) for _, values in sequences]


GOOD = (
    request_of("sums", 5, 3, start=True),
    request_of("sums", 5, 3, start=True, end=True),
    request_of("words", "five", "3", start=True),
    request_of("narrow", 5, 3, start=True, end=True),
)
NAMES = ("INPUT", "SUM_IN", "OUTPUT", "SUM_OUT", "", "\x00")


def test_what_is_made_into_hostile_requests_is_right(served: Fuzzed) -> None:
    answers = [sent(served.channel, request) for request in GOOD]
    assert [answer.raw_output_contents[0] for answer in answers] == [(3).to_bytes(4, "little")] * len(GOOD)


@HOSTILE
@given(request=mutated(GOOD, NAMES))
def test_any_request(served: Fuzzed, request: pb.ModelInferRequest) -> None:
    if request.model_name == "narrow":  # nobody shall wait for a slot that no one gives back
        request.parameters["timeout"].int64_param = 1
    answer = sent(served.channel, request)
    if isinstance(answer, pb.ModelInferResponse):
        assert len(answer.outputs) == len(answer.raw_output_contents) > 0
    else:
        failed = answer.code() is grpc.StatusCode.INTERNAL and FAILED in answer.details()
        assert failed or answer.code() in REFUSALS, answer.details()


@HOSTILE
@given(request=mutated(GOOD[:3], NAMES))
def test_any_request_in_a_stream(stream: RawStream, request: pb.ModelInferRequest) -> None:
    answer = streamed(stream, request)
    assert isinstance(answer, str) or len(answer.raw_output_contents) > 0
