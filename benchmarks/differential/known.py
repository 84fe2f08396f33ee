"""What differs from Triton, and why: the table of `docs/reference/triton.md`, by which the comparison judges."""

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Known:
    """One difference that is meant.

    `area`, `what`, `why`: for the table. `difference`: a regular expression of the lines that `compare.Difference`
    writes, `PLACE: TRITON -> GANGWAY`; `cases`: one of the names of cases.
    """

    area: str
    what: str
    why: str
    difference: str
    cases: str = ""

    def covers(self, case: str, text: str) -> bool:
        """Whether a difference is this one."""
        return bool(re.search(self.cases, case) and re.search(self.difference, text, re.DOTALL))


_ERROR = r"^[\d.]*(message|error_message|body\.error): "
_TOLD = r"outputs\.y\.(data|binary): "  # by a model, in its output
HTTP, ERRORS, REQUESTS, ANSWERS = "HTTP", "Errors", "Requests", "Answers"
ENSEMBLES, STREAMS, CALLS, BATCHES = "Ensembles", "Streams", "Calls of other models", "Sequences, cache, statistics"
LEAVING = "Clients that leave"
MEMORY, MODULE, MODELS = "Shared memory and settings", "pb_utils", "Models and configurations"

KNOWN: Sequence[Known] = (
    Known(
        HTTP,
        "Errors have the content type `application/json`; in Triton it is `text/plain`.",
        "Their body is JSON.",
        r"content-type: 'text/plain' -> 'application/json'",
    ),
    Known(
        HTTP,
        "Answers without a body have no content type. `live` and `ready` of the server have a body, `ready` of a "
        "model has none.",
        "A probe by hand shows what it asks for.",
        r"content-type: '(application/json|text/plain)' -> 'nothing'|^[\d.]*body: 'nothing' -> \{'(live|ready)': True\}"
        r"|^[\d.]*body: \{'error': 'Model version not ready'\} -> 'nothing'",
    ),
    Known(
        HTTP,
        "An answer whose binary tensors have no elements is a binary one, too.",
        "Clients that ask for binary tensors get them, whatever their size.",
        r"content-type: 'application/json' -> 'application/octet-stream'|has_header_length: 'nothing' -> True",
        "without elements|no elements|: none|tokens of empty",
    ),
    Known(
        HTTP,
        "Wrong JSON is 400, in Triton often 500; a version that is no number is 400, in Triton 404.",
        "The client is wrong.",
        r"^[\d.]*status: (500|404) -> 400",
        "JSON|generate|wrong inputs|versions: no number|raw body|parameters|load: ",
    ),
    Known(
        HTTP,
        "FP32 is written with the digits that it has: `3e+38`, not `3.0000000054977558e+38`.",
        "Both are read as the same number.",
        r"data: .*3\.0000000054977558e\+38",
    ),
    Known(
        HTTP,
        "An element of BYTES that is no UTF-8 cannot be answered as JSON: an error says so.",
        "JSON has no other texts; Triton sends what JSON readers refuse.",
        r"outcome: .*UTF-8",
        "json",
    ),
    Known(
        HTTP,
        "Answers of `generate` are not chunked, those of `generate_stream` are unless they fail at once.",
        "Their length is known.",
        r"transfer-encoding: 'chunked' -> 'nothing'",
        "generate|events",
    ),
    Known(
        HTTP,
        "`generate_stream` that fails before its first event answers with JSON and the error's status.",
        "Nothing is streamed yet. Clients of HTTP look at the status.",
        r"content-type: 'text/event-stream.* -> 'application/json'|events: \[\{'error': .*\}\] -> 'nothing'"
        r"|body: 'nothing' -> \{'error'",
        "generate_stream",
    ),
    Known(
        HTTP,
        "`generate` of a model that sends another number of responses than one is 400; Triton's status is 200.",
        "The body is an error.",
        r"outcome: .*generate expects model to produce exactly 1 response.* -> 400 'generate expects",
        "generate",
    ),
    Known(
        HTTP,
        "An error of a model has its own status in `generate`, too; in Triton 400.",
        "As in inference: the client is not wrong.",
        r"status: 400 -> 50\d",
        "generate",
    ),
    Known(
        REQUESTS,
        "`request.parameters()` is JSON with blanks, and has no certain order.",
        "It is to be read by `json.loads`.",
        r"text_output: |size: ",
        "generate: (parameters|more members)",
    ),
    Known(
        HTTP,
        "The member `id` of a `generate` request is its id, and no parameter as well.",
        "A model that wants the id asks for it.",
        r"text_output: .*id|size: |events\.1: \{'id'|body\.(id|model_name|model_version|text_output"
        r"|number): 'nothing' -> ",
        "generate: an id",
    ),
    Known(
        HTTP,
        "A wrong method's answer has the header `Allow`.",
        "RFC 9110, 15.5.6.",
        r"allow: 'nothing' -> ",
    ),
    Known(
        ERRORS,
        "Messages do not begin with `[request id: ...]`.",
        "Clients know their ids, and the log has them.",
        _ERROR + r".\[request id: [^]]*\] ",
    ),
    Known(
        ERRORS,
        "Messages about wrong requests have further words, or others: the model, the tensor, what is expected.",
        "Code and status are Triton's.",
        _ERROR,
        "^(wrong|JSON|raw body|reshape|versions|types|outputs: float16|generate|parameters|ensembles: "
        "|stream: several|optional"
        "|decoupled: wrong|statistics: unknown|classification|queue|load: |public: )",
    ),
    Known(
        ERRORS,
        "An exception in a model is told without the lines of its code.",
        "They are in the log; clients need not know the server's files.",
        r"(message|error|reason|events): .*At:\\+n.* -> |outputs\.y\.data: .*At:\\+n.* -> ",
    ),
    Known(
        ERRORS,
        "A wrong result of `execute` is told in other words.",
        "Both say what was returned and what was expected.",
        r"(message|error): .*(Number of InferenceResponse objects do not match|Expected a list in the execute return"
        r"|Expected an 'InferenceResponse' object).* -> ",
    ),
    Known(
        ERRORS,
        "`TritonError.UNKNOWN` over HTTP is 500, as INTERNAL; in Triton 400.",
        "The client is not wrong.",
        r"status: 400 -> 500",
        "error codes: UNKNOWN",
    ),
    Known(
        ERRORS,
        "The text of a `TritonError` has 1000 characters at most.",
        "gRPC carries it in a header.",
        r"long long.* -> .*long long",
        "responses: long",
    ),
    Known(
        ERRORS,
        "Models that could not be loaded are UNAVAILABLE, with the reason; in Triton NOT_FOUND without it.",
        "Their files are there.",
        r"code: 'NOT_FOUND' -> 'UNAVAILABLE'|status: 404 -> 503"
        r"|(message|error): .*(has no available versions|is not found).* -> .*is not at ready state",
        "not loaded|completed|repository|configured",
    ),
    Known(
        ERRORS,
        "Statistics of an unknown model are NOT_FOUND, in Triton INVALID_ARGUMENT.",
        "All other methods say so.",
        r"code: 'INVALID_ARGUMENT' -> 'NOT_FOUND'|status: 400 -> 404",
        "statistics: unknown|versions' statistics",
    ),
    Known(
        REQUESTS,
        "An output that a request names twice is refused.",
        "Such a request is a mistake.",
        r"outcome: .*requested twice",
    ),
    Known(
        REQUESTS,
        "A negative timeout is refused.",
        "Triton ignores it.",
        r"outcome: .*parameter 'timeout'",
        "negative timeout",
    ),
    Known(
        REQUESTS,
        "`triton_enable_empty_final_response` is accepted over HTTP, too.",
        "A client may send the same parameters over both protocols.",
        r"outcome: .*parameter keys starting with 'triton_' are reserved.* -> ",
    ),
    Known(
        REQUESTS,
        "A request without a required input is refused, also if the model has optional inputs.",
        "Triton counts the inputs only, and the model fails.",
        r"code: 'INTERNAL' -> 'INVALID_ARGUMENT'|status: 500 -> 400|model_name: 'sums' -> 'nothing'"
        r"|0\.0\.parameters: .* -> 'nothing'",
        "the required one left out",
    ),
    Known(
        ANSWERS,
        "Outputs come in the order of the request, or of the configuration; in Triton as the model gave them, from "
        "ensembles in any order.",
        "An order that clients can know.",
        r"outputs order: ",
    ),
    Known(
        ANSWERS,
        "`numpy.bytes_` in an array of objects are bytes; in Triton the text `b'...'`.",
        "What a model means.",
        _TOLD + r".*b'ab'",
        "texts made: numpy bytes",
    ),
    Known(
        ENSEMBLES,
        "Responses do not repeat the request's `sequence_id`, `sequence_start` and `sequence_end`.",
        "Triton does so for ensembles only, with 0 and false for requests without a sequence.",
        r"parameters: \{'sequence_\w+': .*\} -> 'nothing'|sequence_\w+: .* -> 'nothing'",
        "ensemble|departs",
    ),
    Known(
        ENSEMBLES,
        "An error of a step names the step and its model.",
        "An ensemble has several.",
        _ERROR + r".in ensemble '(?P<name>\w+)', .* -> .in ensemble '(?P=name)', step \d+ \('\w+'\): ",
    ),
    Known(
        ENSEMBLES,
        "A request may name some of the outputs; Triton answers with an error then.",
        "A request gets what it asks for.",
        r"unexpected deadlock.* -> |code: 'INVALID_ARGUMENT' -> ",
        "asked",
    ),
    Known(
        ENSEMBLES,
        "A step with an input of shape [1] takes a scalar from the step before.",
        "Both have one element.",
        r"outcome: .*unexpected shape.* -> \{",
        "ensembles, outputs: scalar text",
    ),
    Known(
        STREAMS,
        "An empty final response has the model's version, too.",
        "As all others have.",
        r"model_version: 'nothing' -> '1'",
        "decoupled|stream",
    ),
    Known(
        STREAMS,
        "Calls that cannot reach a decoupled model are told in other words.",
        "Code and status are Triton's.",
        _ERROR + r".(ModelInfer RPC|HTTP end point) doesn't support models with decoupled",
    ),
    Known(
        STREAMS,
        "A wrong request to a decoupled model is INVALID_ARGUMENT in every call.",
        "Triton looks at the way of the call first.",
        r"code: 'UNIMPLEMENTED' -> 'INVALID_ARGUMENT'",
        "decoupled: wrong",
    ),
    Known(
        STREAMS,
        "The only response of a model that is not decoupled is final, also if the flag is sent after it.",
        "There are no others.",
        r"triton_final_response\.bool_param: False -> True",
        "senders",
    ),
    Known(
        STREAMS,
        "With `triton_grpc_error` all errors end the stream with their status; in Triton those of validation do not.",
        "A client asks for it.",
        r"(error_message|id|code|message): ",
        "with triton_grpc_error",
    ),
    Known(
        LEAVING,
        "`is_cancelled()` also tells of clients of HTTP, in steps of ensembles, and in models that models ask.",
        "Nobody waits for the answer there, either.",
        r"seen\.\d: \['(?P<model>\w+)', 'waited'\] -> \['(?P=model)', 'cancelled'\]",
        "departs: ",
    ),
    Known(
        LEAVING,
        "A request whose client leaves before it begins is never executed; Triton drops it unless an instance has "
        "been chosen for it.",
        "Nobody waits for the answer.",
        r"seen\.1: \['watches', 'cancelled'\] -> 'nothing'",
        "departs: queued",
    ),
    Known(
        LEAVING,
        "Requests whose clients have left are counted as failures (`CANCELED`); in Triton as successes.",
        "They have no answer.",
        r"(count|ns): |nv_inference",
        "departs: (statistics|metrics)",
    ),
    Known(
        CALLS,
        "Errors keep their code, and say what clients are told; in Triton all are INTERNAL, with words of their own.",
        "A model can tell them apart.",
        _TOLD + r".*\"code\": .* -> .*\"code\": ",
        "BLS",
    ),
    Known(
        CALLS,
        "`InferenceRequest` takes `priority`, and parameters as JSON.",
        "Newer Tritons take a priority.",
        _TOLD + r".*\"raised\"",
        "BLS, asks(_async)?: (a priority|parameters as a text)",
    ),
    Known(
        CALLS,
        "Responses have the outputs in the order in which the request names them.",
        "As for clients.",
        _TOLD + r".*\"order\": \[\"y\", \"z\"\].* -> .*\"order\": \[\"z\", \"y\"\]",
        "BLS",
    ),
    Known(
        BATCHES,
        "A text as a sequence's id is refused where the control input is a number.",
        "Triton gives the model 0, whatever the id.",
        r"outcome: .*is a string, but control input",
        "sequences",
    ),
    Known(
        BATCHES,
        "Errors are not cached; Triton answers the next equal request with a success without outputs.",
        "A client must see that there is no answer.",
        r"outcome: \{.* -> (UNAVAILABLE|503) 'an error'",
        "cache: error",
    ),
    Known(
        BATCHES,
        "The cache keeps answers by the outputs that are asked for; Triton answers with those of another request.",
        "A request gets what it asks for. Triton sometimes says `response output count mismatch`.",
        r"outputs\.[yz](\.data)?: |outcome: error 'response output count mismatch'",
        "cache: (other outputs|on a stream)",
    ),
    Known(
        BATCHES,
        "The cache compares parameters; Triton's does not.",
        "A model's answer may depend on them.",
        r"outputs\.[yz]\.data: \['?1'?\] -> \['?2'?\]",
        "cache: other parameters",
    ),
    Known(
        BATCHES,
        "Responses that are errors of the model are counted as failures, in Triton as successes; so are calls that "
        "cannot reach a decoupled model, and steps that an ensemble does not wait for after an error.",
        "The client gets an error. Executions that failed are counted as failures only.",
        r"(count|ns): |batch_stats|nv_inference",
        "statistics: (counted|cached|metrics)|public: statistics",
    ),
    Known(
        BATCHES,
        "Statistics have further counters, `gangway_...`.",
        "See [targets](../explanation/targets.md).",
        r"response_stats",
        "statistics|departs",
    ),
    Known(
        MODELS,
        "The configuration has the parameters that count, and no `optimization`; default values that Triton fills in "
        "for other hardware are left out.",
        "It shows what the server does.",
        r"optimization(\.\w+)?: |parameters(\.\w+)?: 'nothing' -> |preferred_batch_size: \[\d\] -> "
        r"|model_transaction_policy: "
        r"|max_inflight_requests: |minimum_slot_utilization: |\"optimization\"|eager_batching",
        "config|arguments|load: |public: versions",
    ),
    Known(
        MODELS,
        "A Python model without `execute`, or without inputs or outputs in its configuration, is not ready.",
        "Each request would fail.",
        r"no method 'execute'|outcome: \{'status': 200.* -> 400 ''|must specify 'input'|ready: True -> 'nothing'"
        r"|code: 'I\w+' -> 'UNAVAILABLE'|status: 500 -> 503|(completes_nothing|no_execute) 1(\.state)?: ",
        "no_execute|nothing|repository: index|load: empty object",
    ),
    Known(
        MODELS,
        "`KIND_GPU` means this machine's cores; in Triton without GPUs such a model is not loaded.",
        "A repository made for GPUs serves as it is; the log has a warning.",
        r"outcome: NOT_FOUND .* -> \{",
        "configured: group_gpu",
    ),
    Known(
        MODELS,
        "A configuration may have a `runtime`, and a `reshape` without dimensions for one element.",
        "What is meant is clear.",
        r"outcome: NOT_FOUND .* -> \{",
        "configured: has_(runtime|reshape)",
    ),
    Known(
        MODELS,
        "A configuration that names an input twice is refused.",
        "Such a configuration is a mistake.",
        r"outcome: \{.* -> UNAVAILABLE .*an input twice|code: 'INVALID_ARGUMENT' -> 'UNAVAILABLE'|message: ",
        "configured: has_input_twice",
    ),
    Known(
        MODELS,
        "A load without a configuration takes the one of the repository; in Triton that of the load before, until the "
        "model is unloaded.",
        "What is loaded does not depend on who has loaded it before.",
        r"max_batch_size: 2 -> 'nothing'|shape: \[-1, 1\] -> \[1\]",
        "load: (without|over gRPC)",
    ),
    Known(
        BATCHES,
        "A request's timeout also counts where the queue has none: it is a deadline, or the queue's timeout if the "
        "policy allows one. Triton's queues ignore it.",
        "Without a limit of the queue, any timeout is less. See [targets](../explanation/targets.md).",
        r"outcome: \{.* -> (UNAVAILABLE|503) .Request timeout expired",
        "queue: (no_default|short_queue), short",
    ),
    Known(
        BATCHES,
        "Warm-up requests are not counted.",
        "Statistics and metrics tell what clients have asked.",
        r"(count|ns|last_inference|batch_stats): |nv_inference",
        "warm-up: statistics",
    ),
    Known(
        MODELS,
        "The index has a version, state and reason of ensembles that could not be loaded.",
        "They are in the repository.",
        r"(version|state|reason): 'nothing' -> |chain_\w+( 1)?: ",
        "repository: index",
    ),
    Known(
        MODELS,
        "Reasons why a model was not loaded do not begin with `Internal:`.",
        "Readers want the reason.",
        r"(state|reason): .?Internal: .* -> ",
        "not loaded: load|repository: index",
    ),
    Known(
        MEMORY,
        "Several regions may lie on one segment.",
        "Clients with many tensors want it; each region is checked.",
        r"outcome: .*(failed to register|Invalid) shared memory region.* -> |body\.s: 'nothing' -> ",
        "memory: two regions",
    ),
    Known(
        MEMORY,
        "An output in shared memory has the parameters of its place over gRPC, too.",
        "As over HTTP.",
        r"outputs\.y\.parameters: 'nothing' -> \{'shared_memory",
        "memory",
    ),
    Known(
        MEMORY,
        "Messages say what is wrong with a region or setting.",
        "Code and status are Triton's.",
        _ERROR,
        "memory|logging|traces",
    ),
    Known(
        MEMORY,
        "Unknown settings of the log and of traces, and unknown trace levels, are refused; Triton ignores them.",
        "A setting that is spelled wrongly shows at once.",
        r"outcome: .* -> 400 .*unknown (log setting|trace setting|trace level)",
    ),
    Known(
        MEMORY,
        "Settings of a wrong type are 400, in Triton 500.",
        "The client is wrong.",
        r"status: 500 -> 400",
        "logging|traces",
    ),
    Known(
        MODULE,
        "Objects that are made of wrong things raise TritonModelException with the tensor's name; in Triton TypeError.",
        "The message says what is wrong.",
        _TOLD + r".*TypeError.* -> .*TritonModelException",
        "objects|pb_utils|decoupled",
    ),
    Known(
        MODULE,
        "More is accepted: scalars, masked arrays and fixed-width texts of numpy for tensors, `name=` for them, "
        "requests without names or inputs, any text for logs, a `tuple` from `execute`.",
        "What is meant is clear.",
        r"(TypeError|AttributeError|TritonModelException|Expected a list in the execute return, found type "
        r"'<class 'tuple'>').* -> ",
        "objects: (tensor of numpy's|name is|error of)|texts made: fixed text|pb_utils: (log a|an instance's log"
        "|tensor of fixed|request w|request of)|responses: tuple"
        "|habits: (keywords of a tensor|tensor of (0|a subclass))",
    ),
    Known(
        MODULE,
        "Response parameters, `priority()`, `model_name()`, `model_version()`, `preferred_memory()`, `InferenceTrace` "
        "and `triton_dtype()` work.",
        "Newer Tritons have them, or mean to.",
        r"(incompatible constructor arguments|AttributeError|TypeError).* -> ",
        "response parameters|says parameters|raw body: a text|objects: parameters|responses: with parameters"
        "|pb_utils: (names of|request's version|preferred memory|own request's|tensor's dtype)",
    ),
    Known(
        MODULE,
        "Classes and the module have further names.",
        "They are the server's own.",
        _TOLD,
        "pb_utils: names|pb_utils: same sender",
    ),
    Known(
        MODULE,
        "`requested_output_names()` is a list, in the order of the request; in Triton a set.",
        "Models can pass it on to `InferenceRequest`, which takes a list.",
        r"\"set\".* -> .*\"list\"",
        "pb_utils",
    ),
    Known(
        MODULE,
        "Text of `str(MetricFamily.COUNTER)`; the class of errors of `deserialize_bytes_tensor`.",
        "Models have no use for them.",
        r"MetricKind|'error'",
        "pb_utils: (metric kinds|deserialize cut)",
    ),
    Known(
        MODULE,
        "`TritonError` can be raised, and `TritonError.code()` is an `int`.",
        "A model may leave any depth with a code.",
        r"exceptions must derive from BaseException|__ErrorCode|\['false'\] -> \['true'\]",
        "raise: triton error|objects: error|pb_utils: error is an exception",
    ),
    Known(
        MODULE,
        "A model's files and output are UTF-8; in Triton that depends on the server's locale.",
        "A container without a locale has ASCII, and an error for `print` of other characters.",
        r"\"ascii\".* -> |UnicodeEncodeError.* -> ",
        "habits: (encoding|print of)",
    ),
    Known(
        MODULE,
        "A model's current folder is its own; SIGINT has Python's handler.",
        "Relative paths mean the model's files.",
        r"\['false'\] -> \['true'\]",
        "pb_utils: (current folder|signals)",
    ),
)
