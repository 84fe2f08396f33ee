"""What a model sees of a request and of its configuration, and what it can say beside its outputs."""

from collections.abc import Iterator, Mapping

from benchmarks.differential.asked import (
    BINARY,
    BOTH,
    FEW,
    GRPC,
    JSON,
    STREAM,
    WAYS,
    Case,
    Http,
    Request,
    Rpc,
    Value,
    by,
    doing,
    floats,
    integers,
    texts,
)
from benchmarks.differential.models import TEXT, Model, config_of

SEES = """
    def execute(self, requests):
        found = []
        for r in requests:
            seen = {
                "id": r.request_id(), "correlation": [type(r.correlation_id()).__name__, r.correlation_id()],
                "flags": r.flags(), "timeout": r.timeout(),
                "parameters": json.loads(r.parameters()), "wanted": sorted(r.requested_output_names()),
                "inputs": [[t.name(), t.as_numpy().dtype.name, list(t.shape()), t.is_cpu()] for t in r.inputs()],
                "cancelled": r.is_cancelled(),
            }
            y, z = np.array([json.dumps(seen, sort_keys=True)], dtype=object), np.zeros(1, np.int32)
            if len(r.inputs()[0].shape()) == 2:
                y, z = y.reshape(1, 1), z.reshape(1, 1)
            found.append(answer(pb_utils.Tensor("y", y), pb_utils.Tensor("z", z)))
        return found
"""
SAYS = """
    def initialize(self, args):
        self.said = {
            "none": None, "empty": {}, "one": {"a": 1}, "text": {"a": "b"}, "flag": {"a": True, "b": False},
            "negative": {"a": -5}, "large": {"a": 2**62}, "several": {"b": 1, "a": "x", "c": False},
            "empty text": {"a": ""}, "unicode": {"h\\u00e9": "\\u4e2d"}, "lines": {"a": "x\\ny\\"z"},
            "id": {"id": "mine", "model_name": "other"}, "final": {"triton_final_response": False},
            "sequence": {"sequence_id": 3},
        }

    def execute(self, requests):
        return [answer(told("fine"), parameters=self.said[text(r)]) for r in requests]
"""
SAID = (
    *("none", "empty", "one", "text", "flag", "negative", "large", "several", "empty text", "unicode", "lines", "id"),
    "sequence",
)
TOLD = """
    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        found = []
        for r in requests:
            what = text(r)
            config = json.loads(self.args["model_config"])
            if what == "keys":
                value = sorted(self.args)
            elif what == "types":
                value = sorted({type(each).__name__ for each in self.args.values()})
            elif what == "config keys":
                value = sorted(config)
            elif what.startswith("config "):
                value = config.get(what[7:])
            else:
                value = self.args.get(what)
            value = np.array([json.dumps(value, sort_keys=True)], dtype=object)
            rows = (1, 1) if len(r.inputs()[0].shape()) == 2 else (1,)
            found.append(answer(pb_utils.Tensor("y", value.reshape(rows))))
        return found
"""
TOLDS = (
    *("keys", "types", "model_name", "model_version", "model_repository", "model_instance_name", "model_instance_kind"),
    *("model_instance_device_id", "config keys", "config name", "config platform", "config backend", "config runtime"),
    *("config version_policy", "config max_batch_size", "config input", "config output", "config batch_input"),
    *("config batch_output", "config optimization", "config instance_group", "config default_model_filename"),
    *("config cc_model_filenames", "config metric_tags", "config parameters", "config model_warmup"),
    *("config dynamic_batching", "config model_transaction_policy"),
)
VERSIONED = """
    def initialize(self, args):
        self.version = args["model_version"]

    def execute(self, requests):
        return [answer(told(self.version)) for _ in requests]
"""
SUMS = """
    def execute(self, requests):
        found = []
        for r in requests:
            a, b = (pb_utils.get_input_tensor_by_name(r, name) for name in "ab")
            b = np.zeros(1, np.float32) if b is None else b.as_numpy()
            found.append(answer(pb_utils.Tensor("y", a.as_numpy() + b)))
        return found
"""
SCORES = """
    def execute(self, requests):
        scores = np.array([[0.5, 2.0, -1.0]], np.float32)
        return [answer(pb_utils.Tensor("y", scores.repeat(len(r.inputs()[0].as_numpy()), 0))) for r in requests]
"""
SEEN = "a:FP32:-1 b:INT32:-1? c:STRING:-1?"
MODELS = (
    Model("sees", SEES, config_of(SEEN, "y:STRING:1 z:INT32:1")),
    Model(
        "sees_rows",
        SEES,
        config_of(
            SEEN,
            "y:STRING:1 z:INT32:1",
            batch=4,
            more="dynamic_batching { priority_levels: 3 default_priority_level: 2 }",
        ),
    ),
    Model("says", SAYS, TEXT),
    Model(
        "told",
        TOLD,
        config_of(
            "do:STRING:1",
            "y:STRING:1",
            more='parameters { key: "mine" value { string_value: "yes" } } dynamic_batching { }',
        ),
    ),
    Model(
        "told_rows",
        TOLD,
        config_of(
            "do:STRING:1",
            "y:STRING:1",
            batch=4,
            more="dynamic_batching { preferred_batch_size: [2] max_queue_delay_microseconds: 100 }",
        ),
    ),
    Model(
        "versioned", VERSIONED, config_of("x:FP32:1", "y:STRING:1", more="version_policy { all { } }"), versions=(1, 3)
    ),
    Model(
        "version_two",
        VERSIONED,
        config_of("x:FP32:1", "y:STRING:1", more="version_policy { specific { versions: [2] } }"),
        versions=(1, 2, 3),
    ),
    Model("sums", SUMS, config_of("a:FP32:1 b:FP32:1?", "y:FP32:1")),
    Model(
        "scores",
        SCORES,
        'backend: "python" max_batch_size: 4 input { name: "x" data_type: TYPE_FP32 dims: [1] } '
        'output { name: "y" data_type: TYPE_FP32 dims: [3] label_filename: "labels.txt" }',
        {"labels.txt": "cat\ndog\nbird\n"},
    ),
)
PARAMETERS: Mapping[str, Mapping[str, Value]] = {
    "a number": {"p": 3},
    "a negative number": {"p": -3},
    "a large number": {"p": 2**62},
    "a fraction": {"p": 1.5},
    "a text": {"p": "t"},
    "an empty text": {"p": ""},
    "unicode": {"h\u00e9": "\u4e2d"},
    "flags": {"p": True, "q": False},
    "several": {"c": 1, "a": "x", "b": False},
    "an empty name": {"": 1},
    "lines": {"p": 'x\ny"z'},
    "a priority": {"priority": 1},
    "priority 0": {"priority": 0},
    "priority 9": {"priority": 9},
    "priority as text": {"priority": "1"},
    "a negative priority": {"priority": -1},
    "a timeout": {"timeout": 5_000_000},
    "timeout 0": {"timeout": 0},
    "timeout as text": {"timeout": "5"},
    "a negative timeout": {"timeout": -5},
    "a sequence's id": {"sequence_id": 7},
    "a sequence's id as text": {"sequence_id": "seven"},
    "a sequence's start": {"sequence_id": 7, "sequence_start": True},
    "a sequence's start and end": {"sequence_id": 7, "sequence_start": True, "sequence_end": True},
    "a sequence's id 0": {"sequence_id": 0},
    "a start without id": {"sequence_start": True},
    "start as number": {"sequence_id": 7, "sequence_start": 1},
    "binary outputs": {"binary_data_output": False},
    "an unknown name of Triton's": {"triton_unknown": 1},
    "empty final response": {"triton_enable_empty_final_response": True},
}


