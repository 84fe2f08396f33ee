"""Models with more inputs and outputs than a slot has room for: by all protocols, and by all that executes them."""

import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm

from gangway.artifact.cache import Cache
from gangway.artifact.format import MAX_TENSORS
from gangway.compiler.errors import ModelError
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from gangway.executor.slots import INLINE_PLACES
from testing.repository import GANGWAY
from tests.helpers import ensemble_configs, onnx_text, python_models
from tests.helpers.client_segments import Segments
from tests.helpers.served import Array, Served, serving
from tests.helpers.ways import WAYS, RefusedError

pytestmark = pytest.mark.long

TIMEOUT_S = 60
INPUTS, OUTPUTS = INLINE_PLACES + 9, INLINE_PLACES + 4
NAMES = [f"c{number}" for number in range(INPUTS)]

SUM = f"""
    def execute(self, requests):
        responses = []
        for request in requests:
            feeds = [pb_utils.Tensor(tensor.name(), tensor.as_numpy() * 2) for tensor in request.inputs()]
            names = [f"y{{number}}" for number in range({OUTPUTS})]
            asked = pb_utils.InferenceRequest(model_name="native", inputs=feeds, requested_output_names=names)
            answer = asked.exec()
            if answer.has_error():
                raise pb_utils.TritonModelException(answer.error().message())
            tensors = [pb_utils.Tensor(t.name(), t.as_numpy() + np.float32(1)) for t in answer.output_tensors()]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
"""


def listed(kind: str, names: Sequence[str]) -> str:
    return ", ".join(f"{kind} {name}" for name in names)


def save_sums(repository: Path, name: str, inputs: int, outputs: int, config: str = "") -> None:
    """y0 is the sum of all inputs [n, 1], y1 and so on are twice one of the last ones."""
    names, made = [f"c{number}" for number in range(inputs)], [f"y{number}" for number in range(outputs)]
    doubled = " ".join(f"{y} = Mul({names[-number % inputs]}, two)" for number, y in enumerate(made) if number)
    graph = f"""({listed("float[n, 1]", names)}) => ({listed("float[n, 1]", made)}) {{
        all = Concat<axis=1>({", ".join(names)})
        mean = ReduceMean<axes=[1], keepdims=1>(all)
        y0 = Mul(mean, count)
        {doubled}
    }}"""
    onnx_text.save(repository, name, graph, config, two=np.float32(2), count=np.float32(inputs))


def save_texts(repository: Path) -> None:
    """Each output is an input: onnxruntime executes it."""
    made = [f"y{number}" for number in range(INPUTS)]
    nodes = " ".join(f"{y} = Identity({name})" for name, y in zip(NAMES, made, strict=True))
    graph = f"({listed('string[n]', NAMES)}) => ({listed('string[n]', made)}) {{ {nodes} }}"
    onnx_text.save(repository, "texts", graph)


def save_places(repository: Path) -> None:
    """Where the inputs [n, 1] are not 0: the size of the answer is known when it is computed."""
    nodes = f"all = Concat<axis=1>({', '.join(NAMES)}) y = NonZero(all)"
    onnx_text.save(repository, "places", f"({listed('float[n, 1]', NAMES)}) => (int64[2, m] y) {{ {nodes} }}")


