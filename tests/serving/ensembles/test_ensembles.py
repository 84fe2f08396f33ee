"""Ensembles of a real server: right numbers, every kind of request, and their models loaded and unloaded below them."""

import json
import os
import signal
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnxruntime
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from gangway.zoo import write_model
from gangway.zoo.catalog import ENSEMBLES
from gangway.zoo.repository import write_ensemble
from testing.live_server import live_server
from tests.conftest import CompileKept
from tests.helpers import adder_models, ensemble_configs
from tests.helpers.adder_models import TIMEOUT_S, Controlled, fill_cache, flags
from tests.helpers.ensemble_configs import config_of

Array = npt.NDArray[Any]
MODELS = ("simple_string", "simple_identity", "simple_pixels", "simple_image")
PAIRS = "INPUT0:INT32:16 INPUT1:INT32:16", "OUTPUT0:INT32:16 OUTPUT1:INT32:16"
BOTH_IN, BOTH_OUT = "INPUT0=INPUT0 INPUT1=INPUT1", "OUTPUT0=OUTPUT0 OUTPUT1=OUTPUT1"
X, Y = "x:FP32:4", "y:FP32:4"
CHAIN = [("one", "x=x", "y=t"), ("two", "x=t", "y=y")]
CACHED = "response_cache { enable: true }"
REJECTS = 'parameters { key: "late" value { string_value: "reject" } }'
BROKEN = {
    "stranger": (config_of(X, Y, [("nobody", "x=x", "y=y")]), "contains models that are not available: nobody"),
    "itself": (config_of(X, Y, [("itself", "x=x", "y=y")]), "circular dependency between ensembles: itself -> itself"),
    "wide": (config_of(X, Y, CHAIN, batch=9), "allows maximum batch size 9, but it contains model one"),
    "twice": (config_of(X, Y, [*CHAIN, ("one", "x=x", "y=t")]), "can appear in an output map only once"),
    "grouped": (config_of(X, Y, CHAIN, more="instance_group { }"), "instance group should not be specified"),
    "mistyped": (config_of("x:INT32:4", Y, CHAIN), "inconsistent data type"),
    "versioned": (config_of(X, Y, [("one@7", "x=x", "y=y")]), "depends on one whose required version 7 is not loaded"),
}


def repository_of(folder: Path) -> list[Path]:
    """Write models and ensembles; return the ONNX files that are not adders."""
    files = [write_model(folder, name) / "1" / "model.onnx" for name in ("simple", *MODELS)]
    for name in ENSEMBLES:
        write_ensemble(folder, name)
    for name, number in (("one", 1), ("two", 2)):
        adder_models.write(folder, name, number)
    nested = [("simple_diamond", BOTH_IN, "OUTPUT0=a OUTPUT1=b"), ("simple", "INPUT0=a INPUT1=b", BOTH_OUT)]
    texts = [("simple_identity", "INPUT0=INPUT0", "OUTPUT0=a"), ("simple_string", "INPUT0=a INPUT1=INPUT1", BOTH_OUT)]
    string_pairs = [side.replace("INT32", "STRING") for side in PAIRS]
    ensemble_configs.write(folder, "nested", config_of(*PAIRS, steps=nested))
    ensemble_configs.write(folder, "texts", config_of(*string_pairs, steps=texts))
    ensemble_configs.write(folder, "chain", config_of(X, Y, CHAIN, more=CACHED))
    ensemble_configs.write(folder, "strict", config_of(X, Y, CHAIN, more=REJECTS))
    for name, (config, _) in BROKEN.items():
        ensemble_configs.write(folder, name, config)
    return files


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, compile_kept: CompileKept) -> Iterator[Controlled]:
    repository, second = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    cache = fill_cache(tmp_path_factory.mktemp("compiled"), compile_kept, *repository_of(repository))
    start = [f"--load-model={name}" for name in ("simple_ensemble", "nested", "texts", "strict")]
    more = [*start, "--model-control-mode=explicit", "--cache-config=local,size=100000", "--max-shapes=0"]
    file = tmp_path_factory.mktemp("traces") / "trace.json"
    more.append(f"--trace-config=triton,file={file}")
    with (
        live_server(repository, flags(cache, second, *more)) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        yield Controlled(server, client, repository, second, file)
    assert server.process.returncode == 0


def inputs_of(feeds: dict[str, Array], module: Any = triton) -> list[Any]:
    inputs = []
    for name, value in feeds.items():
        inputs.append(module.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype)))
        inputs[-1].set_data_from_numpy(value)
    return inputs


