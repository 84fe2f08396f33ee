"""What becomes of every field of a model's configuration. Data, on which `config.py` acts, and how a parameter is read.

A field is named after its message, as in model_config.proto. What stands for a field that holds a message and is
refused or accepted as a whole stands for everything within it. `docs/generate.py` writes it into
docs/reference/config.md.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from gangway.protos.model_config_pb2 import ModelConfig


class Support(StrEnum):
    """What becomes of a field that is set."""

    HONOURED = "honoured"
    ACCEPTED = "accepted"  # it has no meaning here and cannot change an answer; the log names it when a model is loaded
    REFUSED = "refused"  # the model is not ready, the reason names it


class FieldSupport(msgspec.Struct, frozen=True):
    """One field. `note`: how it is honoured, why it means nothing here, or why it is refused."""

    support: Support
    note: str


def _honoured(note: str) -> FieldSupport:
    return FieldSupport(Support.HONOURED, note)


def _accepted(note: str) -> FieldSupport:
    return FieldSupport(Support.ACCEPTED, note)


def _refused(note: str) -> FieldSupport:
    return FieldSupport(Support.REFUSED, note)


def parameter_of(config: ModelConfig, name: str, default: str = "") -> str:
    """Return a parameter's text. To ask the map itself for what is not there would put it there."""
    return config.parameters[name].string_value if name in config.parameters else default


def support_of_parameter(name: str) -> FieldSupport | None:
    """Return what becomes of a parameter; None if it is unknown."""
    return PARAMETERS.get(SESSION_OPTIONS if name.startswith(SESSION_OPTIONS.rstrip("*")) else name)


def concurrency_of(config: ModelConfig) -> int:
    """Return how many requests, or batches, of a Python model's instance are executed at the same time; 0: no sense."""
    text = parameter_of(config, CONCURRENCY_PARAMETER, "1")
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0
    return number if number <= MOST_CONCURRENCY else 0


BATCHING_PARAMETER = "batching"  # whether requests are joined to batches, and batches split

BATCHING_OFF = "off"

PRECISION_PARAMETER = "precision"  # of products in kernels
MIN_COSINE_PARAMETER = "precision_min_cosine"  # between the answers in low precision and in fp32

WHILE_COMPILING_PARAMETER = "serve_while_compiling"  # whether onnxruntime serves the model until then

IDLE_PARAMETER = "idle_unload_s"  # without a request, until workers give the model's memory back

CONCURRENCY_PARAMETER = "gangway_python_concurrency"
MOST_CONCURRENCY = 1000  # each execution may have a connection and a thread

SESSION_OPTIONS = "session.*"  # any parameter that begins so

CORES_ARE_CHOSEN = "the scheduler chooses the cores of each request"  # in place of a number of threads

_NO_GPU = "there is no GPU"
_ARENA = "memory for a request is planned when the model is compiled, and onnxruntime keeps none"
_TENSORRT = "only TensorRT has it"
_ANY_ENGINE = "any other name than ours is served with a warning if the version folder holds an .onnx file"
_ONE_SHAPE = "a batch has one shape"
_EACH_REQUEST = f"a Python model gets each request by itself, as in Triton; an ONNX model is refused: {_ONE_SHAPE}"
_DELAY = "the longest that a request waits for others"
_SIZES = "batches of these sizes begin at once; see batching.md"
_ORDER = "answers come in the order of the requests; see batching.md"