def save_counts(repository: Path) -> None:
    """Each of many states counts the steps, each with a pace of its own; y is their mean."""
    names, after = [f"s{number}" for number in range(INPUTS)], [f"s{number}_out" for number in range(INPUTS)]
    steps = " ".join(f"{out} = Add({key}, p{key})" for key, out in zip(names, after, strict=True))
    graph = f"""({listed("float[n, 1]", ["x", *names])}) => ({listed("float[n, 1]", ["y", *after])}) {{
        nothing = Mul(x, zero)
        {steps}
        all = Concat<axis=1>({", ".join(after)})
        mean = ReduceMean<axes=[1], keepdims=1>(all)
        y = Add(mean, nothing)
    }}"""
    paces = {f"p{key}": np.float32(number) for number, key in enumerate(names)}
    states = (f'{{input_name: "{key}" output_name: "{key}_out" data_type: TYPE_FP32 dims: [1]}}' for key in names)
    config = f"""max_batch_size: 4 input {{name: "x" data_type: TYPE_FP32 dims: [1]}}
        output {{name: "y" data_type: TYPE_FP32 dims: [1]}} sequence_batching {{state [{", ".join(states)}]}}"""
    onnx_text.save(repository, "counts", graph, config, zero=np.float32(0), **paces)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("repository")
    save_sums(repository, "native", INPUTS, OUTPUTS, "max_batch_size: 8 dynamic_batching {}")
    save_sums(repository, "cached", INPUTS, OUTPUTS, "max_batch_size: 8 response_cache {enable: true}")
    save_sums(repository, "most_inputs", MAX_TENSORS, 1)
    save_sums(repository, "most_outputs", 1, MAX_TENSORS)
    save_texts(repository)
    save_places(repository)
    save_counts(repository)
    given = " ".join(f"{name}:FP32:1" for name in NAMES)
    made = " ".join(f"y{number}:FP32:1" for number in range(OUTPUTS))
    python_models.write(repository, "python", SUM, python_models.config_of(given, made, batch=8))
    flow = " ".join(f"{name}={name}" for name in NAMES), " ".join(f"y{each}=y{each}" for each in range(OUTPUTS))
    twice = [
        ("native", flow[0], " ".join(f"y{each}=t{each}" for each in range(OUTPUTS))),
        ("native", " ".join(f"{name}={'ct'[each < OUTPUTS]}{each}" for each, name in enumerate(NAMES)), flow[1]),
    ]
    for name, steps in (("ensemble", [("python", *flow)]), ("twice", twice)):
        ensemble_configs.write(repository, name, ensemble_configs.config_of(given, made, steps, batch=8))
    for name in ("native", "cached", "most_inputs", "most_outputs", "texts", "places", "counts"):  # one import of TVM
        compile_model(repository / name / "1" / "model.onnx", name, Cache(model_cache), detect(), lambda *_: None)
    with serving(repository, f"--cache-dir={model_cache}", "--cache-config=local,size=1048576") as served:
        yield served


def feeds_of(count: int = INPUTS, rows: int = 2, first: float = 1) -> dict[str, Array]:
    """Each number is another one."""
    values = first + np.arange(count * rows, dtype=np.float32).reshape(count, rows, 1)
    return {f"c{number}": value for number, value in enumerate(values)}


def expected_of(feeds: dict[str, Array], outputs: int = OUTPUTS) -> dict[str, Array]:
    values = list(feeds.values())
    made = {f"y{number}": values[-number % len(values)] * np.float32(2) for number in range(1, outputs)}
    return {"y0": np.sum(values, axis=0), **made}


def check(answer: dict[str, Array], expected: dict[str, Array]) -> None:
    assert list(answer) == list(expected)
    for name, value in expected.items():
        assert answer[name].shape == value.shape
        np.testing.assert_allclose(answer[name], value, rtol=1e-5, err_msg=name)


def test_a_compiled_model(served: Served) -> None:
    for name in ("native", "most_inputs", "most_outputs", "counts"):
        config = served.client.get_model_config(name, as_json=True)["config"]
        assert config["parameters"]["gangway_engine"]["string_value"] == "native", name
    for rows in (1, 3, 8):
        feeds = feeds_of(rows=rows)
        check(served.ask("native", feeds), expected_of(feeds))
    wanted = [triton.InferRequestedOutput("y0"), triton.InferRequestedOutput(f"y{OUTPUTS - 1}")]
    expected = expected_of(feeds)
    check(served.ask("native", feeds, outputs=wanted), {each.name(): expected[each.name()] for each in wanted})


@pytest.mark.parametrize("name", ["most_inputs", "most_outputs"])
def test_as_many_as_possible(served: Served, name: str) -> None:
    inputs, outputs = (MAX_TENSORS, 1) if name == "most_inputs" else (1, MAX_TENSORS)
    feeds = feeds_of(inputs)
    check(served.ask(name, feeds), expected_of(feeds, outputs))
    metadata = served.client.get_model_metadata(name)
    assert (len(metadata.inputs), len(metadata.outputs)) == (inputs, outputs)


def test_more_are_refused_when_the_model_is_compiled(tmp_path: Path) -> None:
    save_sums(tmp_path, "too_many", MAX_TENSORS + 1, 1)
    path = tmp_path / "too_many" / "1" / "model.onnx"
    with pytest.raises(ModelError, match=f"{MAX_TENSORS + 1} inputs; 1 to {MAX_TENSORS} are possible"):
        compile_model(path, "too_many", Cache(tmp_path), detect(), lambda *_: None)


