"""Exceptions, errors of responses, wrong results of `execute`, models that cannot be loaded."""

from collections.abc import Iterator

from benchmarks.differential.asked import BINARY, BOTH, GRPC, STREAM, Case, Http, Infer, Request, Rpc, by, doing, floats
from benchmarks.differential.models import TEXT, Model

RAISES = """
    def execute(self, requests):
        do = text(requests[0])
        if do == "value error":
            raise ValueError("no value")
        if do == "own class":
            raise type("OwnError", (Exception,), {})("own text")
        if do == "key error":
            return {}["missing"]
        if do == "no text":
            raise RuntimeError
        if do == "empty text":
            raise RuntimeError("")
        if do == "lines":
            raise ValueError("one\\ntwo\\n  three")
        if do == "unicode":
            raise ValueError("h\\u00e9 \\u4e2d")
        if do == "two arguments":
            raise ValueError("one", 2)
        if do == "chained":
            try:
                1 / 0
            except ZeroDivisionError as error:
                raise RuntimeError("second") from error
        if do == "assertion":
            assert do == "", "it must be empty"
        if do == "model exception":
            raise pb_utils.TritonModelException("of the model")
        if do == "triton error":
            raise pb_utils.TritonError("of triton")
        if do == "stop iteration":
            raise StopIteration("enough")
        if do == "memory":
            raise MemoryError("no memory")
        if do == "os error":
            open("/nonexistent/file")
        if do == "import":
            import no_such_module
        if do == "exit":
            sys.exit("goodbye")
        if do == "exit 0":
            sys.exit(0)
        if do == "attribute":
            requests[0].no_such_method()
        if do == "deep":
            def deep(n):
                return deep(n - 1) if n else [].pop()
            deep(3)
        if do == "group":
            raise ExceptionGroup("several", [ValueError("a"), TypeError("b")])
        if do == "notes":
            error = ValueError("noted")
            error.add_note("a note")
            raise error
        return [answer(told("fine")) for _ in requests]
"""
RAISED = (
    *("value error", "own class", "key error", "no text", "empty text", "lines", "unicode", "two arguments", "chained"),
    *("assertion", "model exception", "triton error", "stop iteration", "memory", "os error", "import", "attribute"),
    *("deep", "group", "notes"),
)
RESPONDS = """
    def execute(self, requests):
        do, right = text(requests[0]), answer(told("fine"))
        error = pb_utils.TritonError
        codes = ("UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS",
                 "CANCELLED")
        if do in codes:
            return [answer(error=error("it is " + do, getattr(error, do)))]
        if do == "no code":
            return [answer(error=error("without a code"))]
        if do == "lines":
            return [answer(error=error("one\\ntwo"))]
        if do == "empty":
            return [answer(error=error(""))]
        if do == "unicode":
            return [answer(error=error("h\\u00e9 100 %"))]
        if do == "long":
            return [answer(error=error("long " * 1000))]
        if do == "with outputs":
            return [answer(told("fine"), error=error("beside outputs"))]
        if do == "with parameters":
            return [answer(error=error("beside parameters"), parameters={"a": 1})]
        if do == "positional":
            return [pb_utils.InferenceResponse([], error("positional"))]
        if do == "no responses":
            return []
        if do == "two responses":
            return [right, right]
        if do == "tuple":
            return (right,)
        if do == "generator":
            return (each for each in [right])
        if do == "one response":
            return right
        if do == "dictionary":
            return {"y": right}
        if do == "text":
            return "fine"
        if do == "list of texts":
            return ["fine"]
        if do == "list of tensors":
            return [told("fine")]
        if do == "list of errors":
            return [error("in a list")]
        return [right for _ in requests]
"""
CODES = ("UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE", "UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED")
RESPONDED = (
    *("no code", "lines", "empty", "unicode", "long", "with outputs", "with parameters", "positional", "no responses"),
    *("two responses", "tuple", "generator", "one response", "dictionary", "text", "list of texts", "list of tensors"),
    "list of errors",
)
MAKES = """
    def execute(self, requests):
        do = text(requests[0])
        made = {
            "tensor of a list": lambda: pb_utils.Tensor("y", [1, 2]),
            "tensor of None": lambda: pb_utils.Tensor("y", None),
            "tensor of a number": lambda: pb_utils.Tensor("y", 3),
            "tensor of bytes": lambda: pb_utils.Tensor("y", b"abc"),
            "tensor of numpy's number": lambda: pb_utils.Tensor("y", np.float32(1)),
            "tensor of complex": lambda: pb_utils.Tensor("y", np.zeros(1, np.complex64)),
            "tensor of dates": lambda: pb_utils.Tensor("y", np.zeros(1, "datetime64[s]")),
            "tensor of long double": lambda: pb_utils.Tensor("y", np.zeros(1, np.longdouble)),
            "name is None": lambda: pb_utils.Tensor(None, np.zeros(1)),
            "name is empty": lambda: pb_utils.Tensor("", np.zeros(1)).name(),
            "name is bytes": lambda: pb_utils.Tensor(b"y", np.zeros(1)).name(),
            "no arguments": lambda: pb_utils.Tensor(),
            "response of None": lambda: pb_utils.InferenceResponse([None]),
            "response of nothing": lambda: pb_utils.InferenceResponse().output_tensors(),
            "response of a tensor": lambda: pb_utils.InferenceResponse(pb_utils.Tensor("y", np.zeros(1))),
            "response of arrays": lambda: pb_utils.InferenceResponse([np.zeros(1)]),
            "error of a text": lambda: pb_utils.InferenceResponse(error="text"),
            "error of an exception": lambda: pb_utils.InferenceResponse(error=ValueError("a")),
            "error code 99": lambda: pb_utils.TritonError("a", 99).code(),
            "error message": lambda: pb_utils.TritonError("a", pb_utils.TritonError.NOT_FOUND).message(),
            "error code": lambda: pb_utils.TritonError("a", pb_utils.TritonError.NOT_FOUND).code(),
            "error default code": lambda: pb_utils.TritonError("a").code(),
            "error of a number": lambda: pb_utils.TritonError(3),
            "parameters with a list": lambda: pb_utils.InferenceResponse([], parameters={"a": [1]}).parameters(),
            "parameters with None": lambda: pb_utils.InferenceResponse([], parameters={"a": None}).parameters(),
            "parameters with a float": lambda: pb_utils.InferenceResponse([], parameters={"a": 1.5}).parameters(),
            "parameters": lambda: pb_utils.InferenceResponse([], parameters={"a": 1, "b": "c", "d": True}).parameters(),
            "parameters as a text": lambda: pb_utils.InferenceResponse([], parameters='{"a": 1}').parameters(),
            "parameters key": lambda: pb_utils.InferenceResponse([], parameters={1: 2}).parameters(),
            "has error": lambda: pb_utils.InferenceResponse(error=pb_utils.TritonError("a")).has_error(),
            "has no error": lambda: pb_utils.InferenceResponse([]).has_error(),
            "error of a right response": lambda: pb_utils.InferenceResponse([]).error(),
            "missing input": lambda: pb_utils.get_input_tensor_by_name(requests[0], "nothing"),
            "missing output": lambda: pb_utils.get_output_tensor_by_name(pb_utils.InferenceResponse([]), "y"),
        }[do]
        try:
            value = made()
            value = repr(value) if value is None or isinstance(value, (str, int, list, bool)) else type(value).__name__
        except BaseException as error:
            value = type(error).__name__
        return [answer(told(value))]
"""
MADE = (
    *("tensor of a list", "tensor of None", "tensor of a number", "tensor of bytes", "tensor of numpy's number"),
    *("tensor of complex", "tensor of dates", "tensor of long double", "name is None", "name is empty"),
    *("name is bytes", "no arguments", "response of None", "response of nothing", "response of a tensor"),
    *("response of arrays", "error of a text", "error of an exception", "error code 99", "error message", "error code"),
    *("error default code", "error of a number", "parameters with a list", "parameters with None"),
    *("parameters with a float", "parameters", "parameters as a text", "parameters key", "has error", "has no error"),
    *("error of a right response", "missing input", "missing output"),
)
BROKEN = {
    "init_raises": Model(
        "init_raises",
        "def initialize(self, args):\n    raise ValueError('no weights')\ndef execute(self, requests):\n    return []",
        TEXT,
    ),
    "init_exits": Model(
        "init_exits",
        "def initialize(self, args):\n    sys.exit('no licence')\ndef execute(self, requests):\n    return []",
        TEXT,
    ),
    "no_execute": Model("no_execute", "def initialize(self, args):\n    pass", TEXT),
    "syntax": Model("syntax", "def execute(self, requests) return", TEXT),
    "no_module": Model(
        "no_module", "def execute(self, requests):\n    return []", TEXT, head="import no_such_module\n\n\n"
    ),
    "no_arguments": Model(
        "no_arguments", "def initialize(self):\n    pass\ndef execute(self, requests):\n    return []", TEXT
    ),
    "import_raises": Model(
        "import_raises",
        "def execute(self, requests):\n    return []",
        TEXT,
        head="raise RuntimeError('not here')\n\n\n",
    ),
}
MODELS = (
    Model("raises", RAISES, TEXT),
    Model("responds", RESPONDS, TEXT),
    Model("makes", MAKES, TEXT),
    *BROKEN.values(),
    Model(
        "finalize_raises",
        "def execute(self, requests):\n    return [answer(told('fine')) for _ in requests]\ndef finalize(self):\n    raise ValueError('not finished')",
        TEXT,
    ),
)


