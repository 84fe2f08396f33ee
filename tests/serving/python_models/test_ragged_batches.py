"""Which requests a Python model gets together: those of equal shapes, but for inputs with `allow_ragged_batch`."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests.helpers.python_models import config_of, write
from tests.helpers.served import Served, inputs_of, serving

pytestmark = pytest.mark.long

# Says what has come together: for each request its inputs' shapes.
TELLS = """
    def execute(self, requests):
        import json
        shapes = [{t.name(): t.shape() for t in r.inputs()} for r in requests]
        y = np.array([[json.dumps(shapes).encode()]], dtype=object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]) for _ in requests]
"""
JOINS = "dynamic_batching { max_queue_delay_microseconds: 500000 }"
RAGGED = 'input {{ name: "{name}" data_type: TYPE_{datatype} dims: [-1] allow_ragged_batch: true {more} }}'
SAYS_MORE = """
    batch_input [
      { kind: BATCH_ELEMENT_COUNT target_name: "count" data_type: TYPE_INT32 source_input: "x" },
      { kind: BATCH_ACCUMULATED_ELEMENT_COUNT target_name: "ends" data_type: TYPE_FP32 source_input: "x" },
      { kind: BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO target_name: "begins" data_type: TYPE_INT32 source_input: "x" },
      { kind: BATCH_MAX_ELEMENT_COUNT_AS_SHAPE target_name: "most" data_type: TYPE_FP32 source_input: "x" },
      { kind: BATCH_ITEM_SHAPE target_name: "shape" data_type: TYPE_INT32 source_input: "x" },
      { kind: BATCH_ITEM_SHAPE_FLATTEN target_name: "flat" data_type: TYPE_INT32 source_input: "x" }
    ]
    batch_output { target_name: "y" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "x" }
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("repository")
    x, s = (RAGGED.format(name=name, datatype=kind, more="") for name, kind in (("x", "FP32"), ("s", "STRING")))
    optional = RAGGED.format(name="s", datatype="STRING", more="optional: true")
    write(repository, "equal", TELLS, config_of("x:FP32:-1", "y:STRING:1", 4, JOINS))
    write(repository, "ragged", TELLS, config_of("", "y:STRING:1", 4, x + JOINS))
    write(repository, "texts", TELLS, config_of("", "y:STRING:1", 4, x + s + JOINS))
    write(repository, "one_of_two", TELLS, config_of("z:FP32:-1", "y:STRING:1", 4, x + JOINS))
    write(repository, "optional", TELLS, config_of("", "y:STRING:1", 4, x + optional + JOINS))
    nameless = config_of("", "y:STRING:1", 4, x + JOINS).replace('backend: "python"', "")
    write(repository, "nameless", TELLS, nameless)  # a model.py without a backend is a Python model
    write(repository, "batch_input", TELLS, config_of("", "y:STRING:1", 4, x + SAYS_MORE + JOINS))
    with serving(repository, cwd=repository.parent) as served:
        yield served


def tensor(name: str, shape: Sequence[int]) -> np.ndarray:  # type: ignore[type-arg]
    return np.full(shape, b"t", dtype=object) if name == "s" else np.zeros(shape, np.float32)


def together(served: Served, model: str, requests: Sequence[dict[str, Sequence[int]]]) -> list[int]:
    """How many requests each of these, which are sent at the same time, was executed with."""

    def ask(shapes: dict[str, Sequence[int]]) -> int:
        feeds = {name: tensor(name, shape) for name, shape in shapes.items()}
        told = json.loads(served.client.infer(model, inputs_of(feeds)).as_numpy("y")[0, 0])
        assert {name: list(shape) for name, shape in shapes.items()} in told
        return len(told)

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(ask, requests))


@pytest.mark.parametrize(
    ("model", "requests", "counts"),
    [
        ("equal", [{"x": (1, 3)}, {"x": (1, 4)}, {"x": (1, 3)}, {"x": (1, 5)}], [2, 1, 2, 1]),
        ("ragged", [{"x": (1, 3)}, {"x": (1, 4)}, {"x": (1, 0)}, {"x": (1, 5)}], [4] * 4),
        ("ragged", [{"x": (2, 3)}, {"x": (2, 4)}], [2] * 2),
        ("nameless", [{"x": (2, 3)}, {"x": (2, 4)}], [2] * 2),
        ("texts", [{"x": (1, 3), "s": (1, 1)}, {"x": (1, 1), "s": (1, 3)}] * 2, [4] * 4),
        ("one_of_two", [{"z": (1, 2), "x": (1, 3)}, {"z": (1, 2), "x": (1, 4)}, {"z": (1, 1), "x": (1, 3)}], [2, 2, 1]),
        ("optional", [{"x": (1, 3), "s": (1, 1)}, {"x": (1, 2), "s": (1, 2)}, {"x": (1, 3)}], [2, 2, 1]),
        ("batch_input", [{"x": (1, 3)}, {"x": (1, 4)}, {"x": (1, 2)}, {"x": (1, 5)}], [4] * 4),
    ],
)
def test_requests_of_these_shapes(
    served: Served, model: str, requests: list[dict[str, Sequence[int]]], counts: list[int]
) -> None:
    assert together(served, model, requests) == counts


def test_what_batch_input_says_is_for_other_backends(served: Served) -> None:
    """Triton's Python models do not get such tensors either; the log says that they mean nothing."""
    assert "batch_input" in served.client.get_model_config("batch_input", as_json=True)["config"]
    metadata = served.client.get_model_metadata("batch_input")
    assert [each.name for each in metadata.inputs] == ["x"]
    assert "batch_input (a Python model gets each request by itself" in served.log()
