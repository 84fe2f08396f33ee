"""What models are and find: configurations, the repository, shared memory and settings, `pb_utils`."""

from collections.abc import Sequence

from benchmarks.differential.known.entry import ERROR, TOLD, Known

MODELS = "Models and configurations"
MEMORY = "Shared memory and settings"
MODULE = "pb_utils"

KNOWN: Sequence[Known] = (
    Known(
        MODELS,
        "The configuration has the parameters that count, and no `optimization`; default values that Triton fills in "
        "for other hardware are left out.",
        "It shows what the server does.",
        r"optimization(\.\w+)?: |parameters(\.\w+)?: 'nothing' -> |preferred_batch_size(\\?\"|): \[\d\].* -> "
        r"|model_transaction_policy: "
        r"|max_inflight_requests: |minimum_slot_utilization: |\"optimization\"|eager_batching",
        "config|arguments|load: |public: versions|reading: batching",
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
        r"outcome: NOT_FOUND .* -> \{|group_gpu(_zero)? 1(\.state|\.reason)?: ",
        "configured: group_gpu|repository: index",
    ),
    Known(
        MODELS,
        "A configuration may have a `runtime`, and a `reshape` without dimensions for one element.",
        "What is meant is clear.",
        r"outcome: NOT_FOUND .* -> \{|has_(runtime|reshape) 1(\.state|\.reason)?: ",
        "configured: has_(runtime|reshape)|repository: index",
    ),
    Known(
        MODELS,
        "A configuration that names an input twice is refused.",
        "Such a configuration is a mistake.",
        r"outcome: \{.* -> UNAVAILABLE .*an input twice|code: 'INVALID_ARGUMENT' -> 'UNAVAILABLE'|message: "
        r"|has_input_twice( 1)?: ",
        "configured: has_input_twice|repository: index",
    ),
    Known(
        MODELS,
        "A load without a configuration takes the one of the repository; in Triton that of the load before, until the "
        "model is unloaded.",
        "What is loaded does not depend on who has loaded it before.",
        r"max_batch_size: 2 -> 'nothing'|shape: \[-1, 1\] -> \[1\]",
        "load: (without|over gRPC)",
        surprises="benchmarks/differential/kinds/configured.py",
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
        "A model whose configuration is refused has no version in the index.",
        "Which one would be served is not known.",
        r"has_shape_tensor( 1)?: ",
        "repository: index",
    ),
    Known(
        MODELS,
        "Reasons why a model was not loaded do not begin with `Internal:`, and may have other words.",
        "Readers want the reason.",
        r"(state|reason): .?(Internal|Invalid argument|Not found): .* -> ",
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
        ERROR,
        "memory|logging|traces",
    ),
    Known(
        MEMORY,
        "Unknown settings of the log and of traces, and unknown trace levels, are refused; Triton ignores them.",
        "A setting that is spelled wrongly shows at once.",
        r"outcome: .* -> 400 .*unknown (log setting|trace setting|trace level)",
        surprises="benchmarks/differential/kinds/settings.py",
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
        TOLD + r".*TypeError.* -> .*TritonModelException",
        "objects|pb_utils|decoupled",
    ),
    Known(
        MODULE,
        "More is accepted: scalars, masked arrays and fixed-width texts of numpy for tensors, `name=` for them, "
        "requests without names or inputs, any text for logs, a `tuple` from `execute`, `async for` over responses.",
        "What is meant is clear.",
        r"(TypeError|AttributeError|TritonModelException|Expected a list in the execute return, found type "
        r"'<class 'tuple'>').* -> |^0\.1: 'nothing' -> ",
        "outputs: scalar for one axis|objects: (tensor of numpy's|name is|error of)|texts made: fixed text"
        "|pb_utils: (log a|an instance's log"
        "|tensor of fixed|request w|request of)|responses: tuple"
        "|habits: (keywords of a tensor|tensor of (0|a subclass))|arrays: tensor of characters|ends: streams in a loop"
        "|texts given: (no axis, characters|fixed in two axes|fixed, turned|JSON as characters|characters beyond)",
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
        TOLD,
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
