"""Requests that a real server joins to batches: everybody gets his own rows, and they are counted as Triton counts."""

import queue
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm
from tritonclient.utils import InferenceServerException

from gangway.artifact.cache import Cache
from gangway.clients.connection import SERVICE
from gangway.clients.inputs import outputs_of
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from gangway.protos import grpc_service_pb2 as pb
from gangway.zoo import write_model
from testing.live_server import LiveServer, live_server
from testing.waiting import until
from tests.conftest import CompiledZoo
from tests.helpers import onnx_text
from tests.helpers.ensemble_configs import config_of
from tests.helpers.ensemble_configs import write as write_ensemble
from tests.helpers.onnx_networks import FOREIGN, SYMBOLIC, Array
from tests.helpers.scraped_metrics import Scraped
from tests.helpers.served import inputs_of
from tests.helpers.stopped_workers import stopped_workers
from tests.helpers.ways import by_json, request_of

TIMEOUT_S = 60
NEVER_US = 3_600_000_000  # who waits so long for company is not there when the tests end
FEW_US = 20_000
MAX_ROWS = 16
OFF = 'parameters { key: "batching" value { string_value: "off" } }'
WARM_UP = 'model_warmup { name: "w" batch_size: 2 count: 3 inputs { key: "input" value { data_type: TYPE_FP32 ' \
          "dims: [ 16 ] zero_data: true } } }"  # fmt: skip
FOURS = f"dynamic_batching {{ preferred_batch_size: 4 max_queue_delay_microseconds: {NEVER_US} }}"
CONFIGS = {  # of mlp: 16 numbers in, 10 out
    "joined": "dynamic_batching { }",
    "automatic": "",
    "fours": f"{FOURS} {WARM_UP}",
    "brief": f"dynamic_batching {{ preferred_batch_size: 4 max_queue_delay_microseconds: {FEW_US} }}",
    "alone": f"dynamic_batching {{ }} {OFF}",
    "ordered": "dynamic_batching { preserve_ordering: true }",
    "cached": f"{FOURS} response_cache {{ enable: true }}",
}
IMAGE_BYTES = 3 * 224 * 224 * 4
WHOLE = {  # by onnxruntime
    "strings": "max_batch_size: 16 dynamic_batching { }",
    "gather": "max_batch_size: 16 dynamic_batching { }",
    "running_sum": f"max_batch_size: 16 dynamic_batching {{ max_queue_delay_microseconds: {FEW_US} }}",
}
TABLE = np.arange(40, dtype=np.float32).reshape(10, 4)
CHAIN = config_of("IN:FP32:16", "OUT:FP32:10", [("fours", "input=IN", "output=OUT")])


@dataclass(frozen=True)
class Served:
    server: LiveServer

    def ask(self, model: str, feeds: dict[str, Array], **options: Any) -> pb.ModelInferResponse:
        """Infer over a connection of its own."""
        with triton.InferenceServerClient(self.server.url) as client:
            result = client.infer(model, inputs_of(feeds), client_timeout=TIMEOUT_S, **options)
            answer: pb.ModelInferResponse = result.get_response()
            return answer

    def infer(self, model: str, x: Array, **options: Any) -> Array:
        return floats_of(self.ask(model, {"input": x}, **options), len(x))

    def infer_json(self, model: str, x: Array) -> Array:
        return outputs_of(by_json(self.server, request_of(model, {"input": x})))["output"]

    def statistics(self, model: str) -> Any:
        with triton.InferenceServerClient(self.server.url) as client:
            return client.get_inference_statistics(model).model_stats[0]

    def counts(self, model: str) -> tuple[int, int, int]:
        """Requests, rows, executions."""
        stats = self.statistics(model)
        return stats.inference_stats.success.count, stats.inference_count, stats.execution_count

    def wait_for(self, requests: int) -> None:
        """Return when so many requests are there and none of them runs."""
        until(lambda: self.server.waiting_slots() == self.server.busy_slots() == requests)


