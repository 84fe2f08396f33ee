"""Scalars, halves, booleans and texts: what the client, its snippets and the OpenAPI description make of them works."""

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from gangway.clients.command import main
from gangway.clients.inputs import infer_request, outputs_of
from gangway.clients.perf.command import main as perf
from gangway.protos import grpc_service_pb2 as pb
from tests.helpers.http_requests import ask_http
from tests.helpers.onnx_text import save
from tests.helpers.openapi_examples import check_examples, described
from tests.helpers.served import Served, serving

MODELS = {
    "scalar": "(float x) => (float y) { y = Add(x, w) }",
    "row": "(float[4] x) => (float[4] y) { y = Add(x, w) }",
    "halves": "(float16[N,2] x) => (float[N,2] y) { y = Cast<to=1>(x) }",
    "to_halves": "(float[N,2] x) => (float16[N,2] y) { y = Cast<to=10>(x) }",
    "to_brain": "(float[N,2] x) => (bfloat16[N,2] y) { y = Cast<to=16>(x) }",
    "brain": "(bfloat16[N,2] x) => (float[N,2] y) { y = Cast<to=1>(x) }",
    "truths": "(bool[N,2] x) => (bool[N,2] y) { y = Not(x) }",
    "open": "(float[N,P] x) => (float[N,P] y) { y = Add(x, w) }",
    "texts": "(string[N,2] x) => (string[N,2] y) { y = Identity(x) }",
}
WITHOUT_JSON = {"halves": "FP16", "to_halves": "FP16", "to_brain": "BF16", "brain": "BF16"}
Said = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("odd")
    for name, graph in MODELS.items():
        weights: dict[str, Any] = {"w": np.float32(1)} if "w)" in graph else {}
        save(repository, name, graph, **weights)
    save(repository, "nothing", "(float[N,0] x) => (float[N,0] y) { y = Identity(x) }")
    save(repository, "steps", "(float[N,2] x) => (float[N,2] y) { y = Identity(x) }", "sequence_batching {}")
    with serving(repository, f"--cache-dir={model_cache}") as started:
        yield started


@pytest.fixture
def client(served: Served, capsys: pytest.CaptureFixture[str]) -> Said:
    """`gangway client`: exit status, what it prints, and what it says beside."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main([*arguments, f"--url={served.server.url}"])
        return (status, *capsys.readouterr())

    return run


@pytest.mark.parametrize("model", MODELS)
def test_the_client_asks(client: Said, model: str) -> None:
    status, printed, said = client(model)
    assert (status, said) == (0, "") and "y" in printed


def test_brain_floats_are_rounded_as_everywhere() -> None:
    values = np.random.default_rng(0).integers(0, 2**32, 100_000, np.uint32).view(np.float32)
    values = values[~np.isnan(values)]
    request = infer_request("brain", "", {"x": ("BF16", values)})
    rounded = values.astype(ml_dtypes.bfloat16)
    assert request.raw_input_contents[0] == rounded.tobytes()
    response = pb.ModelInferResponse(raw_output_contents=request.raw_input_contents)
    response.outputs.add(name="x", datatype="BF16", shape=values.shape)
    assert (outputs_of(response)["x"] == rounded.astype(np.float32)).all()
    not_a_number = infer_request("brain", "", {"x": ("BF16", np.array([0x7F800001], np.uint32).view(np.float32))})
    assert np.isnan(np.frombuffer(not_a_number.raw_input_contents[0], ml_dtypes.bfloat16)).all()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("flag", ["--snippet", "--snippet=python"])
def test_the_program_works(client: Said, capsys: pytest.CaptureFixture[str], model: str, flag: str) -> None:
    status, program, said = client(model, flag)
    assert (status, said) == (0, "")
    exec(program, {})
    assert capsys.readouterr().out.startswith("y ")


@pytest.mark.parametrize("model", [*MODELS, "steps"])
def test_the_command_works(served: Served, client: Said, model: str) -> None:
    status, command, said = client(model, "--snippet=curl")
    if model in WITHOUT_JSON:
        assert (status, command, said) == (1, "", f"gangway client: curl: JSON has no {WITHOUT_JSON[model]}\n")
        return
    assert status == 0
    answer = ask_http(served.server.http_url, "POST", f"/v2/models/{model}/infer", shlex.split(command)[-1].encode())
    assert answer.status == 200, answer.body


def test_examples_are_there_if_they_work(served: Served) -> None:
    tried = check_examples(served.server.http_url, described(served.server.http_url))
    with_json = {f"/v2/models/{name}/infer" for name in ({*MODELS, "steps"} - {*WITHOUT_JSON})}
    assert with_json <= set(tried)
    assert not {path for path in tried if any(f"/{name}" in path for name in WITHOUT_JSON)}


def test_perf_alone_leaves_out_what_it_cannot_ask(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    assert perf([f"--url={served.server.url}", "--seconds=1", "--warmup=0", "--rate=50"]) == 0
    printed, said = capsys.readouterr()
    assert all(model in printed for model in MODELS)
    assert [line.split(" is left out: ")[0] for line in said.splitlines()] == [
        f"gangway perf: {each}" for each in ("nothing", "steps")
    ]
    assert perf([f"--url={served.server.url}", "--mix=row=1,steps=1", "--seconds=1"]) == 1


def test_sizes_that_no_memory_holds(served: Served, client: Said) -> None:
    for size in (10**11, 10**18):
        status, _, said = client("open", f"--shape=x:{size}")
        assert status == 2 and said.startswith("gangway client: input 'x' of [1, 1") and "is too large" in said
