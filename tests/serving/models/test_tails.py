"""`gangway serve` with models that are compiled up to outputs whose sizes depend on data."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from gangway.artifact.cache import Cache
from gangway.clients.inputs import outputs_of
from gangway.compiler.arguments import CompileOptions
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from testing.processes import cpu_ns
from tests.helpers import ensemble_configs
from tests.helpers.onnx_networks import Array
from tests.helpers.served import Served, serving
from tests.helpers.tail_networks import (
    NAMES,
    accumulator,
    classifier,
    detector,
    first,
    image,
    labels,
    numbered,
    places,
    sums,
)
from tests.helpers.ways import WAYS, request_of

pytestmark = pytest.mark.long

TIMEOUT_SECONDS = 30
LONG_STEPS = 300_000  # half a second
BEGUN_NS = 100_000_000  # of CPU: a request computes
REGION_BYTES = 1 << 14
SEQUENCES = """
    input { name: "x" } output { name: "y" }
    sequence_batching {
      state { input_name: "before" output_name: "after" data_type: TYPE_FP32 dims: [ 1, 4 ] }
    }
"""
ENSEMBLE = ensemble_configs.config_of(
    "image:FP32:1,3,32,32 one:INT64:1",
    "boxes:FP32:-1,4 sums:FP32:-1 y:INT64:4,-1",
    [
        ("detector", "image=image", "boxes=boxes"),
        ("sums", "x=boxes", "y=sums"),
        ("places", "x=image count=one", "y=y"),
    ],
    batch=0,
)

NAMED = ensemble_configs.config_of(
    "features:FP32:4", "best:FP32:5", [("classifier", "x=features", "chances=best")], batch=8
)


class Checked(Served):
    def check(self, name: str, feeds: dict[str, Array], way: str = "gRPC") -> dict[str, Array]:
        """Compare a model's answer with onnxruntime's; return it."""
        answers = self.over(way, name, **feeds)
        session = onnxruntime.InferenceSession(str(self.repository / name / "1" / "model.onnx"))
        names = [output.name for output in session.get_outputs()]
        assert list(answers) == names
        for key, expected in zip(names, session.run(names, feeds), strict=True):
            assert_same(answers[key], expected)
        return answers


def assert_same(answer: Array, expected: Array) -> None:
    assert answer.shape == expected.shape
    if expected.dtype == object:
        assert [text.decode() for text in answer.ravel()] == expected.ravel().tolist()
    else:
        assert answer.dtype == expected.dtype
        np.testing.assert_allclose(answer, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> Iterator[Checked]:
    repository = tmp_path_factory.mktemp("repository")
    detector(repository / "detector" / "1")
    detector(repository / "open_detector" / "1", rows="N")
    places(repository / "places" / "1")
    labels(repository / "labels" / "1")
    sums(repository / "sums" / "1")
    labels(repository / "unbatched" / "1")
    classifier(repository / "classifier" / "1")
    (repository / "classifier" / "config.pbtxt").write_text("max_batch_size: 8")
    ensemble_configs.write(repository, "named", NAMED)
    batching = "dynamic_batching { max_queue_delay_microseconds: 100000 }"
    numbered(repository / "numbered" / "1")
    for name in ("labels", "numbered"):
        (repository / name / "config.pbtxt").write_text(f"max_batch_size: 8 {batching}")
    first(repository / "first" / "1")
    accumulator(repository / "accumulator" / "1")
    (repository / "accumulator" / "config.pbtxt").write_text(SEQUENCES)
    ensemble_configs.write(repository, "both", ENSEMBLE)
    for path in repository.glob("*/1/model.onnx"):  # in this process: one import of TVM for all
        for sizes in ({}, {"N": 1}) if path.parts[-3] in ("open_detector", "numbered") else ({},):
            compile_model(path, path.parts[-3], Cache(model_cache), detect(), lambda *_: None, CompileOptions(sizes))
    flags = (f"--cache-dir={model_cache}", "--backend-config=default-max-batch-size=0")
    with serving(repository, *flags, kind=Checked) as served:
        yield served


@pytest.mark.parametrize("way", WAYS)
def test_detections(served: Checked, way: str) -> None:
    counts = {len(served.check("detector", {"image": image(seed)}, way)["boxes"]) for seed in range(5)}
    assert 0 in counts and len(counts) > 2


def test_what_clients_are_told(served: Checked) -> None:
    client = served.client
    shapes = {output.name: list(output.shape) for output in client.get_model_metadata("detector").outputs}
    assert shapes == {"boxes": [-1, 4], "scores": [-1], "classes": [-1, 1], "all_scores": [1, 2, 64]}
    for name in ("detector", "places", "labels", "unbatched", "accumulator"):
        assert client.get_model_config(name).config.parameters["gangway_engine"].string_value == "native"


def test_detections_in_shared_memory(served: Checked) -> None:
    client, key = served.client, f"/tails-test-{os.getpid()}"
    handle = shm.create_shared_memory_region("tails", key, REGION_BYTES)
    feeds = {"image": image(1)}
    expected = served.check("detector", feeds)
    try:
        client.register_system_shared_memory("tails", key, REGION_BYTES)
        wanted = [triton.InferRequestedOutput(name) for name in ("boxes", "scores", "all_scores")]
        tensor = triton.InferInput("image", [1, 3, 32, 32], "FP32")
        shm.set_shared_memory_region(handle, [feeds["image"]])
        tensor.set_shared_memory("tails", feeds["image"].nbytes)
        wanted[0].set_shared_memory("tails", 512, offset=REGION_BYTES - 512)
        wanted[2].set_shared_memory("tails", 512, offset=REGION_BYTES - 1024)
        result = client.infer("detector", [tensor], outputs=wanted)
        boxes = expected["boxes"]
        assert list(result.get_output("boxes").shape) == list(boxes.shape)
        assert result.get_output("boxes").parameters["shared_memory_byte_size"].int64_param == boxes.nbytes
        found = shm.get_contents_as_numpy(handle, np.float32, list(boxes.shape), REGION_BYTES - 512)
        assert_same(found, boxes)
        assert_same(result.as_numpy("scores"), expected["scores"])
        wanted[0].set_shared_memory("tails", boxes.nbytes - 1)
        with pytest.raises(InferenceServerException, match=r"'boxes' \(\d+ bytes\) should be at least"):
            client.infer("detector", [tensor], outputs=wanted)
    finally:
        client.unregister_system_shared_memory()
        shm.destroy_shared_memory_region(handle)


@pytest.mark.parametrize("way", WAYS)
def test_classes_are_called_what_a_zip_map_calls_them(served: Checked, way: str) -> None:
    """Also in an ensemble; the map itself becomes a tensor of scores, [rows, classes]."""
    session = onnxruntime.InferenceSession(str(served.repository / "classifier" / "1" / "model.onnx"))
    for rows in (1, 5):
        x = np.random.default_rng(rows).standard_normal((rows, 4)).astype(np.float32)
        wanted, maps = session.run(None, {"x": x})
        scores = np.array([[each[text] for text in NAMES] for each in maps])
        answers = served.over(way, "classifier", x=x)
        assert [text.decode() for text in answers["label"]] == wanted.tolist()
        np.testing.assert_allclose(answers["chances"], scores, rtol=1e-5)
        for name, tensor, output in (("classifier", "x", "chances"), ("named", "features", "best")):
            request = request_of(name, {tensor: x}, [output])
            request.outputs[0].parameters["classification"].int64_param = 2
            named = outputs_of(WAYS[way](served.server, request))[output]
            found = [[text.decode().split(":")[1:] for text in row] for row in named]
            places = np.argsort(-scores, axis=1)[:, :2]
            assert found == [[[str(place), NAMES[place]] for place in row] for row in places]


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_that_is_larger_than_was_thought(served: Checked, way: str) -> None:
    for seed in (0, 1, 2, 0, 1):
        answers = served.check("places", {"x": image(seed), "count": np.array([seed])}, way)
        assert (answers["y"].nbytes > 100_000) == (seed > 0)


def test_a_batch_of_detections(served: Checked) -> None:
    """Nothing says of its outputs which row they belong to, so the number of rows is a size like others."""
    client = served.client
    assert client.get_model_config("open_detector").config.max_batch_size == 0
    served.check("open_detector", {"image": image(1)})
    served.wait_for("open_detector, version 1, N=1: ready, compiled")
    for seed in range(4):
        served.check("open_detector", {"image": image(seed)})


def test_boxes_that_say_which_image_they_are_of(served: Checked) -> None:
    """No batch is made of requests, whose images would get other numbers, although zeros give a row for each image."""
    config = served.client.get_model_config("numbered").config
    assert config.parameters["batching"].string_value == "off"

    def ask(seed: int) -> int:
        images = np.concatenate([image(3 * seed + number) for number in range(1 + seed % 3)])
        answers = served.check("numbered", {"image": images})
        return len(answers["kept"]) - len(images)

    with ThreadPoolExecutor(8) as pool:
        assert any(pool.map(ask, range(24)))


def test_a_request_that_the_tail_refuses(served: Checked) -> None:
    """Zeros, too, with which the server tries models: it is ready even so."""
    log = served.server.log.read_text()
    assert "first, version 1: its time alone is not known before its first request" in log
    for x in (np.ones((1, 3, 6, 6)), np.zeros((1, 3, 6, 6)), -np.ones((1, 3, 6, 6))):
        feeds = {"x": x.astype(np.float32)}
        if x.any():
            served.check("first", feeds)
            continue
        with pytest.raises(InferenceServerException, match=r"'first': Gather.*: indices element out of") as caught:
            served.ask("first", feeds)
        assert "INVALID_ARGUMENT" in caught.value.status()


def rows_of(count: int, seed: int) -> dict[str, Array]:
    return {"x": np.random.default_rng(seed).standard_normal((count, 3, 6, 6)).astype(np.float32)}


@pytest.mark.parametrize("way", WAYS)
def test_labels_of_rows(served: Checked, way: str) -> None:
    for count in (1, 2, 8):
        served.check("labels", rows_of(count, count), way)
    served.check("unbatched", rows_of(3, 3), way)
    answers = served.over(way, "unbatched", **rows_of(0, 0))
    assert [value.shape for value in answers.values()] == [(0,), (0, 5)]


def test_rows_of_several_requests_are_computed_together(served: Checked) -> None:
    before = served.client.get_inference_statistics("labels").model_stats[0]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: served.check("labels", rows_of(1 + seed % 2, seed)), range(32)))
    after = served.client.get_inference_statistics("labels").model_stats[0]
    assert after.execution_count - before.execution_count < 32
    assert after.inference_count - before.inference_count == 48


def test_steps_of_an_ensemble(served: Checked) -> None:
    for seed in (0, 1, 2):
        feeds = {"image": image(seed)}
        answers = served.ask("both", {**feeds, "one": np.array([1])})
        expected = served.check("detector", feeds) | served.check("places", {"x": image(seed), "count": np.array([1])})
        expected["sums"] = expected["boxes"].sum(1)
        assert answers.keys() == {"boxes", "sums", "y"}
        for name, answer in answers.items():
            assert_same(answer, expected[name])


def test_states_of_sequences(served: Checked) -> None:
    """Two at once, whose states are in the answers' frames, from which clients get the other outputs."""
    totals = {number: np.zeros(4) for number in (7, 8)}
    for step in range(5):
        for number in totals:
            x = np.zeros((1, 4), np.float32)
            x[0, (step + number) % 4] = 1 if step < 4 else -1
            totals[number] += 2 * x[0]
            flags = {"sequence_id": number, "sequence_start": step == 0, "sequence_end": step == 4}
            answers = served.ask("accumulator", {"x": x}, **flags)
            assert list(answers) == ["y"]
            np.testing.assert_array_equal(answers["y"], np.nonzero(totals[number][None]))


def test_a_killed_worker_costs_no_request(served: Checked) -> None:
    feeds = {"x": image(3), "count": np.array([LONG_STEPS])}
    expected = served.check("places", {**feeds, "count": np.array([1])})
    before = served.server.pids()["worker"]
    idle_ns = sum(map(cpu_ns, before))
    with ThreadPoolExecutor(1) as pool:
        request = pool.submit(served.ask, "places", feeds)
        while sum(map(cpu_ns, before)) - idle_ns < BEGUN_NS:  # it is in the tail: all that comes before is quick
            assert not request.done()
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        answers = request.result(TIMEOUT_SECONDS)
    for name, answer in answers.items():
        assert_same(answer, expected[name])
    assert not set(before) & set(served.server.pids()["worker"])
    served.check("detector", {"image": image(1)})
