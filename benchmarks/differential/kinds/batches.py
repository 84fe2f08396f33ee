"""Dynamic batches, ragged batches, sequences, response cache."""

from collections.abc import Iterator

from benchmarks.differential.asked import (
    BOTH,
    GRPC,
    JSON,
    STREAM,
    Case,
    Infer,
    OnStream,
    Request,
    Rpc,
    Scrape,
    Tensor,
    Together,
    Value,
    Wait,
    by,
    doing,
    floats,
    integers,
    texts,
)
from benchmarks.differential.models import Model, config_of

JOINED = """
    def execute(self, requests):
        found = []
        for r in requests:
            x = r.inputs()[0].as_numpy()
            rows = np.full((len(x), 1), len(requests), np.int32)
            found.append(answer(pb_utils.Tensor("count", rows), pb_utils.Tensor("y", x * 2)))
        return found
"""
SOME_FAIL = """
    def execute(self, requests):
        found = []
        for r in requests:
            x = r.inputs()[0].as_numpy()
            if x.ravel()[0] < 0:
                found.append(answer(error=pb_utils.TritonError("negative", pb_utils.TritonError.INVALID_ARG)))
            else:
                found.append(answer(pb_utils.Tensor("count", np.full((len(x), 1), len(requests), np.int32)),
                                    pb_utils.Tensor("y", x)))
        if any(r.inputs()[0].as_numpy().ravel()[0] == 99 for r in requests):
            raise ValueError("all of them")
        if any(r.inputs()[0].as_numpy().ravel()[0] == 98 for r in requests):
            return found[:-1]
        return found
"""
SEQUENCE = """
    def initialize(self, args):
        self.sums = {}

    def execute(self, requests):
        found = []
        for r in requests:
            x = pb_utils.get_input_tensor_by_name(r, "x").as_numpy().ravel()[0]
            key = r.correlation_id()
            if r.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
                self.sums[key] = 0
            self.sums[key] = self.sums.get(key, 1000) + int(x)
            controls = {t.name(): str(t.as_numpy().ravel()[0]) for t in r.inputs() if t.name() not in ("x",)}
            shapes = {t.name(): list(t.shape()) for t in r.inputs()}
            seen = [r.flags(), str(key), controls, shapes]
            seen = np.array([json.dumps(seen, sort_keys=True).encode()], dtype=object)
            total = np.array([self.sums[key]], np.int32)
            if len(pb_utils.get_input_tensor_by_name(r, "x").shape()) == 2:
                seen, total = seen.reshape(1, 1), total.reshape(1, 1)
            found.append(answer(pb_utils.Tensor("y", total), pb_utils.Tensor("seen", seen)))
        return found
"""
CONTROLS = """
  control_input { name: "start" control { kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] } }
  control_input { name: "end" control { kind: CONTROL_SEQUENCE_END fp32_false_true: [0, 1] } }
  control_input { name: "ready" control { kind: CONTROL_SEQUENCE_READY bool_false_true: [false, true] } }
  control_input { name: "corrid" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 } }
"""
COUNTS = """
    def initialize(self, args):
        self.counts = {}

    def execute(self, requests):
        found = []
        for r in requests:
            count = self.counts[text(r)] = self.counts.get(text(r), 0) + 1
            if text(r) == "error":
                found.append(answer(error=pb_utils.TritonError("an error", pb_utils.TritonError.UNAVAILABLE)))
            else:
                found.append(answer(told(str(count)), pb_utils.Tensor("z", np.array([count], np.int32))))
        return found
"""
WAIT = "dynamic_batching { max_queue_delay_microseconds: 300000 preferred_batch_size: [4] }"
RAGGED = (
    'backend: "python" max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [-1] allow_ragged_batch: true } '
    'output { name: "count" data_type: TYPE_INT32 dims: [1] } output { name: "y" data_type: TYPE_FP32 dims: [-1] } '
)
SEQUENCE_STREAMS = """
    def execute(self, requests):
        for r in requests:
            sender = r.get_response_sender()
            for _ in range(2):
                sender.send(answer(pb_utils.Tensor("y", r.inputs()[0].as_numpy())))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
CORRELATIONS = ("STRING", "UINT32", "INT32", "INT64")
BATCH_INPUTS = ("BATCH_ACCUMULATED_ELEMENT_COUNT", "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE", "BATCH_ITEM_SHAPE")
BATCH_INPUT = (
    'batch_input { kind: BATCH_ELEMENT_COUNT target_name: "sizes" data_type: TYPE_FP32 source_input: "x" } '
    'batch_input { kind: BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO target_name: "ends" data_type: TYPE_FP32 source_input: "x" } '
)
MODELS = (
    Model("joined", JOINED, config_of("x:FP32:-1", "count:INT32:1 y:FP32:-1", batch=4, more=WAIT)),
    Model("ragged", JOINED, RAGGED + WAIT),
    Model("ragged_counted", JOINED, RAGGED + BATCH_INPUT + WAIT),
    *(
        Model(
            f"ragged_{kind.lower()}",
            JOINED,
            f'{RAGGED} batch_input {{ kind: {kind} target_name: "t" data_type: TYPE_FP32 source_input: "x" }} {WAIT}',
        )
        for kind in BATCH_INPUTS
    ),
    *(
        Model(
            f"sequence_of_{datatype.lower()}",
            SEQUENCE,
            config_of(
                "x:INT32:1",
                "y:INT32:1 seen:STRING:1",
                more='sequence_batching { control_input { name: "key" control { kind: CONTROL_SEQUENCE_CORRID '
                f"data_type: TYPE_{datatype} }} }} }}",
            ),
        )
        for datatype in CORRELATIONS
    ),
    Model(
        "sequence_streams",
        SEQUENCE_STREAMS,
        config_of("x:INT32:1", "y:INT32:1", more="sequence_batching { } model_transaction_policy { decoupled: true }"),
    ),
    Model("some_fail", SOME_FAIL, config_of("x:FP32:1", "count:INT32:1 y:FP32:1", batch=4, more=WAIT)),
    Model("not_joined", JOINED, config_of("x:FP32:-1", "count:INT32:1 y:FP32:-1", batch=4)),
    Model(
        "sequence",
        SEQUENCE,
        config_of(
            "x:INT32:1",
            "y:INT32:1 seen:STRING:1",
            more="sequence_batching { max_sequence_idle_microseconds: 60000000 " + CONTROLS + "}",
        ),
    ),
    Model(
        "sequence_rows",
        SEQUENCE,
        config_of(
            "x:INT32:1",
            "y:INT32:1 seen:STRING:1",
            batch=4,
            more="sequence_batching { max_sequence_idle_microseconds: 60000000 oldest { max_candidate_sequences: 4 } "
            + CONTROLS
            + "}",
        ),
    ),
    Model(
        "sequence_bare",
        SEQUENCE,
        config_of(
            "x:INT32:1",
            "y:INT32:1 seen:STRING:1",
            more="sequence_batching { max_sequence_idle_microseconds: 60000000 }",
        ),
    ),
    Model("cached", COUNTS, config_of("do:STRING:1", "y:STRING:1 z:INT32:1", more="response_cache { enable: true }")),
    Model("counted", COUNTS, config_of("do:STRING:1", "y:STRING:1 z:INT32:1")),
)


def _at(
    model: str, correlation: Value, value: int, start: bool = False, end: bool = False, rows: bool = False
) -> Request:
    parameters: dict[str, Value] = {"sequence_id": correlation, "sequence_start": start, "sequence_end": end}
    return Request(model, [integers("x", value, shape=(1, 1) if rows else (1,))], parameters=parameters)


def row(*values: float) -> Tensor:
    """Return one row of the input x."""
    return floats("x", *values, shape=(1, len(values)))


def cases() -> Iterator[Case]:
    """Yield the cases."""
    yield Case("batches: four at once", [Together([Request("joined", [row(n, n)]) for n in range(4)])])
    yield Case(
        "batches: two rows twice", [Together([Request("joined", [floats("x", n, n, shape=(2, 1))]) for n in range(2)])]
    )
    yield Case("batches: one row", [Infer(Request("joined", [row(1)]), GRPC)])
    yield Case("batches: four over HTTP", [Together([Request("joined", [row(n)]) for n in range(4)], JSON)])
    yield Case("batches: four, not joined", [Together([Request("not_joined", [row(n)]) for n in range(4)])])
    yield Case(
        "batches: four of four rows",
        [Together([Request("joined", [floats("x", *[n] * 4, shape=(4, 1))]) for n in range(2)])],
    )
    yield Case(
        "batches: other outputs asked",
        [Together([Request("joined", [row(n)], ["y"] if n % 2 else ["count"]) for n in range(4)])],
    )
    for what, values in {
        "one fails": (1, -1, 2, 3),
        "all fail": (-1, -2, -3, -4),
        "it raises": (1, 2, 99, 3),
        "one response too few": (1, 2, 98, 3),
    }.items():
        yield Case(
            f"batches: {what}",
            [Together([Request("some_fail", [floats("x", value, shape=(1, 1))], id=str(value)) for value in values])],
        )
    for model in ("ragged", "ragged_counted"):
        yield Case(f"ragged: four sizes, {model}", [Together([Request(model, [row(*range(n + 1))]) for n in range(4)])])
        yield from by("ragged", f"one, {model}", Request(model, [row(1, 2, 3)]), BOTH)
        yield Case(f"ragged: no elements, {model}", [Infer(Request(model, [row()]), GRPC)])
    for number, model in enumerate(("sequence", "sequence_rows", "sequence_bare")):
        rows = model == "sequence_rows"
        for correlation in (11 + number, f"text{number}"):
            steps = [
                _at(model, correlation, 1, start=True, rows=rows),
                _at(model, correlation, 2, rows=rows),
                _at(model, correlation, 3, end=True, rows=rows),
            ]
            if model == "sequence_bare" or not isinstance(correlation, str):
                yield Case(f"sequences: {model} {correlation}", [Infer(each, GRPC) for each in steps])
                yield Case(f"sequences: {model} {correlation} over HTTP", [Infer(each, JSON) for each in steps])
                yield Case(f"sequences: {model} {correlation} on a stream", [OnStream(steps)])
            else:
                once = _at(model, correlation, 1, start=True, end=True, rows=rows)
                yield Case(f"sequences: {model} {correlation}", [Infer(once, GRPC)])
        request = Request(model, [integers("x", 1, shape=(1, 1) if rows else (1,))])
        yield Case(f"sequences: {model} without id", [Infer(request, GRPC), Infer(request, JSON)])
        yield Case(f"sequences: {model} without start", [Infer(_at(model, 50 + number, 1, rows=rows), GRPC)])
        once = _at(model, 60 + number, 5, start=True, end=True, rows=rows)
        yield Case(f"sequences: {model} start and end", [Infer(once, GRPC), Infer(once, JSON)])
        again = [
            _at(model, 70 + number, 1, start=True, rows=rows),
            _at(model, 70 + number, 2, start=True, end=True, rows=rows),
        ]
        yield Case(f"sequences: {model} started again", [Infer(each, GRPC) for each in again])
        after = [_at(model, 80 + number, 1, start=True, end=True, rows=rows), _at(model, 80 + number, 2, rows=rows)]
        yield Case(f"sequences: {model} after the end", [Infer(each, GRPC) for each in after])
        two = [
            _at(model, 90 + number, 1, True, rows=rows),
            _at(model, 95 + number, 10, True, rows=rows),
            _at(model, 90 + number, 2, False, True, rows),
            _at(model, 95 + number, 20, False, True, rows),
        ]
        if model == "sequence_rows":
            yield Case(f"sequences: {model} two", [Infer(each, GRPC) for each in two])
    for datatype in CORRELATIONS:
        model = f"sequence_of_{datatype.lower()}"
        for correlation in (7, "seven", "\u00e9" * 3, 2**31 + 5):
            if (datatype == "STRING") == isinstance(correlation, str):
                once = _at(model, correlation, 1, start=True, end=True)
                yield from by("sequences", f"{model} {correlation}", once, (GRPC, STREAM, JSON))
    yield from by("sequences", "decoupled", _at("sequence_streams", 7, 1, start=True, end=True), (STREAM,))
    for kind in BATCH_INPUTS:
        model = f"ragged_{kind.lower()}"
        yield Case(f"ragged: two sizes, {model}", [Together([Request(model, [row(*range(n + 1))]) for n in range(2)])])
    for what in ("a", "error"):
        request = doing("cached", what)
        yield Case(f"cache: {what} three times", [Infer(request, GRPC) for _ in range(3)])
        yield Case(f"cache: {what} over HTTP", [Infer(request, JSON), Infer(request, JSON)])
    plain = texts("do", "b")
    yield Case("cache: another id", [Infer(Request("cached", [plain], id=name), GRPC) for name in ("1", "2")])
    yield Case(
        "cache: other parameters", [Infer(doing("cached", "c", parameters={"p": value}), GRPC) for value in (1, 2, 1)]
    )
    yield Case(
        "cache: other outputs",
        [Infer(doing("cached", "d", wanted=wanted), GRPC) for wanted in (["y"], ["z"], ["y"], [])],
    )
    yield Case("cache: on a stream", [Infer(doing("cached", "e"), STREAM) for _ in range(2)])
    count = [Infer(doing("counted", name), GRPC) for name in ("a", "a", "error")]
    yield Case(
        "statistics: counted",
        [*count, Wait(Rpc("ModelStatistics", {"name": "counted", "version": "1"}), '"execution_count": "3"')],
    )
    yield Case("statistics: cached", [Wait(Rpc("ModelStatistics", {"name": "cached"}), "cache_hit")])
    yield Case(
        "statistics: metrics",
        [
            Scrape(
                [
                    f'nv_inference_{name}{{model="counted"'
                    for name in ("request_success", "request_failure", "count", "exec_count")
                ]
            )
        ],
    )
    yield from by("batches", "typed", Request("joined", [Tensor("x", "FP32", (1, 2), [1.0, 2.0])]), ("typed", "binary"))