# Elements as JSON has them: datatype, shape, data.
ELEMENTS: Mapping[str, tuple[str, str, str]] = {
    "two halves of a character": ("BYTES", "[1]", r'["\ud83d\ude00"]'),
    "a zero byte": ("BYTES", "[1]", r'["a\u0000b"]'),
    "an empty text": ("BYTES", "[1]", '[""]'),
    "escapes": ("BYTES", "[1]", r'["\"\\\/\b\f\n\r\t"]'),
    "half a character": ("BYTES", "[1]", r'["\ud83d"]'),
    "a tab as it is": ("BYTES", "[1]", '["a\tb"]'),
    "no UTF-8": ("BYTES", "[1]", '["\xff"]'),
    "UTF-8": ("BYTES", "[1]", '["\xc3\xbc"]'),
    "texts in lists": ("BYTES", "[2]", '[["a"], ["b"]]'),
    "a text for a list": ("BYTES", "[1]", '"a"'),
    "a number for a text": ("BYTES", "[1]", "[1]"),
    "a flag for a text": ("BYTES", "[1]", "[true]"),
    "null for a text": ("BYTES", "[1]", "[null]"),
    "too few texts": ("BYTES", "[2]", '["a"]'),
    "too many texts": ("BYTES", "[1]", '["a", "b"]'),
    "no texts": ("BYTES", "[0]", "[]"),
    "256 as UINT8": ("UINT8", "[1]", "[256]"),
    "-1 as UINT8": ("UINT8", "[1]", "[-1]"),
    "128 as INT8": ("INT8", "[1]", "[128]"),
    "2**31 as INT32": ("INT32", "[1]", "[2147483648]"),
    "2**63 as INT64": ("INT64", "[1]", "[9223372036854775808]"),
    "2**64 as UINT64": ("UINT64", "[1]", "[18446744073709551616]"),
    "the most as UINT64": ("UINT64", "[1]", "[18446744073709551615]"),
    "1.0 as INT32": ("INT32", "[1]", "[1.0]"),
    "1.5 as INT32": ("INT32", "[1]", "[1.5]"),
    "1e2 as INT32": ("INT32", "[1]", "[1e2]"),
    "1 as FP32": ("FP32", "[1]", "[1]"),
    "a long number as FP32": ("FP32", "[1]", "[0.1234567890123456789012345678901234567890]"),
    "1e39 as FP32": ("FP32", "[1]", "[1e39]"),
    "1e400 as FP64": ("FP64", "[1]", "[1e400]"),
    "-0.0": ("FP32", "[1]", "[-0.0]"),
    "0 and 1 as BOOL": ("BOOL", "[2]", "[0, 1]"),
    "2 as BOOL": ("BOOL", "[1]", "[2]"),
    "a text as BOOL": ("BOOL", "[1]", '["true"]'),
    "numbers in lists": ("INT32", "[2]", "[[1], [2]]"),
    "deep lists": ("INT32", "[1]", "[[[[1]]]]"),
    "a number for a list": ("INT32", "[1]", "1"),
    "an object for a list": ("INT32", "[1]", '{"0": 1}'),
    "null for a list": ("INT32", "[1]", "null"),
}


