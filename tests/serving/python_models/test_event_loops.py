"""Requests to other models from coroutines, whichever loop and thread runs these; on one core, too."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from testing.waiting import until
from tests.helpers.python_models import ADD, SLOW, config_of, four, write
from tests.helpers.served import Served, serving

pytestmark = pytest.mark.long

ASKS = """
    def ask(self, name, x):
        inputs = [pb_utils.Tensor("x", x)]
        return pb_utils.InferenceRequest(model_name=name, inputs=inputs, requested_output_names=["y"])

    def check(self, response):
        if response.has_error():
            raise pb_utils.TritonModelException(response.error().message())
        return pb_utils.get_output_tensor_by_name(response, "y").as_numpy()

    async def one(self, x):
        return self.check(await self.ask("add", x).async_exec())

    async def ten(self, x):
        return sum(await asyncio.gather(*(self.one(x) for _ in range(10))))

    async def chain(self, x):
        for _ in range(3):
            x = await self.one(x)
            await asyncio.sleep(0.001)
        return x

    async def stream(self, x):
        responses = await self.ask("counts", x).async_exec(decoupled=True)
        return sum(self.check(each) for each in responses if each.output_tensors())

    async def stream_in_turn(self, x):
        responses = await self.ask("counts", x).async_exec(decoupled=True)
        return sum([self.check(each) async for each in responses if each.output_tensors()])

    async def blocking(self, x):
        return self.check(self.ask("add", x).exec())

    async def in_threads(self, x):
        first = await asyncio.to_thread(self.ask("add", x).exec)
        second = await asyncio.get_running_loop().run_in_executor(None, self.ask("add", x).exec)
        return self.check(first) + self.check(second)

    async def forgotten(self, x):
        self.ask("add", x).async_exec()
        return x

    async def timed(self, x):
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.ask("slow", x).async_exec(), 0.02)
        return await self.one(x)

    def answered(self, y):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", y)])]
"""
HEAD = """import asyncio
import contextlib
import threading

import numpy as np
import triton_python_backend_utils as pb_utils


"""
# What a coroutine with four times the same number answers.
COROUTINES = {
    "one": lambda x: x + 1,
    "ten": lambda x: 10 * (x + 1),
    "chain": lambda x: x + 3,
    "stream": lambda x: 3 * x + 3,
    "stream_in_turn": lambda x: 3 * x + 3,
    "blocking": lambda x: x + 1,
    "in_threads": lambda x: 2 * (x + 1),
    "forgotten": lambda x: x,
    "timed": lambda x: x + 1,
}
GETS = """
        way = pb_utils.get_input_tensor_by_name(requests[0], "way").as_numpy()[0].decode()
        x = pb_utils.get_input_tensor_by_name(requests[0], "x").as_numpy()
        work = getattr(self, way)(x)
"""
EXECUTES = "\n    def execute(self, requests):" + GETS
LOOPS = {
    "coroutine": "\n    async def execute(self, requests):" + GETS + "        return self.answered(await work)\n",
    "run": EXECUTES + "        return self.answered(asyncio.run(work))\n",
    "uvloop": EXECUTES + "        import uvloop\n        return self.answered(uvloop.run(work))\n",
    "own": """
    def initialize(self, args):
        self.loop = asyncio.new_event_loop()
"""
    + EXECUTES
    + "        return self.answered(self.loop.run_until_complete(work))\n",
    "current": EXECUTES
    + """
        async def both():
            return await work
        try:
            loop = asyncio.get_event_loop()
        except RuntimeError:
            loop = asyncio.new_event_loop()
            asyncio.set_event_loop(loop)
        return self.answered(loop.run_until_complete(both()))
""",
    "thread": """
    def initialize(self, args):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
"""
    + EXECUTES
    + "        return self.answered(asyncio.run_coroutine_threadsafe(work, self.loop).result())\n",
    "late_thread": """
    loop = None
"""
    + EXECUTES
    + """
        if self.loop is None:
            self.loop = asyncio.new_event_loop()
            threading.Thread(target=self.loop.run_forever, daemon=True).start()
        return self.answered(asyncio.run_coroutine_threadsafe(work, self.loop).result())
""",
    "thread_each": EXECUTES
    + """
        found = []
        thread = threading.Thread(target=lambda: found.append(asyncio.run(work)))
        thread.start()
        thread.join()
        return self.answered(found[0])