def cases() -> Iterator[Case]:
    """Yield the cases; a right request follows each error."""
    right = doing("raises", "right")
    for name in RAISED:
        request = doing("raises", name)
        yield from by("raise", name, request, BOTH)
        if name in ("value error", "lines", "unicode", "model exception"):
            yield from by("raise", name, request, (STREAM, BINARY))
        yield Case(f"raise: then right, {name}", [Infer(right, GRPC)])
    for name in ("exit", "exit 0"):
        request = doing("raises", name)
        yield from by("exit", name, request, (GRPC, STREAM))
        yield Case(f"exit: then right, {name}", [Infer(right, GRPC)])
    for name in CODES:
        yield from by("error codes", name, doing("responds", name), (*BOTH, STREAM, BINARY))
    for name in RESPONDED:
        yield from by("responses", name, doing("responds", name), BOTH)
        yield Case(f"responses: then right, {name}", [Infer(doing("responds", "right"), GRPC)])
    for name in MADE:
        yield from by("objects", name, doing("makes", name), (GRPC,))
    for name in (*BROKEN, "unheard_of"):
        request = doing(name, "right")
        yield from by("not loaded", name, request, BOTH)
        yield Case(
            f"not loaded: ready, {name}", [Http("GET", f"/v2/models/{name}/ready"), Rpc("ModelReady", {"name": name})]
        )
        yield Case(
            f"not loaded: metadata, {name}", [Http("GET", f"/v2/models/{name}"), Rpc("ModelMetadata", {"name": name})]
        )
        yield Case(f"not loaded: load, {name}", [Http("POST", f"/v2/repository/models/{name}/load")])
    yield from by("versions", "unknown version", doing("raises", "right", version="7"), (*BOTH, STREAM))
    yield from by("versions", "no number", doing("raises", "right", version="x"), BOTH)
    yield Case(
        "finalize: raises",
        [
            Infer(doing("finalize_raises", "a"), GRPC),
            Http("POST", "/v2/repository/models/finalize_raises/unload"),
            Http("POST", "/v2/repository/models/finalize_raises/load"),
            Infer(doing("finalize_raises", "a"), GRPC),
        ],
    )
    yield from by("wrong inputs", "a number for a text", Request("raises", [floats("do", 1)]), (GRPC, BINARY))