FIELDS: Mapping[str, FieldSupport] = {
    # the model
    "ModelConfig.name": _honoured("empty, or the name of the model's folder"),
    "ModelConfig.platform": _honoured(f"`ensemble` for ensembles; {_ANY_ENGINE}"),
    "ModelConfig.backend": _honoured(f"empty for ensembles; {_ANY_ENGINE}"),
    "ModelConfig.runtime": _honoured(f"empty for ensembles; {_ANY_ENGINE}"),
    "ModelConfig.version_policy": _honoured("which versions are served; the latest one if it is missing"),
    "ModelVersionPolicy.latest": _honoured("the highest numbers"),
    "ModelVersionPolicy.Latest.num_versions": _honoured("how many; 0 counts as 1"),
    "ModelVersionPolicy.all": _honoured("every version folder"),
    "ModelVersionPolicy.specific": _honoured("these, all of which must exist"),
    "ModelVersionPolicy.Specific.versions": _honoured("their numbers"),
    "ModelConfig.max_batch_size": _honoured(
        "0: shapes are whole, a symbolic first dimension is a size like others; else every tensor has a batch dimension"
        " in front, of this size at most, which must be symbolic in the ONNX file"
    ),
    "ModelConfig.default_model_filename": _honoured(
        "name of the model's file in the version folder, or its path from there"
    ),
    "ModelConfig.cc_model_filenames": _accepted(f"a file for each kind of GPU: {_NO_GPU}"),
    # inputs
    "ModelConfig.input": _honoured("some or all of the ONNX file's; what is left out of one is completed"),
    "ModelInput.name": _honoured("as in the ONNX file"),
    "ModelInput.data_type": _honoured("compared with the ONNX file"),
    "ModelInput.format": _honoured("for clients that ask for it; NHWC and NCHW need three `dims`"),
    "ModelInput.dims": _honoured(
        "compared with the ONNX file; a size may be given to a symbolic dimension; [1] is possible for a scalar, which"
        " requests send as [] or [1] in any case"
    ),
    "ModelInput.reshape": _honoured("clients send `dims`, the model gets `reshape`"),
    "ModelTensorReshape.shape": _honoured(
        "as many elements as `dims`, whose sizes must be fixed; those of a Python model may be -1 in both, in one order"
    ),
    "ModelInput.optional": _honoured(
        "the ONNX file must have an initializer of that name, which counts where a request leaves the input out;"
        " such a model is left to onnxruntime"
    ),
    "ModelInput.is_shape_tensor": _refused(_TENSORRT),
    "ModelInput.allow_ragged_batch": _honoured(
        f"Python models: requests are joined, whatever shapes of it they have; an ONNX model is refused: {_ONE_SHAPE}"
    ),
    "ModelInput.is_non_linear_format_io": _refused(_TENSORRT),
    # outputs
    "ModelConfig.output": _honoured("those that clients get, some or all of the ONNX file's"),
    "ModelOutput.name": _honoured("as in the ONNX file"),
    "ModelOutput.data_type": _honoured("compared with the ONNX file"),
    "ModelOutput.dims": _honoured("compared with the ONNX file; clients get a scalar as [1] if it says so, else as []"),
    "ModelOutput.reshape": _honoured("the model gives `reshape`, clients get `dims`"),
    "ModelOutput.label_filename": _honoured(
        "a file in the model's folder, one class name per line, for the classification extension"
    ),
    "ModelOutput.is_shape_tensor": _refused(_TENSORRT),
    "ModelOutput.is_non_linear_format_io": _refused(_TENSORRT),
    # batches
    "ModelConfig.batch_input": _accepted(_EACH_REQUEST),
    "ModelConfig.batch_output": _accepted(_EACH_REQUEST),
    "ModelConfig.dynamic_batching": _honoured("see batching.md; its queue policies and priorities: targets.md"),
    "ModelDynamicBatching.preferred_batch_size": _honoured(_SIZES),
    "ModelDynamicBatching.max_queue_delay_microseconds": _honoured(_DELAY),
    "ModelDynamicBatching.preserve_ordering": _honoured(_ORDER),
    "ModelDynamicBatching.priority_levels": _honoured("see targets.md"),
    "ModelDynamicBatching.default_priority_level": _honoured("see targets.md"),
    "ModelDynamicBatching.default_queue_policy": _honoured("see targets.md"),
    "ModelDynamicBatching.priority_queue_policy": _honoured("see targets.md"),
    "ModelQueuePolicy.timeout_action": _honoured("see targets.md"),
    "ModelQueuePolicy.default_timeout_microseconds": _honoured("see targets.md"),
    "ModelQueuePolicy.allow_timeout_override": _honoured("see targets.md"),
    "ModelQueuePolicy.max_queue_size": _honoured("see targets.md"),
    # other ways to schedule
    "ModelConfig.sequence_batching": _honoured("see sequences.md"),
    "ModelSequenceBatching.direct": _honoured("as many sequences at a time as instances times `max_batch_size`"),
    "ModelSequenceBatching.StrategyDirect.max_queue_delay_microseconds": _honoured(
        f"{_DELAY}, with a `minimum_slot_utilization`"
    ),
    "ModelSequenceBatching.StrategyDirect.minimum_slot_utilization": _honoured(
        "batches of at least this share of `max_batch_size` begin at once"
    ),
    "ModelSequenceBatching.oldest": _honoured("as many at a time as it says, for each instance"),
    "ModelSequenceBatching.StrategyOldest.max_candidate_sequences": _honoured(
        "sequences that have a slot, for each instance; 0: `max_batch_size`"
    ),
    "ModelSequenceBatching.StrategyOldest.preferred_batch_size": _honoured(_SIZES),
    "ModelSequenceBatching.StrategyOldest.max_queue_delay_microseconds": _honoured(_DELAY),
    "ModelSequenceBatching.StrategyOldest.preserve_ordering": _honoured(_ORDER),
    "ModelSequenceBatching.max_sequence_idle_microseconds": _honoured("a silent sequence ends; 0 is a second"),
    "ModelSequenceBatching.control_input": _honoured("inputs that the server fills in; clients cannot send them"),
    "ModelSequenceBatching.ControlInput.name": _honoured("as in the ONNX file, of one element"),
    "ModelSequenceBatching.ControlInput.control": _honoured("exactly one"),
    "ModelSequenceBatching.Control.kind": _honoured("each at most once; READY is always true"),
    "ModelSequenceBatching.Control.int32_false_true": _honoured("two values"),
    "ModelSequenceBatching.Control.fp32_false_true": _honoured("two values"),
    "ModelSequenceBatching.Control.bool_false_true": _honoured("two values"),
    "ModelSequenceBatching.Control.data_type": _honoured("of CORRID: UINT64, INT64, UINT32, INT32 or STRING"),
    "ModelSequenceBatching.state": _honoured("an output that is an input of the sequence's next request"),
    "ModelSequenceBatching.State.input_name": _honoured("as in the ONNX file; clients do not see it"),
    "ModelSequenceBatching.State.output_name": _honoured("as in the ONNX file; clients see it if `output` lists it"),
    "ModelSequenceBatching.State.data_type": _honoured("compared with the ONNX file"),
    "ModelSequenceBatching.State.dims": _honoured("compared with the ONNX file; -1 is any size"),
    "ModelSequenceBatching.State.initial_state": _honoured("one at most; zeros without it"),
    "ModelSequenceBatching.InitialState.name": _honoured("for people; must be there, as in Triton"),
    "ModelSequenceBatching.InitialState.data_type": _honoured("that of the state"),
    "ModelSequenceBatching.InitialState.dims": _honoured("fixed sizes that fit the state's"),
    "ModelSequenceBatching.InitialState.zero_data": _honoured("zeros, or empty strings"),
    "ModelSequenceBatching.InitialState.data_file": _honoured("a file in the folder `initial_state` of the model"),
    "ModelSequenceBatching.State.use_same_buffer_for_input_output": _accepted(
        "there are two, so that a request can be executed again after a fault"
    ),
    "ModelSequenceBatching.State.use_growable_memory": _refused(_NO_GPU),
    "ModelSequenceBatching.iterative_sequence": _refused("no model can have a request executed again"),
    "ModelConfig.ensemble_scheduling": _honoured("see ensembles.md"),
    "ModelEnsembling.step": _honoured("1 to 64 steps"),
    "ModelEnsembling.Step.model_name": _honoured("the model that is executed, an ensemble or not"),
    "ModelEnsembling.Step.model_version": _honoured(
        "a version, or -1 for the latest one; 0 is that, too, unless there is a version 0"
    ),
    "ModelEnsembling.Step.input_map": _honoured("from the model's inputs to tensors of the ensemble"),
    "ModelEnsembling.Step.output_map": _honoured("from the model's outputs to tensors of the ensemble"),
    "ModelEnsembling.Step.model_namespace": _refused("models have no namespaces"),
    "ModelEnsembling.max_inflight_requests": _accepted(
        "a step gives one answer, so nothing piles up between steps; the server's requests are bounded together"
    ),
    "ModelConfig.model_transaction_policy": _honoured("one request, one answer; any number of them for Python models"),
    "ModelTransactionPolicy.decoupled": _honoured("Python models, ensembles of them: an ONNX model answers once"),
    # where it runs
    "ModelConfig.instance_group": _honoured("how many queries of the model may be under way at the same time"),
    "ModelInstanceGroup.name": _accepted("nothing refers to it"),
    "ModelInstanceGroup.kind": _honoured(
        "all kinds mean the server's cores; KIND_GPU with a warning, since there is no GPU"
    ),
    "ModelInstanceGroup.count": _honoured(
        "how many queries of the model, or of one version, may be under way at the same time; the counts of several"
        " groups add up; 0 or missing: any number"
    ),
    "ModelInstanceGroup.rate_limiter": _honoured("with `--rate-limit=execution_count`; without it, it has no effect"),
    "ModelRateLimiter.resources": _honoured("a query begins when all of them are free, and holds them to its end"),
    "ModelRateLimiter.Resource.name": _honoured("what is counted, across all models"),
    "ModelRateLimiter.Resource.global": _honoured("there is one device, so both mean the same"),
    "ModelRateLimiter.Resource.count": _honoured("how many a query holds"),
    "ModelRateLimiter.priority": _honoured("where resources are short, a model of priority 2 gets half the turns of 1"),
    "ModelInstanceGroup.gpus": _accepted(_NO_GPU),
    "ModelInstanceGroup.secondary_devices": _accepted("there is no such device"),
    "ModelInstanceGroup.profile": _accepted(_TENSORRT),
    "ModelInstanceGroup.passive": _refused("an instance without requests would do nothing"),
    "ModelInstanceGroup.host_policy": _accepted("the server has no host policies: `--cores` says where it computes"),
    # how it runs
    "ModelConfig.optimization": _honoured("checked; the compiler decides for itself"),
    "ModelOptimizationPolicy.graph": _accepted("the compiler, and onnxruntime where it serves, use all they have"),
    "ModelOptimizationPolicy.priority": _accepted(f"{_TENSORRT}; see targets.md for ours"),
    "ModelOptimizationPolicy.cuda": _accepted(_NO_GPU),
    "ModelOptimizationPolicy.execution_accelerators": _accepted("models are compiled for this CPU anyway"),
    "ModelOptimizationPolicy.input_pinned_memory": _accepted(_NO_GPU),
    "ModelOptimizationPolicy.output_pinned_memory": _accepted(_NO_GPU),
    "ModelOptimizationPolicy.gather_kernel_buffer_threshold": _accepted(_NO_GPU),
    "ModelOptimizationPolicy.eager_batching": _accepted("a batch is formed when there are cores for it"),
    "ModelConfig.parameters": _honoured(
        "see below; others are shown to clients, have no effect, and are named in the log"
    ),
    "ModelParameter.string_value": _honoured("the value"),
    "ModelConfig.model_operations": _refused("libraries of operators are not loaded"),
    "ModelConfig.model_repository_agents": _refused("agents are not loaded, and what they check would go unchecked"),
    "ModelConfig.response_cache": _honoured("with `--cache-config`"),
    "ModelResponseCache.enable": _honoured(
        "equal requests are answered from memory; without `--cache-config` it has no effect"
    ),
    "ModelConfig.model_warmup": _honoured("requests that the model answers before it is ready; see repository.md"),
    "ModelWarmup.name": _honoured("for messages"),
    "ModelWarmup.batch_size": _honoured("rows of the request"),
    "ModelWarmup.count": _honoured("how often; 0 counts as 1"),
    "ModelWarmup.inputs": _honoured("contents of each input"),
    "ModelWarmup.Input.data_type": _honoured("compared with the model"),
    "ModelWarmup.Input.dims": _honoured("compared with the model"),
    "ModelWarmup.Input.zero_data": _honoured("zeros"),
    "ModelWarmup.Input.random_data": _honoured("random numbers"),
    "ModelWarmup.Input.input_data_file": _honoured("a file in the folder `warmup` of the model"),
    "ModelConfig.metric_tags": _honoured("further labels of the model's metrics; see metrics.md"),
    "ModelConfig.model_metrics": _honoured("buckets of a histogram; see metrics.md"),
    "ModelMetrics.metric_control": _honoured("one for each histogram"),
    "ModelMetrics.MetricControl.metric_identifier": _honoured("which one"),
    "ModelMetrics.MetricControl.MetricIdentifier.family": _honoured(
        "`nv_inference_first_response_histogram_ms`, no other"
    ),
    "ModelMetrics.MetricControl.histogram_options": _honoured("its buckets"),
    "ModelMetrics.MetricControl.HistogramOptions.buckets": _honoured("upper bounds in milliseconds, ascending"),
}