def cases() -> Iterator[Case]:
    """Yield the cases."""
    a, b, c = floats("a", 1), integers("b", 1, 2), texts("c", "t")
    for name, parameters in PARAMETERS.items():
        ways = (*BOTH, STREAM) if "name of" not in name else BOTH
        yield from by("parameters", name, Request("sees", [a], parameters=parameters), ways)
        row = floats("a", 1, shape=(1, 1))
        if "priority" in name or "timeout" in name:
            yield from by("parameters of batches", name, Request("sees_rows", [row], parameters=parameters), BOTH)
    for name, value in {
        "64 bits": {"uint64_param": str(2**64 - 1)},
        "a double": {"double_param": 1.5},
        "nothing": {},
        "bytes of text": {"string_param": "\u00fc"},
    }.items():
        message = {
            "model_name": "sees",
            "parameters": {"p": value},
            "inputs": [{"name": "a", "datatype": "FP32", "shape": [1], "contents": {"fp32_contents": [1]}}],
        }
        yield Case(f"parameters: {name}, message", [Rpc("ModelInfer", message)])
    for name in ("id7", "", "h\u00e9", "with blanks", "x" * 300, "0"):
        yield from by("ids", name[:20], Request("sees", [a], id=name), (GRPC, STREAM, JSON))
    yield from by("order", "a b c", Request("sees", [a, b, c]), WAYS)
    yield from by("order", "c b a", Request("sees", [c, b, a]), WAYS)
    yield from by("order", "b a", Request("sees", [b, a]), FEW)
    yield from by(
        "order", "rows", Request("sees_rows", [texts("c", "t", shape=(1, 1)), floats("a", 1, shape=(1, 1))]), FEW
    )
    for wanted in (["y"], ["z"], ["z", "y"], ["y", "z"]):
        yield from by("wanted", " ".join(wanted), Request("sees", [a], wanted), (GRPC, STREAM, JSON, BINARY))
    for headers in ({"x-user": "me"}, {"x-user": "me", "x-more": "1"}, {"other": "no"}, {"x-p": "1"}):
        request = Request("sees", [a], parameters={"p": "own"}, headers=headers)
        yield from by("headers", " ".join(headers), request, (GRPC, STREAM, JSON))
    yield from by(
        "headers",
        "the name of a parameter",
        Request("sees", [a], parameters={"x-p": "own"}, headers={"x-p": "1"}),
        BOTH,
    )
    for name in SAID:
        yield from by("response parameters", name, doing("says", name), (GRPC, STREAM, JSON, BINARY))
    for name in TOLDS:
        yield from by("arguments", name, doing("told", name), (GRPC,))
        yield from by("arguments of batches", name, doing("told_rows", name, rows=True), (GRPC,))
    for version in ("", "1", "2", "3"):
        yield from by(
            "versions",
            f"all, {version or 'none'} asked",
            Request("versioned", [floats("x", 1)], version=version),
            (GRPC, STREAM, JSON),
        )
        yield from by(
            "versions",
            f"two, {version or 'none'} asked",
            Request("version_two", [floats("x", 1)], version=version),
            BOTH,
        )
    yield from by("optional", "left out", Request("sums", [floats("a", 1)]), WAYS)
    yield from by("optional", "given", Request("sums", [floats("a", 1), floats("b", 2)]), WAYS)
    yield from by("optional", "the required one left out", Request("sums", [floats("b", 1)]), WAYS)
    row = floats("x", 1, shape=(1, 1))
    for count in (1, 2, 3, 9):
        request = Request("scores", [row], ["y"], output_parameters={"classification": count})
        yield from by("classification", str(count), request, (GRPC, JSON, BINARY))
    yield Case("JSON: no tensors", [Http("POST", "/v2/models/sums/infer", {})])
    for what, body in {
        "no JSON": b"{",
        "nothing": b"",
        "a list": b"[]",
        "a number": b"3",
        "inputs is an object": b'{"inputs": {}}',
        "an input without a name": b'{"inputs": [{"shape": [1], "datatype": "FP32", "data": [1]}]}',
        "an input without a type": b'{"inputs": [{"name": "a", "shape": [1], "data": [1]}]}',
        "an input without a shape": b'{"inputs": [{"name": "a", "datatype": "FP32", "data": [1]}]}',
        "an input without data": b'{"inputs": [{"name": "a", "datatype": "FP32", "shape": [1]}]}',
        "an unknown type": b'{"inputs": [{"name": "a", "datatype": "FP31", "shape": [1], "data": [1]}]}',
        "nested data": b'{"inputs": [{"name": "a", "datatype": "FP32", "shape": [1], "data": [[1]]}]}',
        "unevenly nested data": b'{"inputs": [{"name": "a", "datatype": "FP32", "shape": [1], "data": [[], [[1]]]}]}',
        "a text for a number": b'{"inputs": [{"name": "a", "datatype": "FP32", "shape": [1], "data": ["1"]}]}',
        "a flag for a number": b'{"inputs": [{"name": "a", "datatype": "FP32", "shape": [1], "data": [true]}]}',
        "null for a number": b'{"inputs": [{"name": "a", "datatype": "FP32", "shape": [1], "data": [null]}]}',
        "a shape of texts": b'{"inputs": [{"name": "a", "datatype": "FP32", "shape": ["1"], "data": [1]}]}',
        "a shape of fractions": b'{"inputs": [{"name": "a", "datatype": "FP32", "shape": [1.0], "data": [1]}]}',
        "an unknown member": b'{"inputs": [{"name": "a", "datatype": "FP32", "shape": [1], "data": [1]}], "more": 1}',
        "an id that is a number": b'{"id": 7, "inputs": [{"name": "a", "datatype": "FP32", "shape": [1], "data": [1]}]}',
        "parameters are a list": b'{"parameters": [], "inputs": [{"name": "a", "datatype": "FP32", "shape": [1], "data": [1]}]}',
        "a parameter is null": b'{"parameters": {"p": null}, "inputs": [{"name": "a", "datatype": "FP32", "shape": [1], "data": [1]}]}',
        "a parameter is an object": b'{"parameters": {"p": {}}, "inputs": [{"name": "a", "datatype": "FP32", "shape": [1], "data": [1]}]}',
        "an output without a name": b'{"inputs": [{"name": "a", "datatype": "FP32", "shape": [1], "data": [1]}], "outputs": [{}]}',
        "outputs is empty": b'{"inputs": [{"name": "a", "datatype": "FP32", "shape": [1], "data": [1]}], "outputs": []}',
        "a comma too many": b'{"inputs": [{"name": "a", "datatype": "FP32", "shape": [1], "data": [1],}]}',
        "NaN": b'{"inputs": [{"name": "a", "datatype": "FP32", "shape": [1], "data": [NaN]}]}',
        "more behind": b'{"inputs": [{"name": "a", "datatype": "FP32", "shape": [1], "data": [1]}]} more',
        "a number as 1e0": b'{"inputs": [{"name": "a", "datatype": "FP32", "shape": [1], "data": [1e0]}]}',
    }.items():
        yield Case(f"JSON: {what}", [Http("POST", "/v2/models/sums/infer", body)])
    for what, (datatype, shape, data) in ELEMENTS.items():
        told = f'"name": "{datatype.lower()}", "datatype": "{datatype}", "shape": {shape}, "data": {data}'
        asked = f'{{"inputs": [{{{told}}}]}}'.encode("latin-1")
        yield Case(f"JSON elements: {what}", [Http("POST", "/v2/models/types/infer", asked)])
    raw = {"inference-header-content-length": "0"}
    yield Case("raw body: a float", [Http("POST", "/v2/models/versioned/infer", b"\0\0\x80?", raw)])
    yield Case("raw body: too short", [Http("POST", "/v2/models/versioned/infer", b"\0\0", raw)])
    yield Case("raw body: two inputs", [Http("POST", "/v2/models/sums/infer", b"\0\0\x80?", raw)])
    yield Case("raw body: a text", [Http("POST", "/v2/models/says/infer", b"one", raw)])
    yield Case("raw body: any size", [Http("POST", "/v2/models/lengths/infer", b"\xff\xd8\0", raw)])