def by_hand(served: Controlled, name: str, feeds: dict[str, Array]) -> dict[str, Array]:
    """What onnxruntime answers to one model."""
    session = onnxruntime.InferenceSession(served.repository / name / "1" / "model.onnx")
    return dict(zip((output.name for output in session.get_outputs()), session.run(None, feeds), strict=True))


def pairs(rows: int = 2) -> dict[str, Array]:
    a = np.arange(16 * rows, dtype=np.int32).reshape(rows, 16)
    return {"INPUT0": a, "INPUT1": a[:, ::-1].copy()}


def refusal(served: Controlled, name: str, feeds: dict[str, Array], **options: Any) -> InferenceServerException:
    with pytest.raises(InferenceServerException) as raised:
        served.client.infer(name, inputs_of(feeds), client_timeout=TIMEOUT_S, **options)
    return raised.value


def floats(rows: int = 1) -> dict[str, Array]:
    return {"x": np.full((rows, 4), 10, np.float32)}


def test_what_an_ensemble_needs_is_loaded_with_it(served: Controlled) -> None:
    index = served.index()
    for name in ("simple_ensemble", "simple_pixels", "simple_image", "nested", "simple_diamond", "simple", "texts"):
        assert index[name, "1"] == ("READY", ""), served.server.log.read_text()
    assert served.client.is_server_ready()
    config = served.client.get_model_config("simple_ensemble", as_json=True)["config"]
    assert config["platform"] == "ensemble" and len(config["ensemble_scheduling"]["step"]) == 2
    metadata = served.client.get_model_metadata("simple_ensemble", as_json=True)
    assert metadata["platform"] == "ensemble"
    assert metadata["inputs"] == [{"name": "PIXELS", "datatype": "UINT8", "shape": ["-1", "64", "64", "3"]}]


@pytest.mark.parametrize("rows", [1, 3])
def test_an_image_is_made_ready_and_classified(served: Controlled, rows: int) -> None:
    pixels = np.random.default_rng(rows).integers(0, 256, (rows, 64, 64, 3)).astype(np.uint8)
    image = by_hand(served, "simple_pixels", {"PIXELS": pixels})["IMAGE"]
    wanted = by_hand(served, "simple_image", {"IMAGE": image})["COLOUR"]
    result = served.client.infer("simple_ensemble", inputs_of({"PIXELS": pixels}))
    np.testing.assert_allclose(result.as_numpy("COLOUR"), wanted, rtol=1e-5)
    classes = [triton.InferRequestedOutput("COLOUR", class_count=1)]
    result = served.client.infer("simple_ensemble", inputs_of({"PIXELS": pixels}), outputs=classes)
    labels = [text.decode().split(":")[2] for text in result.as_numpy("COLOUR")[:, 0]]  # those of simple_image
    assert labels == [("red", "green", "blue")[row.argmax()] for row in wanted]


def test_strings_and_ensembles_within_ensembles(served: Controlled) -> None:
    feeds = pairs()
    x = by_hand(served, "simple", feeds)
    c = by_hand(served, "simple", {"INPUT0": x["OUTPUT0"], "INPUT1": x["OUTPUT1"]})
    d = by_hand(served, "simple", {"INPUT0": c["OUTPUT0"], "INPUT1": c["OUTPUT1"]})
    wanted = by_hand(served, "simple", {"INPUT0": d["OUTPUT0"], "INPUT1": d["OUTPUT1"]})
    result = served.client.infer("nested", inputs_of(feeds))
    texts = {
        name: np.array([[str(number) for number in row] for row in value], object) for name, value in feeds.items()
    }
    strings = served.client.infer("texts", inputs_of(texts))
    for name in wanted:
        np.testing.assert_array_equal(result.as_numpy(name), wanted[name])
        np.testing.assert_array_equal(strings.as_numpy(name).astype(int), x[name])
    error = refusal(served, "texts", {name: np.full((1, 16), "no", object) for name in texts})
    failed = "in ensemble 'texts', step 1 ('simple_string'): the execution of model 'simple_string' failed: Cast"
    assert error.status() == "StatusCode.INTERNAL" and failed in str(error)
    error = refusal(served, "texts", {"INPUT0": texts["INPUT0"]})
    assert error.status() == "StatusCode.INVALID_ARGUMENT" and "expected 2 inputs but got 1" in str(error)