PARAMETERS: Mapping[str, FieldSupport] = {
    "qos_ms": _honoured("the latency target, milliseconds or a multiple as in `3x`; see targets.md"),
    "late": _honoured("`serve` or `reject`; see targets.md"),
    "max_queue_size": _honoured("see targets.md"),
    "batching": _honoured("`off`: requests are neither joined nor split; `auto` is the default; see batching.md"),
    PRECISION_PARAMETER: _honoured(
        "`fp32`, `bf16`, `auto`: bf16 where the processor has it, or `deadline`: bf16 for requests that would be late"
        " in fp32; the default is that of `--precision`; see precision.md"
    ),
    MIN_COSINE_PARAMETER: _honoured(
        "answers in bf16 agree with those in fp32 by at least so much, else layers stay in fp32; 0.999"
    ),
    WHILE_COMPILING_PARAMETER: _honoured(
        "`true`: onnxruntime serves the model until it is compiled, `false`: it is ready only then; the default"
        " is that of `--serve-while-compiling`; see model-life.md"
    ),
    IDLE_PARAMETER: _honoured(
        "seconds without a request after which workers give the model's memory back, until the next request; 0: never,"
        " the default is that of `--idle-unload-s`; see model-life.md"
    ),
    "EXECUTION_ENV_PATH": _honoured("Python models: their environment; see python-models.md"),
    "gangway_python_timeout_s": _honoured(
        "Python models: how many seconds `execute` may take, without the time of other models; 60"
    ),
    "gangway_python_memory_mib": _honoured("Python models: data of an instance; two thirds of the server's limit"),
    CONCURRENCY_PARAMETER: _honoured(
        "Python models: how many requests of an instance wait in coroutines of `execute` at the same time; 1"
    ),
    "gangway_buckets": _honoured("sizes to compile before the model is ready; see shapes.md"),
    "gangway_embeddings": _honoured(
        "how the model answers `/v1/embeddings` or `/v1/rerank`, or `off`; completed by the server; see http.md"
    ),
    "gangway_engine": _honoured("set by the server: what executes the model"),
    "gangway_dimensions": _honoured("set by the server: JSON with the names of each input's open dimensions"),
    "gangway_compiled_dimensions": _honoured(
        "set by the server: JSON with the names of the dimensions whose sizes are compiled when requests have them; see"
        " shapes.md"
    ),
    "gangway_precision": _honoured("set by the server: of the products in the model's kernels; see precision.md"),
    "gangway_precision_note": _honoured("set by the server: how answers in bf16 agree with those in fp32, or why not"),
    "gangway_integers": _honoured("set by the server: what multiplies a quantised model's numbers; see precision.md"),
    "gangway_difference": _honoured("set by the server: how answers differ from onnxruntime's; see troubleshooting.md"),
    "gangway_fallback_reason": _honoured("set by the server: why it was not compiled"),
    "gangway_least_target_ms": _honoured("set by the server: no target that is a multiple is less; see targets.md"),
    "gangway_target_since": _honoured("set by the server: when a target that is a multiple began to count"),
    "TRITON_BATCH_STRATEGY_PATH": _accepted("no shared libraries are loaded, so requests are joined without its rules"),
    # of Triton's backend for ONNX
    "intra_op_thread_count": _accepted(CORES_ARE_CHOSEN),
    "inter_op_thread_count": _accepted(CORES_ARE_CHOSEN),
    "execution_mode": _accepted("layers are executed one after another, each on the cores of its request"),
    "enable_mem_arena": _accepted(_ARENA),
    "enable_mem_pattern": _accepted(_ARENA),
    "memory.enable_memory_arena_shrinkage": _accepted(_ARENA),
    "arena_extend_strategy": _accepted(_ARENA),
    SESSION_OPTIONS: _accepted("the server sets the options of onnxruntime's sessions"),
    "cudnn_conv_algo_search": _accepted(_NO_GPU),
    "gpu_mem_limit": _accepted(_NO_GPU),
    "do_copy_in_default_stream": _accepted(_NO_GPU),
}
