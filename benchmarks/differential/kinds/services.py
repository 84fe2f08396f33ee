"""Completed configurations, metrics, models that load models, functions of pb_utils, metadata, the repository."""

from collections.abc import Iterator

from benchmarks.differential.asked import (
    BOTH,
    GRPC,
    JSON,
    Case,
    Http,
    Infer,
    Request,
    Rpc,
    Scrape,
    Wait,
    by,
    doing,
    floats,
)
from benchmarks.differential.models import HEAD, TEXT, Model, config_of, telling

X, Y = '{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}', '{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}'
COMPLETES = """
    @staticmethod
    def auto_complete_config(config):
{lines}
        return config

    def execute(self, requests):
        return [answer(pb_utils.Tensor("y", r.inputs()[0].as_numpy())) for r in requests]
"""
IN, OUT = f"config.add_input({X})", f"config.add_output({Y})"
COMPLETED = {
    "both": (IN, OUT),
    "batch": (IN, OUT, "config.set_max_batch_size(4)"),
    "dynamic": (IN, OUT, "config.set_max_batch_size(4)", "config.set_dynamic_batching()"),
    "decoupled": (IN, OUT, 'config.set_model_transaction_policy({"decoupled": True})'),
    "twice": (IN, IN, OUT),
    "optional": (f'config.add_input({X[:-1]}, "optional": True}})', OUT),
    "nothing": ("pass",),
    "no_dims": ('config.add_input({"name": "x", "data_type": "TYPE_FP32"})', OUT),
    "no_name": ('config.add_input({"data_type": "TYPE_FP32", "dims": [1]})', OUT),
    "no_type": ('config.add_input({"name": "x", "dims": [1]})', OUT),
    "unknown_property": (f'config.add_input({X[:-1]}, "more": 1}})', OUT),
    "conflict": (IN, 'config.add_input({"name": "x", "data_type": "TYPE_INT32", "dims": [-1]})', OUT),
    "raises": ("raise ValueError('not completed')",),
    "set_batch_twice": (IN, OUT, "config.set_max_batch_size(4)", "config.set_max_batch_size(2)"),
}
PARTLY = 'backend: "python" max_batch_size: 2 input { name: "x" data_type: TYPE_FP32 dims: [3] }'
COUNTS = """
    def initialize(self, args):
        family = pb_utils.MetricFamily
        self.families = [
            family(name="differential_total", description="A counter", kind=family.COUNTER),
            family(name="differential_gauge", description="A gauge", kind=family.GAUGE),
        ]
        self.counter = self.families[0].Metric(labels={"model": "counts", "kind": "a"})
        self.gauge = self.families[1].Metric(labels={"b": "2", "a": "1"})

    def execute(self, requests):
        found = []
        for r in requests:
            what = text(r)
            try:
                if what == "increment":
                    self.counter.increment(1)
                    value = self.counter.value()
                elif what == "half":
                    self.counter.increment(0.5)
                    value = self.counter.value()
                elif what == "set":
                    self.gauge.set(2.5)
                    value = self.gauge.value()
                elif what == "lower":
                    self.gauge.increment(-1)
                    value = self.gauge.value()
                elif what == "same labels":
                    value = self.families[0].Metric(labels={"model": "counts", "kind": "a"}).value()
                elif what == "no labels":
                    value = self.families[0].Metric().value()
            except Exception as error:
                value = type(error).__name__
            found.append(answer(told(json.dumps(value))))
        return found
"""
COUNTED = ("increment", "half", "set", "lower", "same labels", "no labels")
LOADS = """
    def execute(self, requests):
        found = []
        for r in requests:
            what = text(r)
            try:
                if what == "ready":
                    value = [pb_utils.is_model_ready("late"), pb_utils.is_model_ready("sums"),
                             pb_utils.is_model_ready("sums", "1"), pb_utils.is_model_ready("sums", "9"),
                             pb_utils.is_model_ready("unheard_of")]
                elif what == "unload":
                    value = pb_utils.unload_model("late")
                    while pb_utils.is_model_ready("late"):
                        time.sleep(0.01)
                elif what == "load":
                    value = pb_utils.load_model("late")
                elif what == "load by names":
                    value = pb_utils.load_model(model_name="late")
                elif what == "load an unknown one":
                    value = pb_utils.load_model("unheard_of")
                elif what == "unload an unknown one":
                    value = pb_utils.unload_model("unheard_of")
                elif what == "load a broken one":
                    value = pb_utils.load_model("init_raises")
            except Exception as error:
                value = type(error).__name__
            found.append(answer(told(json.dumps(value))))
        return found
"""
LOADED = (
    *("ready", "unload", "ready", "load", "ready", "load by names", "load an unknown one", "unload an unknown one"),
    *("load a broken one", "ready"),
)
FUNCTIONS = {
    "names": "sorted(each for each in dir(pb_utils) if not each.startswith('_'))",
    "names of Tensor": "sorted(each for each in dir(pb_utils.Tensor) if not each.startswith('_'))",
    "names of InferenceRequest": "sorted(each for each in dir(pb_utils.InferenceRequest) if not each.startswith('_'))",
    "names of InferenceResponse": "sorted(each for each in dir(pb_utils.InferenceResponse) if not each.startswith('_'))",
    "names of TritonError": "sorted(each for each in dir(pb_utils.TritonError) if not each.startswith('_'))",
    "names of Logger": "sorted(each for each in dir(pb_utils.Logger) if not each.startswith('_'))",
    "names of MetricFamily": "sorted(each for each in dir(pb_utils.MetricFamily) if not each.startswith('_'))",
    "names of ModelConfig": "sorted(each for each in dir(pb_utils.ModelConfig) if not each.startswith('_'))",
    "names of PreferredMemory": "sorted(each for each in dir(pb_utils.PreferredMemory) if not each.startswith('_'))",
    "names of InferenceTrace": "sorted(each for each in dir(pb_utils.InferenceTrace) if not each.startswith('_'))",
    "names of a sender": "sorted(each for each in dir(r.get_response_sender()) if not each.startswith('_'))",
    "string_to_numpy": "[np.dtype(pb_utils.triton_string_to_numpy('TYPE_' + name)).name for name in 'BOOL INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 FP16 FP32 FP64 STRING'.split()]",
    "string_to_numpy of nothing": "pb_utils.triton_string_to_numpy('FP32')",
    "string_to_numpy of BF16": "str(pb_utils.triton_string_to_numpy('TYPE_BF16'))",
    "to_numpy_type": "[np.dtype(pb_utils.triton_to_numpy_type(number)).name for number in range(1, 14)]",
    "to_numpy_type of 0": "str(pb_utils.triton_to_numpy_type(0))",
    "to_numpy_type of 14": "str(pb_utils.triton_to_numpy_type(14))",
    "to_triton_type": "[int(pb_utils.numpy_to_triton_type(each)) for each in (np.bool_, np.int8, np.uint64, np.float16, np.float32, np.object_, np.bytes_)]",
    "to_triton_type of bool": "pb_utils.numpy_to_triton_type(bool)",
    "to_triton_type of a dtype": "pb_utils.numpy_to_triton_type(np.dtype('float32'))",
    "to_triton_type of complex": "pb_utils.numpy_to_triton_type(np.complex64)",
    "to_triton_type of str_": "pb_utils.numpy_to_triton_type(np.str_)",
    "input config": "pb_utils.get_input_config_by_name(self.config, 'do')['data_type']",
    "input config of nothing": "pb_utils.get_input_config_by_name(self.config, 'nothing')",
    "output config": "pb_utils.get_output_config_by_name(self.config, 'y')['dims']",
    "output config of nothing": "pb_utils.get_output_config_by_name(self.config, 'nothing')",
    "decoupled": "pb_utils.using_decoupled_model_transaction_policy(self.config)",
    "model folder": "pb_utils.get_model_dir()",
    "serialize": "pb_utils.serialize_byte_tensor(np.array([b'a', 'bc', b''], dtype=object)).item().hex()",
    "serialize type": "[str(pb_utils.serialize_byte_tensor(np.array([b'a'], dtype=object)).dtype), list(pb_utils.serialize_byte_tensor(np.array([b'a'], dtype=object)).shape)]",
    "serialize nothing": "str(pb_utils.serialize_byte_tensor(np.array([], dtype=object)))",
    "serialize fixed": "pb_utils.serialize_byte_tensor(np.array([b'ab', b'c'])).item().hex()",
    "serialize numbers": "str(pb_utils.serialize_byte_tensor(np.array([1, 2])))",
    "deserialize": "[str(each) for each in pb_utils.deserialize_bytes_tensor(b'\\x01\\0\\0\\0a\\0\\0\\0\\0')]",
    "deserialize type": "str(pb_utils.deserialize_bytes_tensor(b'\\x01\\0\\0\\0a').dtype)",
    "deserialize nothing": "pb_utils.deserialize_bytes_tensor(b'').tolist()",
    "deserialize cut": "pb_utils.deserialize_bytes_tensor(b'\\x05\\0\\0\\0a').tolist()",
    "serialize and back": "[str(each) for each in pb_utils.deserialize_bytes_tensor(pb_utils.serialize_byte_tensor(np.array([b'\\xff', b'b'], dtype=object)).item())]",
    "constants": "[int(pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL), int(pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START), int(pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END), int(pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL), int(pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE)]",
    "memory": "[int(pb_utils.TRITONSERVER_MEMORY_CPU), int(pb_utils.TRITONSERVER_MEMORY_GPU)]",
    "metric kinds": "[str(pb_utils.MetricFamily.COUNTER), str(pb_utils.MetricFamily.GAUGE)]",
    "log": "[pb_utils.Logger.log('a'), pb_utils.Logger.log_info('b'), pb_utils.Logger.log_warn('c'), pb_utils.Logger.log_error('d'), pb_utils.Logger.log_verbose('e'), pb_utils.Logger.log('f', pb_utils.Logger.WARNING)]",
    "log a number": "pb_utils.Logger.log_info(3)",
    "an instance's log": "pb_utils.Logger().log_info('a')",
    "tensor": "(lambda t: [t.name(), list(t.shape()), t.is_cpu(), t.as_numpy().tolist()])(pb_utils.Tensor('t', np.arange(4).reshape(2, 2)))",
    "tensor's shape": "type(pb_utils.Tensor('t', np.zeros((1, 2))).shape()).__name__",
    "tensor's dtype": "str(pb_utils.Tensor('t', np.zeros((1, 2))).triton_dtype())",
    "tensor of texts": "[str(each) for each in pb_utils.Tensor('t', np.array(['a', b'b'], dtype=object)).as_numpy()]",
    "tensor of fixed texts": "[str(pb_utils.Tensor('t', np.array(['ab', 'c'])).as_numpy().dtype), [str(each) for each in pb_utils.Tensor('t', np.array(['ab', 'c'])).as_numpy()]]",
    "tensor shares memory": "(lambda a: np.shares_memory(a, pb_utils.Tensor('t', a).as_numpy()))(np.zeros(3))",
    "tensor of a slice": "pb_utils.Tensor('t', np.arange(6)[::2]).as_numpy().tolist()",
    "input can be written": "bool(r.inputs()[0].as_numpy().flags.writeable)",
    "input is text": "[str(r.inputs()[0].as_numpy().dtype), type(r.inputs()[0].as_numpy()[0]).__name__]",
    "dlpack": "pb_utils.Tensor.from_dlpack('t', pb_utils.Tensor('s', np.arange(3, dtype=np.float32)).to_dlpack()).as_numpy().tolist()",
    "dlpack device": "[int(each) for each in pb_utils.Tensor('s', np.arange(3)).__dlpack_device__()]",
    "dlpack of numpy": "np.from_dlpack(pb_utils.Tensor('s', np.arange(3))).tolist()",
    "request": "(lambda q: [sorted(q.requested_output_names()), q.request_id(), q.flags(), q.timeout(), q.parameters(), len(q.inputs())])(pb_utils.InferenceRequest(model_name='m', requested_output_names=['y'], inputs=[]))",
    "request's names": "type(pb_utils.InferenceRequest(model_name='m', requested_output_names=['y'], inputs=[]).requested_output_names()).__name__",
    "own request's names": "type(r.requested_output_names()).__name__",
    "request's version": "pb_utils.InferenceRequest(model_name='m', requested_output_names=['y'], inputs=[], model_version=3).model_version()",
    "request without names": "type(pb_utils.InferenceRequest(model_name='m', inputs=[])).__name__",
    "request without a model": "type(pb_utils.InferenceRequest(requested_output_names=['y'], inputs=[])).__name__",
    "request without inputs": "type(pb_utils.InferenceRequest(model_name='m', requested_output_names=['y'])).__name__",
    "request of arrays": "type(pb_utils.InferenceRequest(model_name='m', requested_output_names=['y'], inputs=[np.zeros(1)])).__name__",
    "set_flags": "(lambda q: [q.set_flags(3), q.flags()])(pb_utils.InferenceRequest(model_name='m', requested_output_names=['y'], inputs=[]))",
    "preferred memory": "str(type(r.preferred_memory()).__name__)",
    "trace": "type(r.trace()).__name__",
    "trace's context": "str(r.trace().get_context())",
    "own request's model": "r.model_name()",
    "own request's version": "r.model_version()",
    "same sender": "type(r.get_response_sender()).__name__",
    "error's class": "[each.__name__ for each in pb_utils.TritonModelException.__mro__]",
    "error is an exception": "issubclass(pb_utils.TritonError, BaseException)",
    "error codes": "[int(getattr(pb_utils.TritonError, name)) for name in 'UNKNOWN INTERNAL NOT_FOUND INVALID_ARG UNAVAILABLE UNSUPPORTED ALREADY_EXISTS CANCELLED'.split()]",
    "preferred memory made": "type(pb_utils.PreferredMemory(pb_utils.TRITONSERVER_MEMORY_CPU, 0)).__name__",
    "current folder": "__import__('os').getcwd() in (self.args['model_repository'], self.args['model_repository'] + '/1')",
    "file": "__file__",
    "path": "[each for each in sys.path if 'helps' in each or 'functions' in each]",
    "module's name": "__name__",
    "class's module": "type(self).__module__",
    "standard output": "print('printed') or sys.stdout.isatty()",
    "main thread": "threading.current_thread() is threading.main_thread()",
    "signals": "__import__('signal').getsignal(__import__('signal').SIGINT) is not None",
    "variables": "sorted(each for each in __import__('os').environ if 'TRITON' in each)",
}
CALLS = f"""
    def initialize(self, args):
        self.args = args
        self.config = json.loads(args["model_config"])
{telling(FUNCTIONS)}"""
HELPED = """
    def execute(self, requests):
        return [answer(told(f"{NUMBER} {OTHER}")) for _ in requests]
"""
LATE = """
    def execute(self, requests):
        return [answer(pb_utils.Tensor("y", r.inputs()[0].as_numpy())) for r in requests]
"""
WARM = """
    def initialize(self, args):
        self.seen = []

    def execute(self, requests):
        found = []
        for r in requests:
            self.seen.append(r.inputs()[0].as_numpy().tolist())
            found.append(answer(told(self.seen)))
        return found
"""
RELOADED = """
    def initialize(self, args):
        self.count = 0

    def execute(self, requests):
        self.count += 1
        return [answer(told(str(self.count))) for _ in requests]
"""
MODELS = (
    *(
        Model(f"completes_{name}", COMPLETES.format(lines="\n".join(f"        {line}" for line in lines)))
        for name, lines in COMPLETED.items()
    ),
    Model("completes_partly", COMPLETES.format(lines=f"        {OUT}"), PARTLY),
    Model(
        "completes_known",
        COMPLETES.format(lines='        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [5]})'),
        config_of("x:FP32:3", "y:FP32:3"),
    ),
    Model("counts", COUNTS, TEXT),
    Model("loads", LOADS, TEXT),
    Model("late", LATE, config_of("x:FP32:-1", "y:FP32:-1")),
    Model("functions", CALLS, TEXT),
    Model(
        "helps",
        HELPED,
        config_of("x:FP32:1", "y:STRING:1"),
        {"1/helper.py": "NUMBER = 41\n", "1/other.py": "OTHER = 'o'\n"},
        head=HEAD.replace("import numpy", "from helper import NUMBER\nfrom .other import OTHER\nimport numpy"),
    ),
    Model(
        "warmed",
        WARM,
        config_of(
            "x:FP32:2",
            "y:STRING:1",
            more='model_warmup { name: "w" batch_size: 1 count: 2 inputs { key: "x" value { data_type: TYPE_FP32 dims: [2] zero_data: true } } }',
        ),
    ),
    Model("reloaded", RELOADED, config_of("x:FP32:1", "y:STRING:1")),
    Model(
        "two_instances",
        HELPED.replace("{NUMBER} {OTHER}", "fine"),
        config_of("x:FP32:1", "y:STRING:1", more="instance_group { count: 2 kind: KIND_CPU }"),
    ),
)


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for name in (*COMPLETED, "partly", "known"):
        model = f"completes_{name}"
        yield Case(f"completed: config, {name}", [Rpc("ModelConfig", {"name": model})])
        yield Case(f"completed: config over HTTP, {name}", [Http("GET", f"/v2/models/{model}/config")])
        yield Case(f"completed: metadata, {name}", [Rpc("ModelMetadata", {"name": model})])
        values = floats("x", 1, 2, 3, shape=(1, 3) if name in ("batch", "dynamic", "partly") else (3,))
        yield Case(f"completed: asked, {name}", [Infer(Request(model, [values]), GRPC)])
    for name in COUNTED:
        yield from by("metrics", name, doing("counts", name), (GRPC,))
    yield Case(
        "metrics: scraped",
        [Wait(Scrape(["differential_", "# HELP differential_", "# TYPE differential_"]), "differential_")],
    )
    for number, name in enumerate(LOADED):
        yield from by("load_model", f"{number} {name}", doing("loads", name), (GRPC,))
    for name in FUNCTIONS:
        yield from by("pb_utils", name, doing("functions", name), (GRPC,))
    yield from by("modules", "beside the model", Request("helps", [floats("x", 1)]), BOTH)
    yield from by("warm-up", "seen before", Request("warmed", [floats("x", 1, 2)]), (GRPC,))
    again = Infer(Request("reloaded", [floats("x", 1)]), GRPC)
    load, unload = (Http("POST", f"/v2/repository/models/reloaded/{what}") for what in ("load", "unload"))
    yield Case("repository: loaded again", [again, again, load, again])
    yield Case(
        "repository: unloaded and loaded",
        [again, unload, Wait(Http("GET", "/v2/models/reloaded/ready"), "400"), load, again],
    )
    yield Case(
        "repository: gRPC",
        [
            Rpc("RepositoryModelUnload", {"model_name": "reloaded"}),
            Wait(again, "code"),
            Rpc("RepositoryModelLoad", {"model_name": "reloaded"}),
            again,
        ],
    )
    yield Case(
        "repository: load an unknown one",
        [
            Http("POST", "/v2/repository/models/unheard_of/load"),
            Rpc("RepositoryModelLoad", {"model_name": "unheard_of"}),
        ],
    )
    yield Case(
        "repository: unload an unknown one",
        [
            Http("POST", "/v2/repository/models/unheard_of/unload"),
            Rpc("RepositoryModelUnload", {"model_name": "unheard_of"}),
        ],
    )
    yield Case("repository: index", [Http("POST", "/v2/repository/index"), Rpc("RepositoryIndex")])
    yield Case(
        "repository: index of ready ones",
        [Http("POST", "/v2/repository/index", {"ready": True}), Rpc("RepositoryIndex", {"ready": True})],
    )
    for model in (
        *("types", "sees_rows", "versioned", "sequence_rows", "streams", "chain", "chain_streams", "scores", "cached"),
        *("ragged_counted", "reshaped", "two_instances", "warmed", "told", "sums"),
    ):
        yield Case(f"metadata: {model}", [Rpc("ModelMetadata", {"name": model}), Http("GET", f"/v2/models/{model}")])
        yield Case(f"config: {model}", [Rpc("ModelConfig", {"name": model})])
        yield Case(f"config: {model} over HTTP", [Http("GET", f"/v2/models/{model}/config")])
        yield Case(
            f"ready: {model}",
            [
                Rpc("ModelReady", {"name": model}),
                Http("GET", f"/v2/models/{model}/ready"),
                Http("GET", f"/v2/models/{model}/versions/9/ready"),
            ],
        )
    yield Case("statistics: unused, over HTTP", [Http("GET", "/v2/models/two_instances/stats")])
    yield Case("statistics: unused", [Rpc("ModelStatistics", {"name": "two_instances"})])
    yield Case(
        "statistics: unknown",
        [Rpc("ModelStatistics", {"name": "unheard_of"}), Http("GET", "/v2/models/unheard_of/stats")],
    )
    yield Case(
        "server: live and ready",
        [Rpc("ServerLive"), Rpc("ServerReady"), Http("GET", "/v2/health/live"), Http("GET", "/v2/health/ready")],
    )
    yield from by("two instances", "one", Request("two_instances", [floats("x", 1)]), (GRPC, JSON))
