"""Models that ask other models, plainly and in coroutines of every kind."""

from collections.abc import Iterator

from benchmarks.differential.asked import FEW, GRPC, JSON, STREAM, Case, Infer, by, doing
from benchmarks.differential.models import TEXT, Model, config_of

ASKS_HEAD = """
def value(tensor):
    array = tensor.as_numpy()
    return [each.decode("latin-1") if isinstance(each, bytes) else each for each in array.ravel().tolist()]


def shown(response):
    if response.has_error():
        return {"error": response.error().message(), "code": int(response.error().code())}
    told = {each.name(): [each.as_numpy().dtype.name, list(each.shape()), value(each)] for each in response.output_tensors()}
    return {"outputs": told, "order": [each.name() for each in response.output_tensors()]}


def ask(model, *inputs, wanted=("y",), **more):
    return pb_utils.InferenceRequest(
        model_name=model, requested_output_names=list(wanted), inputs=list(inputs), **more)


def do(what, name="do"):
    return pb_utils.Tensor(name, np.array([what.encode()], dtype=object))


def a():
    return pb_utils.Tensor("a", np.array([1], np.float32))


"""
ASKED = {
    "a model": "ask('sums', a())",
    "all outputs by no name": "ask('sees', a(), wanted=())",
    "two outputs": "ask('sees', a(), wanted=('z', 'y'))",
    "an unknown output": "ask('sums', a(), wanted=('nothing',))",
    "an unknown model": "ask('unheard_of', a())",
    "a model that is not loaded": "ask('init_raises', do('a'))",
    "an unknown version": "ask('sums', a(), model_version=9)",
    "a version": "ask('versioned', pb_utils.Tensor('x', np.zeros(1, np.float32)), model_version=1)",
    "the latest version": "ask('versioned', pb_utils.Tensor('x', np.zeros(1, np.float32)), model_version=-1)",
    "another type": "ask('sums', pb_utils.Tensor('a', np.zeros(1, np.int32)))",
    "another shape": "ask('sums', pb_utils.Tensor('a', np.zeros((2, 2), np.float32)))",
    "an unknown input": "ask('sums', pb_utils.Tensor('nothing', np.zeros(1, np.float32)))",
    "no inputs": "ask('sums')",
    "one that raises": "ask('raises', do('value error'))",
    "one that responds with an error": "ask('responds', do('NOT_FOUND'))",
    "one that responds with a cancellation": "ask('responds', do('CANCELLED'))",
    "one that gives other outputs": "ask('other', do('two axes for one'), wanted=('y', 'z'))",
    "one that leaves an output out": "ask('other', do('one missing'), wanted=('y', 'z'))",
    "one that says parameters": "ask('says', do('several'))",
    "an id": "ask('sees', a(), request_id='inner')",
    "parameters": "ask('sees', a(), parameters={'p': 1, 'q': 'x', 'r': True})",
    "parameters as a text": "ask('sees', a(), parameters='{\"p\": 1}')",
    "a priority and a timeout": "ask('sees', a(), priority=1, timeout=5000000)",
    "a correlation id": "ask('sees', a(), correlation_id=9)",
    "a correlation id as text": "ask('sees', a(), correlation_id='nine')",
    "flags": "ask('sees', a(), correlation_id=9, flags=1)",
    "inputs in another order": "ask('sees', pb_utils.Tensor('c', np.array([b't'], dtype=object)), a())",
    "bytes": "ask('lengths', pb_utils.Tensor('x', np.array([b'\\xff\\xd8', b''], dtype=object)), wanted=('y', 'sizes'))",
    "a sequence": "ask('sequence_bare', pb_utils.Tensor('x', np.array([5], np.int32)), correlation_id=300, flags=3)",
    "a sequence without an id": "ask('sequence_bare', pb_utils.Tensor('x', np.array([5], np.int32)))",
    "an ensemble": "ask('chain', pb_utils.Tensor('x', np.array([1], np.float32)))",
    "an ensemble that fails": "ask('chain_raises', do('value error', 'x'))",
    "a decoupled model": "ask('streams', do('one'))",
    "a decoupled model without responses": "ask('streams', do('zero'))",
    "a decoupled model with two responses": "ask('streams', do('two'))",
    "a decoupled model with an error": "ask('streams', do('only an error'))",
    "an ONNX-like batch": "ask('sees_rows', pb_utils.Tensor('a', np.ones((2, 1), np.float32)))",
    "too many rows": "ask('sees_rows', pb_utils.Tensor('a', np.ones((9, 1), np.float32)))",
}
ASKS = f"""
    def execute(self, requests):
        asked = {{{", ".join(f"{name!r}: lambda: {code}" for name, code in ASKED.items())}}}
        found = []
        for r in requests:
            try:
                response = shown(asked[text(r)]().exec())
            except Exception as error:
                response = ["raised", type(error).__name__, str(error)]
            found.append(answer(told(json.dumps(response, sort_keys=True))))
        return found
"""
ASKS_ASYNC = ASKS.replace("    def execute", "    async def execute").replace(
    "shown(asked[text(r)]().exec())", "shown(await asked[text(r)]().async_exec())"
)
STREAMED = ("one", "zero", "two", "five")
ASKS_STREAMS = """
    def execute(self, requests):
        found = []
        for r in requests:
            try:
                response = [shown(each) for each in ask('streams', do(text(r))).exec(decoupled=True)]
            except Exception as error:
                response = ["raised", type(error).__name__, str(error)]
            found.append(answer(told(json.dumps(response, sort_keys=True))))
        return found
"""
ASKS_STREAMS_ASYNC = """
    async def execute(self, requests):
        found = []
        for r in requests:
            try:
                response = [shown(each) for each in await ask('streams', do(text(r))).async_exec(decoupled=True)]
            except Exception as error:
                response = ["raised", type(error).__name__, str(error)]
            found.append(answer(told(json.dumps(response, sort_keys=True))))
        return found
"""
COROUTINES = """
    def initialize(self, args):
        self.loop = asyncio.new_event_loop()
        self.other = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.other.run_forever, daemon=True)
        self.thread.start()

    async def one(self):
        return shown(await ask("sums", a()).async_exec())["outputs"]["y"][2]

    async def several(self, count=4):
        return await asyncio.gather(*(self.one() for _ in range(count)))

    async def with_limit(self):
        return await asyncio.wait_for(self.one(), 10)

    async def in_executor(self):
        return await asyncio.get_running_loop().run_in_executor(None, lambda: shown(ask("sums", a()).exec())["order"])

    async def first(self):
        tasks = [asyncio.create_task(self.one()) for _ in range(3)]
        done, _ = await asyncio.wait(tasks)
        return sorted(each.result() for each in done)

    async def sleeps(self):
        await asyncio.sleep(0.01)
        return "slept"

    async def fails(self):
        raise ValueError("in a coroutine")

    def execute(self, requests):
        made = {
            "asyncio.run": lambda: asyncio.run(self.one()),
            "asyncio.run twice": lambda: [asyncio.run(self.one()), asyncio.run(self.one())],
            "asyncio.run of a gather": lambda: asyncio.run(self.several()),
            "a loop of its own": lambda: self.loop.run_until_complete(self.one()),
            "a new loop": lambda: asyncio.new_event_loop().run_until_complete(self.several()),
            "a loop in a thread": lambda: asyncio.run_coroutine_threadsafe(self.one(), self.other).result(10),
            "wait_for": lambda: asyncio.run(self.with_limit()),
            "wait": lambda: asyncio.run(self.first()),
            "run_in_executor": lambda: asyncio.run(self.in_executor()),
            "sleep": lambda: asyncio.run(self.sleeps()),
            "an error": lambda: asyncio.run(self.fails()),
            "exec in a thread": self.in_thread,
            "exec in a pool": self.in_pool,
        }
        return [answer(told(made[text(r)]())) for r in requests]

    def in_thread(self):
        found = []
        thread = threading.Thread(target=lambda: found.append(shown(ask("sums", a()).exec())["order"]))
        thread.start()
        thread.join()
        return found

    def in_pool(self):
        from concurrent.futures import ThreadPoolExecutor
        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(lambda _: shown(ask("sums", a()).exec())["order"], range(5)))
"""
COROUTINE_KINDS = (
    *("asyncio.run", "asyncio.run twice", "asyncio.run of a gather", "a loop of its own", "a new loop"),
    *("a loop in a thread", "wait_for", "wait", "run_in_executor", "sleep", "an error", "exec in a thread"),
    "exec in a pool",
)
ASYNC_EXECUTE = """
    async def one(self):
        return shown(await ask("sums", a()).async_exec())["outputs"]["y"][2]

    async def execute(self, requests):
        found = []
        for r in requests:
            what = text(r)
            if what == "raises":
                raise ValueError("in a coroutine")
            if what == "gather":
                value = await asyncio.gather(*(self.one() for _ in range(5)))
            elif what == "gather with an error":
                found_ = await asyncio.gather(self.one(), self.fails(), return_exceptions=True)
                value = [each if isinstance(each, list) else type(each).__name__ for each in found_]
            elif what == "exec":
                value = shown(ask("sums", a()).exec())["order"]
            elif what == "a task":
                value = await asyncio.create_task(self.one())
            elif what == "a thread":
                value = await asyncio.to_thread(lambda: shown(ask("sums", a()).exec())["order"])
            elif what == "a loop":
                value = type(asyncio.get_running_loop()).__name__ != ""
            else:
                await asyncio.sleep(0.01)
                value = "slept"
            found.append(answer(told(value)))
        return found

    async def fails(self):
        raise ValueError("one of them")
"""
PASSES_ON = """
    def execute(self, requests):
        found = []
        for r in requests:
            inner = ask("other", *r.inputs(), wanted=sorted(r.requested_output_names()), request_id=r.request_id())
            response = inner.exec()
            if response.has_error():
                found.append(answer(error=response.error()))
            else:
                found.append(answer(*response.output_tensors()))
        return found
"""