def test_a_model_of_texts(served: Served) -> None:
    feeds = {f"c{i}": np.array([f"{i}", "é" * i], object) for i in range(INPUTS)}
    answer = served.ask("texts", feeds)
    for number in range(INPUTS):
        assert [text.decode() for text in answer[f"y{number}"]] == list(feeds[f"c{number}"])


def test_answers_whose_size_depends_on_data(served: Served) -> None:
    feeds = {name: np.array([[float(i % 2)], [float(i % 3)]], np.float32) for i, name in enumerate(NAMES)}
    np.testing.assert_array_equal(
        served.ask("places", feeds)["y"], np.nonzero(np.concatenate(list(feeds.values()), axis=1))
    )


def test_steps_that_are_compiled(served: Served) -> None:
    feeds = feeds_of(rows=3)
    inner = list(expected_of(feeds).values())
    between = {name: inner[number] if number < OUTPUTS else feeds[name] for number, name in enumerate(NAMES)}
    check(served.ask("twice", feeds), expected_of(between))


def test_requests_are_joined(served: Served) -> None:
    """Each of them gets its own rows back, whichever were computed together."""
    requests = [feeds_of(rows=1 + number % 3, first=number * 1000) for number in range(40)]
    with ThreadPoolExecutor(8) as pool:
        for feeds, answer in zip(requests, pool.map(partial(served.ask, "native"), requests), strict=True):
            check(answer, expected_of(feeds))


def test_states(served: Served) -> None:
    steps = 3
    for step in range(1, steps + 1):
        flags = {"sequence_id": 7, "sequence_start": step == 1, "sequence_end": step == steps}
        answer = served.ask("counts", {"x": np.zeros((1, 1), np.float32)}, **flags)
        assert answer["y"].item() == pytest.approx(step * (INPUTS - 1) / 2)


def test_the_response_cache(served: Served) -> None:
    feeds = feeds_of(first=5)
    for _ in range(3):
        check(served.ask("cached", feeds), expected_of(feeds))
    (model,) = served.client.get_inference_statistics("cached").model_stats
    assert model.inference_stats.cache_hit.count == 2


@pytest.mark.parametrize("name", ["native", "python", "ensemble"])
@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_ask(served: Served, name: str, way: str) -> None:
    feeds, twice = feeds_of(), name != "native"
    expected = expected_of({key: value * (1 + twice) for key, value in feeds.items()})
    for outputs in ((), tuple(expected)):
        check(served.over(way, name, outputs, **feeds), {key: value + twice for key, value in expected.items()})


def test_regions(served: Served) -> None:
    """All inputs and outputs lie in a client's memory; large enough to be used there."""
    rows, segments = 8, Segments(served.client)
    feeds = feeds_of(rows=rows)
    tensor_bytes = rows * 4
    handle = segments.create("many", (INPUTS + OUTPUTS) * tensor_bytes)
    inputs, outputs = [], []
    for number, (key, value) in enumerate(feeds.items()):
        shm.set_shared_memory_region(handle, [value], number * tensor_bytes)
        inputs.append(triton.InferInput(key, [rows, 1], "FP32"))
        inputs[-1].set_shared_memory("many", tensor_bytes, number * tensor_bytes)
    for number in range(OUTPUTS):
        outputs.append(triton.InferRequestedOutput(f"y{number}"))
        outputs[-1].set_shared_memory("many", tensor_bytes, (INPUTS + number) * tensor_bytes)
    try:
        served.client.infer("native", inputs, outputs=outputs, client_timeout=TIMEOUT_S)
        for number, value in enumerate(expected_of(feeds).values()):
            at = (INPUTS + number) * tensor_bytes
            found = shm.get_contents_as_numpy(handle, np.float32, [rows, 1], at)
            np.testing.assert_allclose(found, value, rtol=1e-5)
    finally:
        served.client.unregister_system_shared_memory("many")
        shm.destroy_shared_memory_region(handle)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["native", "simple", "most_outputs"])
def test_what_a_model_does_not_have_is_named(served: Served, name: str, way: str) -> None:
    """However many tensors a request has, it is the model that says which of them are too many."""
    known = {"native": INPUTS, "most_outputs": 1}.get(name, 0)
    words = f"unexpected inference input 'c{known}' for model '{name}'" if known else "unknown model: 'simple'"
    with pytest.raises(RefusedError, match=words):
        served.over(way, name, **feeds_of(INPUTS + 8))


def test_the_perf_client(served: Served) -> None:
    command = [*GANGWAY, "perf", served.server.url, "--mix=native=1,python=1", "--rate=20", "--seconds=1", "--warmup=0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
