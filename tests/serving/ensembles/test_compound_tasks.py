"""Ensembles of a real server whose steps run by a schedule: right answers, and what makes ordinary requests of them."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tritonclient.grpc as triton

from gangway.artifact.cache import Cache
from gangway.artifact.profile import whole_machine_id
from gangway.artifact.reader import read_manifest
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from gangway.executor.control import COMPOUND_RESULTS
from gangway.executor.launch import available_cores
from gangway.scheduler.stages.ir import StreamSegment
from gangway.scheduler.stages.schedule_file import StoredSchedule, write_schedule
from testing.live_server import live_server
from testing.waiting import until
from tests.helpers import ensemble_configs, onnx_text
from tests.helpers.ensemble_configs import config_of
from tests.helpers.scraped_metrics import TIMEOUT_S, Scraped

pytestmark = pytest.mark.long

CHANNELS, SIZE = 32, 128
DEPTHS = {"deep": 24, "wide": 24, "quick": 1, "small": 1}
SMALL = 8  # the image of `small`, so that nobody waits for its bytes
TENSOR = f"{CHANNELS},{SIZE},{SIZE}"
LAST = f"{CHANNELS},1,1"
STEPS = [("deep", "x=x", "y=one"), ("wide", "x=x", "y=two")]
BOTH = config_of(f"x:FP32:{TENSOR}", f"one:FP32:{LAST} two:FP32:{LAST}", STEPS)
URGENT_US = 30_000
MOMENTS = {"member_missing", "cores_busy"}  # of a busy machine, which makes some tasks ordinary requests
FEW = 5


def write_model(repository: Path, name: str, depth: int) -> None:
    """Convolutions, one after the other, and a mean over the image."""
    size = SMALL if name == "small" else SIZE
    nodes = f"{onnx_text.convolutions(depth)} y = GlobalAveragePool(t)"
    graph = f"(float[N, {CHANNELS}, {size}, {size}] x) => (float[N, {CHANNELS}, 1, 1] y) {{ {nodes} }}"
    shapes = {f"w{number}": (CHANNELS, CHANNELS, 3, 3) for number in range(depth)}
    onnx_text.save(repository, name, graph, **onnx_text.weights_of(sum(name.encode()), shapes, 1 / (3 * CHANNELS**0.5)))


@dataclass(frozen=True)
class Served(Scraped):
    client: triton.InferenceServerClient
    repository: Path
    tasks: list[int]  # one number: how many compound tasks there were, each of which is counted once

    def counts(self) -> dict[str, float]:
        scrape = self.scrape()
        return {result: scrape("gangway_compound_tasks_total", result=result) for result in COMPOUND_RESULTS}

    @contextmanager
    def counted(self, tasks: int) -> Iterator[dict[str, float]]:
        """Yield what is to have the growth of the counts in the block, by results, once so many tasks are counted.

        The scheduler writes them twice a second.
        """
        until(lambda: sum(self.counts().values()) == self.tasks[0])
        before, grown = self.counts(), dict[str, float]()
        self.tasks[0] += tasks
        yield grown
        until(lambda: sum(self.counts().values()) == self.tasks[0])
        grown |= {result: count - before[result] for result, count in self.counts().items() if count != before[result]}

    def ask(self, model: str, rows: int = 1, outputs: tuple[str, ...] = (), **options: Any) -> triton.InferResult:
        return self.client.infer(model, given(rows), outputs=wanted(outputs), client_timeout=TIMEOUT_S, **options)

    def begin(self, model: str = "both", **options: Any) -> "Pending":
        """Ask, and return when some step of it is being computed."""
        pending = Pending()
        pending.call = self.client.async_infer(model, given(), pending.answered, **options)
        until(lambda: self.server.busy_slots(running=True) >= 1)
        return pending

    def await_schedule(self, before: float) -> None:
        """Ask until more tasks have run by their schedule."""

        def by_schedule() -> bool:
            self.assert_right(self.ask("both"))
            return self.counts()["by_schedule"] > before

        until(by_schedule)

    def assert_right(self, answer: triton.InferResult, rows: int = 1) -> None:
        for model, output in (("deep", "one"), ("wide", "two")):
            path = self.repository / model / "1" / "model.onnx"
            (expected,) = onnxruntime.InferenceSession(path).run(None, {"x": image(rows)})
            np.testing.assert_allclose(answer.as_numpy(output), expected, rtol=1e-3, atol=1e-5)


def assert_by_schedule(grown: dict[str, float], tasks: int, *others: str) -> None:
    """So many tasks have run by their schedule, but for those that came at a moment when the machine was busy."""
    assert sum(grown.values()) == tasks
    assert grown["by_schedule"] > 0 and grown.keys() <= {"by_schedule", *MOMENTS, *others}


class Pending:
    """A request that has been sent."""

    call: Any

    def __init__(self) -> None:
        self._done = threading.Event()
        self.result: Any = None

    def answered(self, result: Any, error: Any) -> None:
        self.result = error or result
        self._done.set()

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def wait(self) -> Any:
        assert self._done.wait(TIMEOUT_S)
        return self.result


def image(rows: int = 1, size: int = SIZE) -> Any:
    return np.random.default_rng(1).standard_normal((rows, CHANNELS, size, size), np.float32)


def given(rows: int = 1, size: int = SIZE) -> list[triton.InferInput]:
    tensor = triton.InferInput("x", [rows, CHANNELS, size, size], "FP32")
    tensor.set_data_from_numpy(image(rows, size))
    return [tensor]


def wanted(names: tuple[str, ...]) -> list[triton.InferRequestedOutput] | None:
    return [triton.InferRequestedOutput(name) for name in names] or None


def store_schedule(cache_dir: Path, keys: dict[str, str], cores: int, names: tuple[str, ...]) -> Path:
    """Both side by side in part, then one after the other."""
    manifests = [read_manifest(cache_dir / keys[name]) for name in names]
    first, second = (len(manifest.layers) for manifest in manifests)
    stages = (
        (StreamSegment(0, 0, first // 2, 1), StreamSegment(1, 0, second // 3, 1)),
        (StreamSegment(1, second // 3, second, cores),),
        (StreamSegment(0, first // 2, first, cores),),
    )
    pointers = ((first // 2, first // 2), (second // 3, second))
    machine = whole_machine_id(manifests[0].target.name)
    found = StoredSchedule(
        tuple(keys[name] for name in names), names, (first, second), machine, cores, "random", pointers, stages,
        60e3, 80e3, 90e3, 1, 1.0,
    )  # fmt: skip
    return write_schedule(cache_dir, found)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository, cache = tmp_path_factory.mktemp("models"), Cache(tmp_path_factory.mktemp("cache"))
    keys = {}
    for name, depth in DEPTHS.items():
        write_model(repository, name, depth)
        path = repository / name / "1" / "model.onnx"
        keys[name] = compile_model(path, name, cache, detect(), lambda *_: None).manifest.key
    cores = len(available_cores())
    store_schedule(cache.root, keys, cores, ("deep", "wide"))
    store_schedule(cache.root, keys, cores + 1, ("wide", "deep"))
    damaged = store_schedule(cache.root, keys, cores, ("deep", "quick"))
    damaged.write_bytes(damaged.read_bytes()[:-9])
    ensemble_configs.write(repository, "both", BOTH)
    reversed_steps = config_of(f"x:FP32:{TENSOR}", f"one:FP32:{LAST} two:FP32:{LAST}", STEPS[::-1])
    ensemble_configs.write(repository, "other_cores", reversed_steps)
    quick = config_of(f"x:FP32:{TENSOR}", f"one:FP32:{LAST} two:FP32:{LAST}", [STEPS[0], ("quick", "x=x", "y=two")])
    ensemble_configs.write(repository, "damaged", quick)
    flags = [f"--cache-dir={cache.root}", "--metrics-interval-ms=1", "--model-control-mode=explicit", "--load-model=*"]
    with live_server(repository, flags) as server, triton.InferenceServerClient(server.url) as client:
        yield Served(server, client, repository, [0])
    assert server.process.returncode == 0


def test_answers_are_those_of_the_models(served: Served) -> None:
    with served.counted(FEW) as grown:
        for _ in range(FEW):
            answer = served.ask("both")
    assert_by_schedule(grown, FEW)
    served.assert_right(answer)
    for model, output in (("deep", "one"), ("wide", "two")):
        np.testing.assert_array_equal(answer.as_numpy(output), served.ask(model).as_numpy("y"))


def test_the_log_says_what_is_used_and_what_is_not(served: Served) -> None:
    lines = [line for line in served.server.log.read_text().splitlines() if "schedule" in line]
    assert sum("ensemble both, version 1: steps deep" in line and "run by a schedule" in line for line in lines) == 1
    cores = len(available_cores())
    other = [line for line in lines if "other_cores" in line]
    assert len(other) == 1 and f"it is made for {cores + 1} cores, and this server has {cores}" in other[0]
    assert sum("damaged schedule ignored" in line for line in lines) == 1


def test_what_is_no_whole_compound_task_runs_as_before(served: Served) -> None:
    with served.counted(FEW) as grown:
        served.assert_right(served.ask("both", rows=2), rows=2)
        assert served.ask("both", outputs=("two",)).as_numpy("one") is None
        for model in ("other_cores", "damaged"):
            assert served.ask(model).as_numpy("one") is not None
        for _ in range(FEW):
            served.ask("both")
    assert_by_schedule(grown, FEW)


def test_many_clients_take_turns(served: Served) -> None:
    pending = [Pending() for _ in range(12)]
    with served.counted(12) as grown:
        for each in pending:
            served.client.async_infer("both", given(), each.answered)
        for each in pending:
            served.assert_right(each.wait())
    assert_by_schedule(grown, 12)


@pytest.mark.parametrize("options", [{"priority": 1}, {"timeout": URGENT_US}], ids=["class", "target"])
def test_an_urgent_request_is_served_before_what_runs(served: Served, options: dict[str, int]) -> None:
    """While two clients ask for the ensemble again and again."""
    answered, asked, both, overtakes = threading.Event(), [0, 0], [], []

    def ask_on(client: int) -> None:
        while not answered.is_set():
            both.append(served.ask("both"))
            asked[client] += 1

    clients = [threading.Thread(target=ask_on, args=(number,)) for number in range(2)]
    with served.counted(0) as grown, triton.InferenceServerClient(served.server.url) as client:
        for thread in clients:
            thread.start()
        until(lambda: served.server.busy_slots(running=True) >= 1)
        for _ in range(10):
            ended = sum(asked)
            client.infer("small", given(size=SMALL), client_timeout=TIMEOUT_S, **options)
            overtakes.append(sum(asked) == ended)
        answered.set()
        for thread in clients:
            thread.join(TIMEOUT_S)
        served.tasks[0] += sum(asked)
    served.assert_right(both[-1])
    assert sum(overtakes) > len(overtakes) / 2, "otherwise each waits until an ensemble has ended"
    assert grown.get("target_at_risk", 0) >= 1


def test_a_client_that_has_gone_leaves_nothing(served: Served) -> None:
    with served.counted(1 + FEW) as grown:
        pending = served.begin()
        pending.call.cancel()
        pending.wait()
        until(lambda: not served.server.busy_slots())
        for _ in range(FEW):
            served.assert_right(served.ask("both"))
    assert_by_schedule(grown, 1 + FEW, "member_lost")


def test_an_ensemble_that_is_loaded_again_looks_again(served: Served) -> None:
    served.client.unload_model("both")
    served.client.load_model("both")
    with served.counted(FEW) as grown:
        for _ in range(FEW):
            served.assert_right(served.ask("both"))
    assert_by_schedule(grown, FEW)


def test_a_killed_worker(served: Served) -> None:
    pending = served.begin()
    os.kill(served.server.pids()["worker"][0], signal.SIGKILL)
    served.assert_right(pending.wait())
    served.await_schedule(served.counts()["by_schedule"] + 1)


def test_a_killed_scheduler_learns_the_schedules_again(served: Served) -> None:
    pending = served.begin()
    (scheduler,) = served.server.pids()["scheduler"]
    os.kill(scheduler, signal.SIGKILL)
    served.assert_right(pending.wait())
    until(lambda: served.counts()["by_schedule"] == 0)  # it counts from its start
    served.await_schedule(0)