""",
}
COUNTS = """
    def execute(self, requests):
        for request in requests:
            x, sender = request.inputs()[0].as_numpy(), request.get_response_sender()
            for number in range(3):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("y", x + np.float32(number))]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ASKED = config_of("way:STRING:1 x:FP32:4")
DECOUPLED = "model_transaction_policy { decoupled: true }"
# Tasks of these go on when `execute` has returned. `x` says which of them a request is about.
LEFT_BEHIND = """
    seen, tasks = [], set()

    def initialize(self, args):
        self.came = threading.Event()
        threading.Thread(target=self.alone, daemon=True).start()

    def alone(self):
        self.came.wait()
        for number in range(3):
            response = self.ask("add", np.full(4, number, np.float32)).exec()
            print("a thread without a request has", self.check(response)[0])

    async def later(self, number):
        for _ in range(5):
            await asyncio.sleep(0.01)
        self.seen.append(number)
        self.came.set()
        responses = await self.ask("counts", np.full(4, number, np.float32)).async_exec(decoupled=True)
        found = [float(self.check(each)[0]) async for each in responses if each.output_tensors()]
        print(f"task {number} has", found, (await self.one(np.full(4, number, np.float32)))[0])
        print(f"task {number} has ended", flush=True)

    async def execute(self, requests):
        (x,) = {int(r.inputs()[0].as_numpy()[0]) for r in requests}
        task = asyncio.create_task(self.later(x))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.full(4, len(self.seen), np.float32))])]
"""
FAILS = """
    async def execute(self, requests):
        x = requests[0].inputs()[0].as_numpy()
        await asyncio.sleep(0.001)
        if x[0] == 1:
            raise ValueError("in a coroutine")
        if x[0] == 2:
            asyncio.current_task().cancel()
            await asyncio.sleep(1)
        if x[0] == 3:
            asyncio.get_running_loop().stop()
            await asyncio.sleep(0.001)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", x)])]
"""


@pytest.fixture(scope="module", params=["0", "all"], ids=["one core", "all cores"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("repository")
    write(repository, "add", ADD)
    write(repository, "slow", SLOW)
    write(repository, "counts", COUNTS, config_of(more=DECOUPLED))
    for name, body in LOOPS.items():
        write(repository, name, ASKS + body, ASKED, HEAD)
    write(repository, "left_behind", ASKS + LEFT_BEHIND, head=HEAD)
    write(repository, "fails", FAILS, head=HEAD)
    with serving(repository, f"--cores={request.param}", cwd=repository.parent) as served:
        yield served


def ask(served: Served, name: str, way: str, value: float) -> object:
    return served.infer(name, way=np.array([way.encode()], dtype=object), x=four(value))["y"].tolist()


@pytest.mark.parametrize("loop", LOOPS)
def test_other_models_answer_in_every_loop(served: Served, loop: str) -> None:
    for way, expected in COROUTINES.items():
        for value in (1, 2):
            assert ask(served, loop, way, value) == [expected(value)] * 4, way


def test_all_loops_at_once(served: Served) -> None:
    asked = [(loop, way, value) for loop in LOOPS for way in ("one", "ten", "in_threads") for value in (1, 2, 3)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda each: ask(served, *each), asked))
    assert answers == [[COROUTINES[way](value)] * 4 for _, way, value in asked]


def test_tasks_that_are_left_behind_go_on(served: Served) -> None:
    assert served.infer("left_behind", x=four(1))["y"][0] == 0
    until(lambda: "task 1 has ended" in served.log())
    assert served.infer("left_behind", x=four(2))["y"][0] == 1
    until(lambda: "task 2 has ended" in served.log())


def test_models_ask_others_while_they_have_no_request(served: Served) -> None:
    for number in (5, 6):
        served.infer("left_behind", x=four(number))
        expected = f"task {number} has [{number}.0, {number + 1}.0, {number + 2}.0] {number + 1}.0"
        until(lambda expected=expected: expected in served.log())  # type: ignore[misc]
    until(lambda: "a thread without a request has 3.0" in served.log())


def test_errors_in_coroutines(served: Served) -> None:
    for value, message in ((1, "ValueError: in a coroutine"), (2, "CancelledError")):
        with pytest.raises(InferenceServerException, match=f"INTERNAL.*Failed to process.*{message}"):
            served.infer("fails", x=four(value))
    for value in (3, 0):
        assert served.infer("fails", x=four(value))["y"][0] == value
