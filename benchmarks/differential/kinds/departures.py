"""Clients that leave in the middle, in each way, and what the models that compute for them see of it."""

from collections.abc import Iterator

from benchmarks.differential.asked import (
    BOTH,
    CONNECTION,
    DEADLINE,
    EVENTS,
    GRPC,
    HALF,
    HALF_STREAM,
    HTTP,
    RESET,
    STREAM,
    STREAM_DEADLINE,
    STREAM_RESET,
    Case,
    Departs,
    Infer,
    Rpc,
    Scrape,
    doing,
)
from benchmarks.differential.kinds.streams import DECOUPLED, FINAL
from benchmarks.differential.models import Model, config_of, ensemble_of

# A request's text is a port, where the model tells that it has begun, and whether it has seen that it is cancelled.
WATCH = """
    def initialize(self, args):
        self.name = args["model_name"]

    def watch(self, request, asks=None):
        import socket
        port, asks = text(request), asks or request.is_cancelled
        if not port.isdigit():
            return
        with socket.create_connection(("127.0.0.1", int(port))) as told:
            told.sendall(f"{self.name} begun\\n".encode())
            end_s = time.monotonic() + 1
            while not asks() and time.monotonic() < end_s:
                time.sleep(0.001)
            told.sendall(f"{time.monotonic() if asks() else 'waited'}\\n".encode())

    def echo(self, request):
        return told(text(request))
"""
PLAIN = """
    def execute(self, requests):
        for request in requests:
            self.watch(request)
        return [answer(self.echo(request)) for request in requests]
"""
SENDER = PLAIN.replace("watch(request)", "watch(request, request.get_response_sender().is_cancelled)")
COROUTINE = """
    async def execute(self, requests):
        for request in requests:
            await asyncio.to_thread(self.watch, request)
        return [answer(self.echo(request)) for request in requests]
"""
RESPONDS = """
    def execute(self, requests):
        for request in requests:
            self.watch(request)
        gone = answer(error=pb_utils.TritonError("gone", pb_utils.TritonError.CANCELLED))
        return [gone if request.is_cancelled() else answer(self.echo(request)) for request in requests]
"""
ROWS = """
    def execute(self, requests):
        for request in sorted(requests, key=lambda each: not text(each).isdigit()):
            self.watch(request)
        cancelled = [request.is_cancelled() for request in requests if not text(request).isdigit()]
        return [answer(pb_utils.Tensor("y", np.array([[f"{len(requests)} {cancelled}"]], dtype=object))) for _ in requests]
"""
ASKS = """
    def execute(self, requests):
        for request in requests:
            inner = pb_utils.InferenceRequest(model_name="INNER", requested_output_names=["y"], inputs=request.inputs())
            if "INNER" == "watches_stream":
                list(inner.exec(decoupled=True))
            else:
                inner.exec()
            self.watch(request)
        return [answer(self.echo(request)) for request in requests]
"""
ASKS_ASYNC = """
    async def execute(self, requests):
        for request in requests:
            inner = pb_utils.InferenceRequest(model_name="watches", requested_output_names=["y"], inputs=request.inputs())
            await asyncio.gather(inner.async_exec(), asyncio.sleep(0.001))
            self.watch(request)
        return [answer(self.echo(request)) for request in requests]
"""
STREAMING = f"""
    def execute(self, requests):
        for request in requests:
            self.stream(request)

    def stream(self, request):
        sender = request.get_response_sender()
        sender.send(answer(self.echo(request)))
        self.watch(request)
        sender.send({FINAL})
"""
THREADS = STREAMING.replace(
    "self.stream(request)", "threading.Thread(target=self.stream, args=(request,)).start()", 1
).replace("self.watch(request)", "self.watch(request, sender.is_cancelled)")
TELLS = """
    def execute(self, requests):
        return [answer(told(text(request))) for request in requests]
"""
IN, OUT = "do:STRING:1", "y:STRING:1"
PLAINS = {"watches": PLAIN, "watches_by_sender": SENDER, "watches_async": COROUTINE, "watches_responds": RESPONDS}
STREAMED = {"watches_stream": STREAMING, "watches_thread": THREADS}
CHAINS = {
    "watches_chain": (("departs_tells", "do=do", "y=a"), ("watches", "do=a", "y=y")),
    "watches_first": (("watches", "do=do", "y=a"), ("departs_tells", "do=a", "y=y")),
}
CALLING = {
    "watches_asks": ASKS.replace("INNER", "watches"),
    "watches_asks_chain": ASKS.replace("INNER", "watches_chain"),
    "watches_asks_stream": ASKS.replace("INNER", "watches_stream"),
    "watches_asks_async": ASKS_ASYNC,
}
INNER = {"watches_asks_stream": "watches_stream"}  # others ask `watches`
JOINED = "dynamic_batching { max_queue_delay_microseconds: 300000 preferred_batch_size: [2] }"
MODELS = (
    Model("departs_tells", TELLS, config_of(IN, OUT)),
    *(Model(name, WATCH + body, config_of(IN, OUT)) for name, body in (PLAINS | CALLING).items()),
    *(Model(name, WATCH + body, config_of(IN, OUT, more=DECOUPLED)) for name, body in STREAMED.items()),
    *(Model(name, "", ensemble_of(IN, OUT, steps)) for name, steps in CHAINS.items()),
    Model(
        "watches_stream_chain",
        "",
        ensemble_of(IN, OUT, [("watches_stream", "do=do", "y=a"), ("departs_tells", "do=a", "y=y")], more=DECOUPLED),
    ),
    Model("watches_rows", WATCH + ROWS, config_of(IN, OUT, batch=2, more=JOINED)),
)
UNARY = (RESET, CONNECTION, DEADLINE, HTTP)
STREAMS = (STREAM_RESET, STREAM_DEADLINE)


def cases() -> Iterator[Case]:
    """Yield the cases."""
    asked = [
        *(("watches", way) for way in (*UNARY, *STREAMS, HALF, HALF_STREAM)),
        *((name, way) for name in PLAINS if name != "watches" for way in (RESET, HTTP)),
        *((name, way) for name in (*STREAMED, "watches_stream_chain") for way in (*STREAMS, HALF_STREAM, EVENTS)),
        *((name, way) for name in (*CHAINS, *CALLING) for way in (RESET, DEADLINE, STREAM_RESET, HTTP)),
    ]
    for model, way in asked:
        again = Infer(doing(model, "again"), STREAM if model in STREAMED or way in STREAMS else GRPC)
        departs = Departs(model, way, 1 + (model in CALLING))
        # Which response of an ensemble's last step is the final one is a matter of luck in Triton.
        yield Case(f"departs: {model}, {way}", [departs] if model == "watches_stream_chain" else [departs, again])
    for way in (RESET, HTTP):
        yield Case(f"departs: queued, {way}", [Departs("watches", way, behind=True)])
    for way in (RESET, HTTP):
        beside = doing("watches_rows", "stays", rows=True)
        yield Case(f"departs: of a batch, {way}", [Departs("watches_rows", way, beside=beside)])
    for model in ("watches_chain", "watches_asks"):
        for way in BOTH:
            yield Case(f"departs: nobody, {model}, {way}", [Infer(doing(model, "stays"), way)])
    # Of a model that is not decoupled it is a matter of luck whether the answer or the client's leave comes first.
    yield Case("departs: statistics", [Rpc("ModelStatistics", {"name": "watches_stream"})])
    names = ("request_failure", "request_success")
    yield Case("departs: metrics", [Scrape([f'nv_inference_{each}{{model="watches_stream"' for each in names])])