def test_over_http_and_in_shared_memory(served: Controlled) -> None:
    feeds, key = pairs(1), f"/ensembles-test-{uuid.uuid4().hex[:12]}"
    wanted = 2 * (feeds["INPUT0"] + feeds["INPUT1"])
    with triton_http.InferenceServerClient(served.server.http_url) as client:
        result = client.infer("simple_diamond", inputs_of(feeds, triton_http))
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), wanted)
    handle = shm.create_shared_memory_region("both", key, 192)
    try:
        served.client.register_system_shared_memory("both", key, 192)
        shm.set_shared_memory_region(handle, list(feeds.values()))
        inputs = [triton.InferInput(name, [1, 16], "INT32") for name in feeds]
        for place, tensor in enumerate(inputs):
            tensor.set_shared_memory("both", 64, 64 * place)
        output = triton.InferRequestedOutput("OUTPUT0")
        output.set_shared_memory("both", 64, 128)
        served.client.infer("simple_diamond", inputs, outputs=[output])
        np.testing.assert_array_equal(shm.get_contents_as_numpy(handle, np.int32, [1, 16], 128), wanted)
        output.set_shared_memory("both", 32, 128)
        with pytest.raises(InferenceServerException, match="should be at least 64 bytes"):
            served.client.infer("simple_diamond", inputs, outputs=[output])
        served.client.unregister_system_shared_memory("both")
    finally:
        shm.destroy_shared_memory_region(handle)


def test_a_late_request_is_refused_as_the_ensemble_says(served: Controlled) -> None:
    error = refusal(served, "strict", floats(), timeout=1)
    assert error.status() == "StatusCode.UNAVAILABLE"
    assert "in ensemble 'strict', step 0 ('one'): Request timeout expired" in str(error)
    assert served.added("strict") == 3


def test_traces_of_steps_name_their_ensemble(served: Controlled) -> None:

    settings = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "1"}
    served.client.update_trace_settings("simple_diamond", settings)
    served.client.infer("simple_diamond", inputs_of(pairs()))
    served.wait_until(lambda: served.temporary.exists() and "parent_id" in served.temporary.read_text())
    entries = json.loads(served.temporary.read_text())
    named = [entry for entry in entries if "model_name" in entry]
    assert [entry["model_name"] for entry in named] == ["simple_diamond", *["simple"] * 4]
    assert {entry["parent_id"] for entry in named[1:]} == {named[0]["id"]}
    assert len({entry["id"] for entry in named}) == 5
    instants = {
        entry["timestamps"][0]["name"] for entry in entries if entry["id"] == named[1]["id"] and entry not in named
    }
    assert {"REQUEST_START", "QUEUE_START", "COMPUTE_START", "COMPUTE_END", "REQUEST_END"} <= instants


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_loaded(served: Controlled, name: str) -> None:
    with pytest.raises(InferenceServerException) as raised:
        served.client.load_model(name)
    assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert BROKEN[name][1] in raised.value.message(), raised.value.message()
    reasons = [
        reason for (model, _), (state, reason) in served.index().items() if model == name and state == "UNAVAILABLE"
    ]
    assert any(BROKEN[name][1] in reason for reason in reasons)
    served.client.unload_model(name)
    assert served.client.is_server_ready()


def test_the_cache_forgets_answers_of_models_that_have_changed(served: Controlled) -> None:
    served.client.load_model("chain")
    assert served.added("chain") == served.added("chain") == 3
    stats = served.client.get_inference_statistics("chain").model_stats[0].inference_stats
    assert (stats.cache_hit.count, stats.cache_miss.count, stats.success.count) == (1, 1, 2)
    adder_models.write(served.repository, "one", 3)
    served.client.load_model("one")
    assert served.added("chain") == 5
    adder_models.write(served.repository, "one", 1)
    served.client.load_model("one")
    assert served.added("chain") == 3


