"""How requests, answers and errors are written: HTTP, messages, codes."""

from collections.abc import Sequence

from benchmarks.differential.known.entry import ERROR, Known

HTTP = "HTTP"
REQUESTS = "Requests"
ERRORS = "Errors"
ANSWERS = "Answers"

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
        "Numbers that their datatype does not have, and texts that are no UTF-8, are refused in JSON.",
        "Triton takes other numbers, and texts that JSON readers refuse.",
        r"outcome: .* -> 400 .*(is out of the range of|codec can't decode)",
        "JSON elements",
    ),
    Known(
        HTTP,
        "FP32 is written with the digits that it has: `3e+38`, not `3.0000000054977558e+38`.",
        "Both are read as the same number.",
        r"(data|y): .*(3\.0000000054977558e\+38|1\.401298464324817e-45|1\.0000000150474662e\+30|0\.12345679104328156)",
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
        HTTP,
        "The member `id` of a `generate` request is its id, and no parameter as well.",
        "A model that wants the id asks for it.",
        r"text_output: .*id|size: |events\.1: \{'id'|body\.(id|model_name|model_version|text_output"
        r"|number): 'nothing' -> ",
        "generate: an id",
    ),
    Known(HTTP, "A wrong method's answer has the header `Allow`.", "RFC 9110, 15.5.6.", r"allow: 'nothing' -> "),
    Known(
        REQUESTS,
        "Parameters of the kind `uint64_param`, and those without a value, are accepted over gRPC.",
        "The protocol has them.",
        r"outcome: INVALID_ARGUMENT .*invalid value type for 'p' parameter",
        "parameters: (64 bits|nothing)",
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
        ERRORS,
        "Messages do not begin with `[request id: ...]`.",
        "Clients know their ids, and the log has them.",
        ERROR + r".\[request id: [^]]*\] ",
    ),
    Known(
        ERRORS,
        "Messages about wrong requests have further words, or others: the model, the tensor, what is expected.",
        "Code and status are Triton's.",
        ERROR,
        "^(wrong|JSON|raw body|reshape|versions|types|outputs: float16|numbers given: float16|generate|parameters"
        "|ensembles: |stream: several|optional"
        "|decoupled: wrong|statistics: unknown|classification|queue|load: |public: )",
    ),
    Known(
        ERRORS,
        "An exception in a model is told without the lines of its code.",
        "They are in the log; clients need not know the server's files.",
        r"^(?!\d[\d.]* outcome).*(message|error|reason|events): .*At:\\+n.* -> |outputs\.y\.data: .*At:\\+n.* -> ",
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
        "not loaded|complet|repository|configured|files",
    ),
    Known(
        ERRORS,
        "Statistics of an unknown model are NOT_FOUND, in Triton INVALID_ARGUMENT.",
        "All other methods say so.",
        r"code: 'INVALID_ARGUMENT' -> 'NOT_FOUND'|status: 400 -> 404",
        "statistics: unknown|versions' statistics",
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
        "Subclasses of bytes in an array of objects, such as `numpy.bytes_`, are bytes; in Triton the text `b'...'`.",
        "What a model means.",
        r"(y|y\.data|y\.binary): .*b'(ab|own)'",
        "texts made: numpy bytes|texts given: a class of bytes",
    ),
)