def floats_of(answer: pb.ModelInferResponse, rows: int) -> Array:
    return np.frombuffer(answer.raw_output_contents[0], np.float32).reshape(rows, -1)


def images(rows: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal((rows, 16), np.float32)


def since(after: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(now - then for now, then in zip(after, before, strict=True))


def fill(repository: Path, zoo: CompiledZoo, cache_dir: Path) -> Path:
    for name, config in CONFIGS.items():
        zoo.link(repository, name, "mlp", f"max_batch_size: {MAX_ROWS} {config}")
    write_model(repository, "simple_identity").rename(repository / "strings")
    FOREIGN["gather"]().save(repository / "gather" / "1" / "model.onnx")
    SYMBOLIC["running_sum"]().save(repository / "running_sum" / "1" / "model.onnx")
    # The zeros of a trial have no quotient, which is no reason not to serve it.
    nodes = "y = Gather(table, tokens) q = Div(tokens, tokens)"
    tokens = f"(int64[N, 3] tokens) => (float[N, 3, 4] y, int64[N, 3] q) {{ {nodes} }}"
    onnx_text.save(repository, "tokens", tokens, table=TABLE)
    for name, config in ({**WHOLE, "tokens": f"max_batch_size: {MAX_ROWS} {FOURS}"}).items():
        (repository / name / "config.pbtxt").write_text(config)
        compile_model(repository / name / "1" / "model.onnx", name, Cache(cache_dir), detect(), lambda *_: None)
    zoo.link(repository, "images", "mobilenetv2", f"max_batch_size: 4 {FOURS}")
    write_ensemble(repository, "chain", CHAIN)
    return repository


@pytest.fixture(scope="module")
def repository(compiled_zoo: CompiledZoo, model_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fill(tmp_path_factory.mktemp("batching") / "models", compiled_zoo, model_cache)


@pytest.fixture(scope="module")
def served(repository: Path, model_cache: Path) -> Iterator[Served]:
    flags = [f"--cache-dir={model_cache}", "--max-shapes=0", "--cache-config=local,size=1048576"]
    with live_server(repository, flags) as server:
        yield Served(server)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(48) as made:
        yield made


def results(futures: Sequence["Future[Any]"]) -> list[Any]:
    return [future.result(TIMEOUT_S) for future in futures]


@pytest.mark.parametrize("model", ["joined", "automatic"])
def test_everybody_gets_his_own_rows(served: Served, pool: ThreadPoolExecutor, model: str) -> None:
    """Of all sizes, over both protocols, while others come and go."""
    requests = [images(MAX_ROWS if seed == 20 else 1 + seed % 5, seed) for seed in range(40)]
    expected = [served.infer("alone", x) for x in requests]
    before = served.counts(model)
    with stopped_workers(served.server):
        ways: list[Callable[..., Array]] = [served.infer, served.infer_json]
        running = [pool.submit(ways[seed % 2], model, x) for seed, x in enumerate(requests)]
        until(lambda: served.server.busy_slots() == len(requests))
    for answer, own in zip(results(running), expected, strict=True):
        np.testing.assert_allclose(answer, own, rtol=1e-5, atol=1e-6)
    answered, rows, executions = since(served.counts(model), before)
    assert (answered, rows) == (len(requests), sum(map(len, requests)))
    assert executions <= len(requests)
    if model == "joined":  # what is not configured joins only where a profile says that it pays
        assert executions < len(requests) / 2


def test_a_batch_of_the_preferred_size_begins_at_once_and_no_smaller_one(
    served: Served, pool: ThreadPoolExecutor
) -> None:
    requests = [images(rows, seed) for seed, rows in enumerate((1, 2, 1))]
    before, stats = served.counts("fours"), served.statistics("fours")
    running = [pool.submit(served.ask, "fours", {"input": x}, parameters={"gangway_stats": True}) for x in requests[:2]]
    served.wait_for(2)
    assert not any(future.done() for future in running)
    running.append(pool.submit(served.ask, "fours", {"input": requests[2]}, parameters={"gangway_stats": True}))
    for x, answer in zip(requests, results(running), strict=True):
        np.testing.assert_allclose(floats_of(answer, len(x)), served.infer("alone", x), rtol=1e-5, atol=1e-6)
        assert answer.parameters["batch_rows"].int64_param == 4
    assert since(served.counts("fours"), before) == (3, 4, 1)
    own = served.statistics("fours")
    waited_ns = [future.queue.ns for future in (own.inference_stats, stats.inference_stats)]
    assert waited_ns[0] > waited_ns[1]
    for part in ("compute_input", "compute_infer", "compute_output"):
        assert getattr(own.inference_stats, part).count - getattr(stats.inference_stats, part).count == 3


def test_batches_are_counted_as_triton_counts_them(served: Served, pool: ThreadPoolExecutor) -> None:
    def batches() -> dict[int, int]:
        return {batch.batch_size: batch.compute_infer.count for batch in served.statistics("fours").batch_stats}

    names = ("gangway_batch_rows_count", "gangway_batch_rows_sum", "nv_inference_exec_count", "nv_inference_count")
    scraped = Scraped(served.server)

    def metrics() -> tuple[int, ...]:
        scrape = scraped.scrape()
        return tuple(int(scrape(name, model="fours")) for name in names)

    before, then = batches(), metrics()
    for _ in range(2):
        results([pool.submit(served.infer, "fours", images(1, seed)) for seed in range(4)])
    after = batches()
    assert after[4] - before.get(4, 0) == 2
    assert {size: count for size, count in after.items() if size != 4} == {
        size: count for size, count in before.items() if size != 4
    }
    assert since(metrics(), then) == (2, 8, 2, 8)
    scrape, labels = scraped.scrape(), {"model": "fours", "version": "1"}
    assert scrape("gangway_batch_rows_bucket", le="4.0", **labels) - scrape(
        "gangway_batch_rows_bucket", le="2.0", **labels
    ) == scrape("gangway_batch_rows_count", **labels)
    assert scrape("gangway_batch_rows_bucket", le="1024.0", **labels) == scrape("gangway_batch_rows_count", **labels)


def test_nobody_waits_longer_than_the_delay(served: Served) -> None:
    begin_s = time.monotonic()
    served.infer("brief", images(1, 0))
    assert FEW_US / 1e6 <= time.monotonic() - begin_s < TIMEOUT_S


def test_a_batch_as_it_is_does_not_wait_for_the_delay(served: Served) -> None:
    served.infer("fours", images(4, 0))  # others would wait for an hour


def test_who_cancels_leaves_the_batch_that_is_being_formed(served: Served, pool: ThreadPoolExecutor) -> None:
    request = pb.ModelInferRequest(model_name="fours", raw_input_contents=[images(1, 9).tobytes()])
    request.inputs.add(name="input", datatype="FP32", shape=[1, 16])
    before = served.counts("fours")
    with grpc.insecure_channel(served.server.url) as channel:
        call = channel.unary_unary(f"{SERVICE}ModelInfer").future(request.SerializeToString())
        served.wait_for(1)
        call.cancel()
        served.wait_for(0)
    running = [pool.submit(served.infer, "fours", images(1, seed)) for seed in range(3)]
    served.wait_for(3)
    running.append(pool.submit(served.infer, "fours", images(1, 3)))
    for seed, answer in enumerate(results(running)):
        np.testing.assert_allclose(answer, served.infer("alone", images(1, seed)), rtol=1e-5, atol=1e-6)
    assert since(served.counts("fours"), before) == (4, 4, 1)


def test_measuring_and_warming_up_wait_for_nobody(served: Served) -> None:
    """A model is ready although its configuration has requests wait for an hour."""
    assert Scraped(served.server).scrape()("nv_model_load_duration_secs", model="fours") < TIMEOUT_S
    assert served.server.waiting_slots() == 0


def test_a_model_without_batches(served: Served, pool: ThreadPoolExecutor) -> None:
    before = served.counts("alone")
    with stopped_workers(served.server):
        running = [pool.submit(served.infer, "alone", images(2, seed)) for seed in range(12)]
        until(lambda: served.server.busy_slots() == 12)
    results(running)
    assert since(served.counts("alone"), before) == (12, 24, 12)
    assert [batch.batch_size for batch in served.statistics("alone").batch_stats if batch.batch_size == 24] == []


def test_what_clients_and_the_log_are_told(served: Served) -> None:
    with triton.InferenceServerClient(served.server.url) as client:
        for model, told in (("alone", "off"), ("fours", "auto"), ("automatic", "auto")):
            config = client.get_model_config(model).config
            assert config.parameters["batching"].string_value == told
            assert config.HasField("dynamic_batching")  # as Triton completes a model without a configuration
    lines = {line.split()[0]: line for line in served.server.log.read_text().splitlines() if line.strip()}
    assert "up to 16" in lines["joined"] and "up to 16" in lines["automatic"]
    assert "4, waits" in lines["fours"]
    assert "up to" not in lines["alone"] and "up to" not in lines["chain"]


def test_answers_from_the_cache_join_no_batch(served: Served, pool: ThreadPoolExecutor) -> None:
    requests = [images(1, seed) for seed in range(4)]
    first = results([pool.submit(served.infer, "cached", x) for x in requests])
    for x, answer in zip(requests, first, strict=True):
        np.testing.assert_array_equal(served.infer("cached", x), answer)
    assert served.counts("cached") == (8, 4, 1)
    stats = served.statistics("cached").inference_stats
    assert (stats.cache_hit.count, stats.cache_miss.count, stats.compute_infer.count) == (4, 4, 4)


def test_steps_of_ensembles_are_joined_with_other_requests(served: Served, pool: ThreadPoolExecutor) -> None:
    before, chains = served.counts("fours"), served.counts("chain")
    x = images(3, 1)
    of_chain = pool.submit(served.ask, "chain", {"IN": x})
    served.wait_for(1)
    beside = pool.submit(served.infer, "fours", images(1, 2))
    np.testing.assert_allclose(floats_of(of_chain.result(TIMEOUT_S), 3), served.infer("alone", x), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(beside.result(TIMEOUT_S), served.infer("alone", images(1, 2)), rtol=1e-5, atol=1e-6)
    assert since(served.counts("fours"), before) == (2, 4, 1)
    assert since(served.counts("chain"), chains) == (1, 3, 1)


def test_answers_of_a_stream_keep_the_order_of_its_requests(served: Served) -> None:
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
    sizes = [1 + seed * 7 % MAX_ROWS for seed in range(32)]
    with triton.InferenceServerClient(served.server.url) as client:
        client.start_stream(lambda result, error: answers.put(error or result))
        for number, rows in enumerate(sizes):
            tensor = triton.InferInput("input", [rows, 16], "FP32")
            tensor.set_data_from_numpy(images(rows, number))
            client.async_stream_infer("ordered", [tensor], request_id=str(number))
        got = [answers.get(timeout=TIMEOUT_S) for _ in sizes]
    assert [int(answer.get_response().id) for answer in got] == list(range(len(sizes)))
    for number, (rows, answer) in enumerate(zip(sizes, got, strict=True)):
        expected = served.infer("alone", images(rows, number))
        np.testing.assert_allclose(answer.as_numpy("output"), expected, rtol=1e-5, atol=1e-6)


def test_tensors_in_clients_memory_are_joined(served: Served, pool: ThreadPoolExecutor) -> None:
    """Two requests of two images make a batch, whether their tensors are copied or used in place."""
    size, row_bytes = 2 * IMAGE_BYTES, 1000 * 4
    pictures = np.random.default_rng(3).standard_normal((4, 3, 224, 224), np.float32)
    tensor = triton.InferInput("input", [4, 3, 224, 224], "FP32")
    tensor.set_data_from_numpy(pictures)
    with triton.InferenceServerClient(served.server.url) as client, ExitStack() as stack:
        expected = client.infer("images", [tensor]).as_numpy("output")
        handles = {}
        for number in range(2):
            name = f"batching-test-{uuid.uuid4().hex[:12]}"
            handles[name] = shm.create_shared_memory_region(name, f"/{name}", size + 2 * row_bytes)
            stack.callback(shm.destroy_shared_memory_region, handles[name])
            shm.set_shared_memory_region(handles[name], [pictures[2 * number : 2 * number + 2]])
            client.register_system_shared_memory(name, f"/{name}", size + 2 * row_bytes)
            stack.callback(client.unregister_system_shared_memory, name)

        def ask(name: str) -> tuple[int, int]:
            """Tensors in place, rows of the batch."""
            given, wanted = triton.InferInput("input", [2, 3, 224, 224], "FP32"), triton.InferRequestedOutput("output")
            given.set_shared_memory(name, size)
            wanted.set_shared_memory(name, 2 * row_bytes, size)
            options = {"outputs": [wanted], "parameters": {"gangway_stats": True}, "client_timeout": TIMEOUT_S}
            parameters = client.infer("images", [given], **options).get_response().parameters
            return parameters["in_place"].int64_param, parameters["batch_rows"].int64_param

        end = time.monotonic() + TIMEOUT_S
        answers: list[tuple[int, int]] = []
        while answers != [(2, 4)] * 2:  # the workers map regions in the background
            assert time.monotonic() < end, answers
            answers = results([pool.submit(ask, name) for name in handles])
            assert all(rows == 4 for _, rows in answers)
            own = [shm.get_contents_as_numpy(handle, np.float32, [2, 1000], size) for handle in handles.values()]
            np.testing.assert_allclose(np.concatenate(own), expected, rtol=1e-4, atol=1e-4)


def test_strings_are_joined(served: Served, pool: ThreadPoolExecutor) -> None:
    texts = [
        np.array(
            [[f"{row} {column} {'x' * seed}".encode() for column in range(16)] for row in range(1 + seed % 3)], object
        )
        for seed in range(16)
    ]
    before = served.counts("strings")
    with stopped_workers(served.server):
        running = [pool.submit(served.ask, "strings", {"INPUT0": text}) for text in texts]
        until(lambda: served.server.busy_slots() == len(texts))
    for text, answer in zip(texts, results(running), strict=True):
        assert list(answer.outputs[0].shape) == list(text.shape)
        assert answer.raw_output_contents[0] == b"".join(len(t).to_bytes(4, "little") + t for t in text.ravel())
    answered, _, executions = since(served.counts("strings"), before)
    assert answered == len(texts) and executions < len(texts) / 2


def test_only_requests_of_equal_shapes_are_joined(served: Served, pool: ThreadPoolExecutor) -> None:
    network = SYMBOLIC["running_sum"]()
    feeds = []
    for seed in range(12):
        rows, length = 1 + seed % 2, 2 + seed % 3
        random = np.random.default_rng(seed)
        feeds.append(
            {
                name: random.standard_normal((rows, length, *map(int, dims[2:]))).astype(np.float32)
                for name, (_, dims) in network.inputs.items()
            }
        )
    before = served.counts("running_sum")
    with stopped_workers(served.server):
        running = [pool.submit(partial(served.ask, "running_sum", feed)) for feed in feeds]
        until(lambda: served.server.busy_slots() == len(feeds))
    for feed, answer in zip(feeds, results(running), strict=True):
        expected = np.cumsum(feed["x"], axis=1) + feed["z"]
        np.testing.assert_allclose(floats_of(answer, len(expected)), expected.reshape(len(expected), -1), rtol=1e-5)
    answered, _, executions = since(served.counts("running_sum"), before)
    assert answered == len(feeds) and 3 <= executions < len(feeds)


def test_a_request_that_fails_costs_no_other_one(served: Served, pool: ThreadPoolExecutor) -> None:
    """One of them asks for what the model does not have."""
    good = [np.full((1, 2), seed % 10) for seed in range(8)]
    with stopped_workers(served.server):
        running = [pool.submit(served.ask, "gather", {"index": index}) for index in good]
        bad = pool.submit(served.ask, "gather", {"index": np.full((1, 2), 99)})
        until(lambda: served.server.busy_slots() == len(good) + 1)
    table = np.arange(40, dtype=np.float32).reshape(10, 4)
    for index, answer in zip(good, results(running), strict=True):
        np.testing.assert_array_equal(floats_of(answer, 1), table[index].reshape(1, -1))
    with pytest.raises(InferenceServerException, match=r"INVALID_ARGUMENT.*Gather: .* idx=99 must be"):
        bad.result(TIMEOUT_S)


def test_a_number_that_kernels_refuse_costs_no_other_request(served: Served, pool: ThreadPoolExecutor) -> None:
    """Four rows are a batch; one of them asks for what the table does not have."""
    before = served.counts("tokens")
    bad, *good = [np.array([[place, 1, -10]]) for place in (-11, 2, 9, -1)]
    refused = pool.submit(served.ask, "tokens", {"tokens": bad})
    running = [pool.submit(served.ask, "tokens", {"tokens": tokens}) for tokens in good]
    for tokens, answer in zip(good, results(running), strict=True):
        np.testing.assert_array_equal(floats_of(answer, 1), TABLE[tokens].reshape(1, -1))
    with pytest.raises(InferenceServerException, match=r"INVALID_ARGUMENT.*model 'tokens': Gather: .* idx=-11 must be"):
        refused.result(TIMEOUT_S)
    assert since(served.counts("tokens"), before) == (3, 3, 1)


def test_the_server_can_do_without(repository: Path, model_cache: Path, pool: ThreadPoolExecutor) -> None:
    flags = [f"--cache-dir={model_cache}", "--max-shapes=0", "--batching=off", "--model-control-mode=explicit"]
    with live_server(repository, [*flags, "--load-model=joined", "--load-model=fours"]) as server:
        served = Served(server)
        with stopped_workers(server):
            running = [pool.submit(served.infer, "joined", images(2, seed)) for seed in range(12)]
            until(lambda: server.busy_slots() == 12)
        results(running)
        assert served.counts("joined") == (12, 24, 12)
        served.infer("fours", images(1, 0))  # waits for nobody
        with triton.InferenceServerClient(server.url) as client:
            assert client.get_model_config("joined").config.parameters["batching"].string_value == "off"


def test_requests_to_several_front_ends_make_one_batch(
    repository: Path, model_cache: Path, pool: ThreadPoolExecutor
) -> None:
    """Each HTTP request has a connection of its own, which any front end may get."""
    rounds = 5
    flags = [f"--cache-dir={model_cache}", "--front-ends=2", "--model-control-mode=explicit", "--load-model=fours"]
    with live_server(repository, flags) as server:
        served = Served(server)
        before = served.counts("fours")
        for round_ in range(rounds):
            requests = [images(1, 4 * round_ + number) for number in range(4)]
            answers = results([pool.submit(served.infer_json, "fours", x) for x in requests])
            alone = served.infer("fours", np.concatenate(requests))
            np.testing.assert_allclose(np.concatenate(answers), alone, rtol=1e-5, atol=1e-6)
        assert since(served.counts("fours"), before) == (5 * rounds, 8 * rounds, 2 * rounds)
        batches = {batch.batch_size: batch.compute_infer.count for batch in served.statistics("fours").batch_stats}
        assert batches == {4: 2 * rounds}
