"""`gangway serve` with models in bf16: what the configuration asks for, how answers agree, and what clients are told.

A processor without instructions for bf16 serves the same models in fp32, and says so.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from gangway.artifact.precision import BF16
from gangway.clients.inputs import Array
from gangway.compiler.comparison.agreement import cosine
from gangway.compiler.precision import NO_INSTRUCTIONS
from gangway.compiler.target import detect, for_precision
from testing.live_server import LiveServer, live_server
from tests.helpers import onnx_text

pytestmark = pytest.mark.long

HAS_BF16 = bool(for_precision(detect(), BF16).extensions)
CHANNELS, SIZE = 128, 28
SETTINGS = {  # of each model: its parameters, and in what it is served where the processor has bf16
    "flag": ({}, "bf16"),
    "exact": ({"precision": "fp32"}, "fp32"),
    "auto": ({"precision": "auto"}, "bf16"),
    "strict": ({"precision": "bf16", "precision_min_cosine": "0.9999999999"}, "fp32"),
    "open": ({"gangway_buckets": f"height={SIZE}; width={SIZE}"}, ""),
    "unknown": ({"precision": "fp8"}, ""),
    "cosine": ({"precision_min_cosine": "1.5"}, ""),
}
WRONG = {
    "unknown": 'parameter precision: expected one of "fp32", "bf16", "auto", "deadline", got "fp8"',
    "cosine": 'parameter precision_min_cosine: expected a number from 0 to 1, got "1.5"',
}


def write(folder: Path, parameters: dict[str, str]) -> None:
    """Three convolutions that are worth it in bf16 by any instructions."""
    sides = ("height", "width") if "gangway_buckets" in parameters else (SIZE, SIZE)
    shape = f"float[N, {CHANNELS}, {sides[0]}, {sides[1]}]"
    graph = f"({shape} x) => ({shape} t) {{ {onnx_text.convolutions(3, pads=0)} }}"
    shapes = {f"w{number}": (CHANNELS, CHANNELS, 1, 1) for number in range(3)}
    onnx_text.save(folder.parent, folder.name, graph, **onnx_text.weights_of(1, shapes, CHANNELS**-0.5))
    text = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n' for key, value in parameters.items()
    )
    (folder / "config.pbtxt").write_text(f"max_batch_size: 4\n{text}")


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("precision")
    for name, (parameters, _) in SETTINGS.items():
        write(folder / name, parameters)
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def flags(cache: Path) -> list[str]:
    loaded = [f"--load-model={name}" for name in SETTINGS if name not in WRONG]
    return ["--precision=auto", f"--cache-dir={cache}", "--model-control-mode=explicit", *loaded]


@pytest.fixture(scope="module")
def server(repository: Path, cache: Path) -> Iterator[LiveServer]:
    with live_server(repository, flags(cache)) as live:
        yield live


@pytest.fixture(scope="module")
def client(server: LiveServer) -> triton.InferenceServerClient:
    return triton.InferenceServerClient(server.url)


def answer(client: triton.InferenceServerClient, name: str, x: Array) -> Array:
    given = triton.InferInput("x", list(x.shape), "FP32")
    given.set_data_from_numpy(x)
    result: Array | None = client.infer(name, [given]).as_numpy("t")
    assert result is not None
    return result


@pytest.mark.parametrize("rows", [1, 3])
def test_answers_agree(repository: Path, client: triton.InferenceServerClient, rows: int) -> None:
    x = np.random.default_rng(rows).standard_normal((rows, CHANNELS, SIZE, SIZE)).astype(np.float32)
    expected = onnxruntime.InferenceSession(str(repository / "flag" / "1" / "model.onnx")).run(None, {"x": x})[0]
    for name, (_, precision) in SETTINGS.items():
        if precision == "fp32" or (precision and not HAS_BF16):
            np.testing.assert_allclose(answer(client, name, x).astype(np.float32), expected, rtol=1e-4, atol=1e-4)
        elif precision:
            got = answer(client, name, x)
            assert 0.999 <= cosine(got, expected) < 1 - 1e-9, "it is in bf16, and agrees"


def test_what_clients_are_told(client: triton.InferenceServerClient) -> None:
    for name, (_, precision) in SETTINGS.items():
        if not precision:
            continue
        parameters = client.get_model_config(name).config.parameters
        assert parameters["gangway_precision"].string_value == (precision if HAS_BF16 else "fp32"), name
        note = parameters["gangway_precision_note"].string_value
        if name == "exact":
            assert note == ""
        elif not HAS_BF16:
            assert note == NO_INSTRUCTIONS
        elif name == "strict":
            assert note.startswith("answers in bf16 agree too little: cosine 0.99")
        else:
            assert note.startswith("cosine 0.9") and note.endswith("of rows")


def test_the_log_says_so(server: LiveServer) -> None:
    text = server.log.read_text()
    assert f"open, version 1, height={SIZE}, width={SIZE}: ready, compiled for these sizes in " in text
    expected = "compiled in bf16 (cosine 0.9" if HAS_BF16 else f"compiled in fp32 ({NO_INSTRUCTIONS})"
    assert "model flag, version 1: ready after" in text and expected in text


@pytest.mark.parametrize(("name", "reason"), WRONG.items())
def test_what_is_wrong(client: triton.InferenceServerClient, name: str, reason: str) -> None:
    with pytest.raises(InferenceServerException) as caught:
        client.load_model(name)
    assert reason in str(caught.value)
    assert client.is_model_ready("flag") and not client.is_model_ready(name)


def test_a_second_start_finds_it(repository: Path, cache: Path, server: LiveServer) -> None:
    """What was chosen is in the cache, so nothing is compiled or compared again."""
    with live_server(repository, flags(cache)) as again:
        text = again.log.read_text()
    assert "flag: found in the cache" in text and "flag: compiled" not in text
