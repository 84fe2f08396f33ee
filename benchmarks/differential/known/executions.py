"""How requests are executed: ensembles, streams, calls, batches, the cache, and what is counted."""

from collections.abc import Sequence

from benchmarks.differential.known.entry import ERROR, TOLD, Known

ENSEMBLES = "Ensembles"
STREAMS = "Streams"
LEAVING = "Clients that leave"
CALLS = "Calls of other models"
BATCHES = "Sequences, cache, statistics"

KNOWN: Sequence[Known] = (
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
        ERROR + r".in ensemble '(?P<name>\w+)', .* -> .in ensemble '(?P=name)', step \d+ \('\w+'\): ",
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
        ENSEMBLES,
        "Outputs may come from decoupled steps and from others; Triton does not load such an ensemble.",
        "Each response has all of them.",
        r"Request for unknown model|^0\.\d: 'nothing' -> |words_chain( 1)?: ",
        "words_chain|repository: index",
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
        ERROR + r".(ModelInfer RPC|HTTP end point) doesn't support models with decoupled",
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
        "The only response of a model that is not decoupled is final, also if the flag is sent after it. A model that "
        "sends another one gets the error; in Triton its client does.",
        "There are no others.",
        r"triton_final_response\.bool_param: False -> True|outcome: .*expected a single response, got 2",
        "senders|not decoupled",
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
        surprises="findings/triton_cancellation_ends_at_http_and_ensembles.sh",
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
        surprises="benchmarks/differential/kinds/departures.py",
    ),
    Known(
        CALLS,
        "Errors keep their code, and say what clients are told; in Triton all are INTERNAL, with words of their own.",
        "A model can tell them apart.",
        TOLD + r".*\"code\": .* -> .*\"code\": ",
        "BLS",
    ),
    Known(
        CALLS,
        "`InferenceRequest` takes `priority`, and parameters as JSON.",
        "Newer Tritons take a priority.",
        TOLD + r".*\"raised\"",
        "BLS, asks(_async)?: (a priority|parameters as a text)",
    ),
    Known(
        CALLS,
        "Responses have the outputs in the order in which the request names them.",
        "As for clients.",
        TOLD + r".*\"order\": \[\"y\", \"z\"\].* -> .*\"order\": \[\"z\", \"y\"\]",
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
        "Decoupled models have no sequences: such a model is not loaded.",
        "Not supported.",
        r"outcome: \{.* -> error .*sequence_batching is not supported for decoupled models|^0\.\d: .* -> 'nothing'"
        r"|sequence_streams( 1)?(\.state|\.reason)?: ",
        "sequences: decoupled|repository: index",
    ),
    Known(
        BATCHES,
        "A sequence's id that is too large for its control input is refused.",
        "Triton gives the model another number.",
        r"outcome: .*is too large for control input",
        "sequences",
    ),
    Known(
        BATCHES,
        "A control input of TYPE_STRING has the sequence's id; in Triton 2.51 requests with one are errors.",
        "Clients send texts as ids.",
        r"outcome: .*unexpected number of string elements 2 for inference input 'key'",
        "sequences: sequence_of_string",
        surprises="findings/triton_text_correlation_ids_are_refused.sh",
    ),
    Known(
        BATCHES,
        "Errors are not cached; Triton answers the next equal request with a success without outputs.",
        "A client must see that there is no answer.",
        r"outcome: \{.* -> (UNAVAILABLE|503) 'an error'",
        "cache: error",
        surprises="findings/triton_cached_error_is_empty_success.sh",
    ),
    Known(
        BATCHES,
        "The cache keeps answers by the outputs that are asked for; Triton answers with those of another request.",
        "A request gets what it asks for. Triton sometimes says `response output count mismatch`.",
        r"outputs\.[yz](\.data)?: |outcome: error 'response output count mismatch'",
        "cache: (other outputs|on a stream)",
        surprises="benchmarks/differential/kinds/batches.py",
    ),
    Known(
        BATCHES,
        "The cache compares parameters; Triton's does not.",
        "A model's answer may depend on them.",
        r"outputs\.[yz]\.data: \['?1'?\] -> \['?2'?\]",
        "cache: other parameters",
        surprises="benchmarks/differential/kinds/batches.py",
    ),
    Known(
        BATCHES,
        "Responses that are errors of the model are counted as failures, in Triton as successes; so are calls that "
        "cannot reach a decoupled model, and steps that an ensemble does not wait for after an error.",
        "The client gets an error. Executions that failed are counted as failures only.",
        r"(count|ns): |batch_stats|nv_inference",
        "statistics: (counted|cached|metrics)|public: statistics",
        surprises="benchmarks/differential/kinds/batches.py",
    ),
    Known(
        BATCHES,
        "Statistics have further counters, `gangway_...`.",
        "See [targets](../explanation/targets.md).",
        r"response_stats",
        "statistics|departs",
    ),
    Known(
        BATCHES,
        "A request's timeout also counts where the queue has none: it is a deadline, or the queue's timeout if the "
        "policy allows one. Triton's queues ignore it.",
        "Without a limit of the queue, any timeout is less. See [targets](../explanation/targets.md).",
        r"outcome: \{.* -> (UNAVAILABLE|503) .Request timeout expired",
        "queue: (no_default|short_queue), short",
        surprises="benchmarks/differential/kinds/configured.py",
    ),
    Known(
        BATCHES,
        "Warm-up requests are not counted.",
        "Statistics and metrics tell what clients have asked.",
        r"(count|ns|last_inference|batch_stats): |nv_inference",
        "warm-up: statistics",
        surprises="benchmarks/differential/kinds/configured.py",
    ),
)