def _asks(name: str, body: str) -> Model:
    head = Model("").head
    return Model(name, body, TEXT, head=head + ASKS_HEAD)


MODELS = (
    _asks("asks", ASKS),
    _asks("asks_async", ASKS_ASYNC),
    _asks("asks_streams", ASKS_STREAMS),
    _asks("asks_streams_async", ASKS_STREAMS_ASYNC),
    _asks("coroutines", COROUTINES),
    _asks("async_execute", ASYNC_EXECUTE),
    Model(
        "passes_on",
        PASSES_ON,
        config_of("do:STRING:1", "y:FP32:2 z:INT32:-1 s:STRING:1"),
        head=Model("").head + ASKS_HEAD,
    ),
)


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for name in ASKED:
        for model in ("asks", "asks_async"):
            yield from by(f"BLS, {model}", name, doing(model, name), (GRPC,))
    yield from by(
        "BLS, asks",
        "with the caller's id",
        doing("asks", "an id", id="outer", parameters={"p": 5}),
        (GRPC, JSON, STREAM),
    )
    for name in STREAMED:
        for model in ("asks_streams", "asks_streams_async"):
            yield from by(f"BLS, {model}", name, doing(model, name), (GRPC,))
    for name in COROUTINE_KINDS:
        yield from by("coroutines", name, doing("coroutines", name), (GRPC, JSON))
    for name in ("gather", "gather with an error", "exec", "a task", "a thread", "a loop", "sleep", "raises"):
        yield from by("async execute", name, doing("async_execute", name), (GRPC, JSON))
    for name in ("right", "one missing", "two axes for one", "float64 for float32", "one more"):
        yield from by("BLS, passes on", name, doing("passes_on", name), FEW)
        yield from by(
            "BLS, passes on", f"{name}, y asked", doing("passes_on", name, wanted=["y"], id="i"), (GRPC, JSON)
        )
    yield Case("BLS, asks: then right", [Infer(doing("asks", "a model"), GRPC)])