def test_counters_of_an_ensemble_go_on_when_a_model_is_loaded_again_and_not_when_itself_is(served: Controlled) -> None:
    outer = served.repository / "outer" / "config.pbtxt"
    ensemble_configs.write(served.repository, "outer", config_of(X, Y, [("strict", "x=x", "y=y")]))
    served.client.load_model("outer")

    def counts() -> list[tuple[int, int]]:
        found = [served.client.get_inference_statistics(name).model_stats[0] for name in ("one", "strict", "outer")]
        return [(each.inference_stats.success.count, each.inference_count) for each in found]

    before = counts()
    assert [served.added("outer") for _ in range(3)] == [3] * 3
    started = [(count + 3, rows + 3) for count, rows in before]
    assert counts() == started
    adder_models.write(served.repository, "one", 3)
    served.client.load_model("one")
    assert counts() == [(0, 0), *started[1:]]
    assert served.added("outer") == 5
    assert counts() == [(1, 1), *((count + 1, rows + 1) for count, rows in started[1:])]
    adder_models.write(served.repository, "one", 1)
    served.client.load_model("one")
    assert served.added("outer") == 3
    assert counts() == [(1, 1), *((count + 2, rows + 2) for count, rows in started[1:])]
    outer.write_text(outer.read_text() + "# changed\n")
    served.client.load_model("outer")
    assert counts() == [(1, 1), (started[1][0] + 2, started[1][1] + 2), (0, 0)]
    lines = served.server.log.read_text()
    assert "model strict, version 1: the previous files" not in lines
    served.client.unload_model("outer")


class Stream(threading.Thread):
    """Asks an ensemble as fast as it answers; notes what it adds, or the status."""

    def __init__(self, served: Controlled, name: str) -> None:
        super().__init__()
        self._served, self._name = served, name
        self.seen: list[float | str] = []
        self.stopping = False

    def run(self) -> None:
        while not self.stopping:
            try:
                self.seen.append(self._served.added(self._name))
            except InferenceServerException as error:
                self.seen.append(str(error.status()))


def streams_of(served: Controlled, name: str) -> list[Stream]:
    streams = [Stream(served, name) for _ in range(3)]
    for stream in streams:
        stream.start()
    served.wait_until(lambda: all(len(stream.seen) > 5 for stream in streams))
    return streams


def end(streams: list[Stream]) -> set[float | str]:
    for stream in streams:
        stream.stopping = True
    for stream in streams:
        stream.join(TIMEOUT_S)
        assert not stream.is_alive()
    return {seen for stream in streams for seen in stream.seen}


def test_a_model_that_goes_takes_its_ensembles_along_until_it_is_back(served: Controlled) -> None:
    streams = streams_of(served, "strict")
    served.client.unload_model("two")
    served.wait_until(lambda: served.state("strict")[1].startswith("unloaded: "))
    assert served.state("strict")[1] == "unloaded: ensemble strict contains models that are not available: two"
    assert not served.client.is_model_ready("strict") and served.client.is_server_ready()
    assert end(streams) == {3, "StatusCode.UNAVAILABLE"}  # no wrong answer, and nothing else that fails
    error = refusal(served, "strict", floats())
    assert "is not at ready state: unloaded: ensemble strict contains models" in str(error)
    served.client.load_model("two")
    assert served.client.is_model_ready("strict") and served.added("strict") == 3


def test_a_killed_worker_in_the_middle_gives_no_wrong_answer(served: Controlled) -> None:
    streams = streams_of(served, "strict")
    os.kill(served.server.pids()["worker"][0], signal.SIGKILL)
    counts = [len(stream.seen) for stream in streams]
    served.wait_until(lambda: all(len(stream.seen) > count + 20 for stream, count in zip(streams, counts, strict=True)))
    assert 3 in (seen := end(streams)) and seen <= {3, "StatusCode.UNAVAILABLE"}
    with urllib.request.urlopen(served.server.metrics_url, timeout=TIMEOUT_S) as page:
        assert "\ngangway_request_slots_in_use 0\n" in page.read().decode()


def test_what_was_loaded_along_is_unloaded_along_if_so_wished(served: Controlled) -> None:
    served.client.unload_model("texts")
    assert served.client.is_model_ready("simple_identity")
    served.client.load_model("texts")
    served.client.load_model("simple_string")  # asked for by its name: it stays
    served.client.unload_model("texts", unload_dependents=True)
    assert not served.client.is_model_ready("simple_identity") and served.client.is_model_ready("simple_string")
    served.client.unload_model("nested", unload_dependents=True)
    assert not served.client.is_model_ready("simple") and not served.client.is_model_ready("simple_diamond")
    assert served.client.is_model_ready("simple_ensemble") and served.client.is_server_ready()
