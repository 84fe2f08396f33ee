"""The models of `public`: as those of public repositories."""

from benchmarks.differential.kinds.streams import DECOUPLED
from benchmarks.differential.models import Model, config_of, ensemble_of

TOKENIZER = """
    def initialize(self, args):
        self.model_config = model_config = json.loads(args["model_config"])
        self.output_dtypes = {}
        for name in ("input_ids", "attention_mask"):
            output_config = pb_utils.get_output_config_by_name(model_config, name)
            self.output_dtypes[name] = pb_utils.triton_string_to_numpy(output_config["data_type"])
        self.max_length = int(model_config["parameters"].get("max_length", {"string_value": "16"})["string_value"])
        self.logger = pb_utils.Logger
        self.logger.log_info(f"Loaded {args['model_name']} version {args['model_version']}")

    def execute(self, requests):
        responses = []
        for request in requests:
            query = [t.decode("UTF-8") for t in pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy().tolist()[0]]
            ids = [[ord(c) % 1000 for c in text][: self.max_length] for text in query]
            longest = max(map(len, ids), default=0)
            input_ids = np.array([row + [0] * (longest - len(row)) for row in ids], dtype=self.output_dtypes["input_ids"])
            mask = np.array([[1] * len(row) + [0] * (longest - len(row)) for row in ids], dtype=self.output_dtypes["attention_mask"])
            responses.append(pb_utils.InferenceResponse(output_tensors=[
                pb_utils.Tensor("input_ids", input_ids), pb_utils.Tensor("attention_mask", mask)]))
        return responses

    def finalize(self):
        print("Cleaning up...")
"""
IMAGE = """
    def execute(self, requests):
        responses = []
        for request in requests:
            raw = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()
            planes = []
            try:
                for each in raw.ravel():
                    data = np.frombuffer(each, dtype=np.uint8)
                    if not len(data) or len(data) % 12:
                        raise ValueError(f"cannot decode an image of {len(data)} bytes")
                    planes.append(data.reshape(-1, 2, 2, 3).mean(axis=0).transpose(2, 0, 1).astype(np.float16))
                responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("PIXELS", np.stack(planes)),
                    pb_utils.Tensor("SIZES", np.array([[len(each)] for each in raw.ravel()], np.int64))]))
            except Exception as e:
                responses.append(pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(f"An error occurred: {e}")))
        return responses
"""
LLM = """
    def initialize(self, args):
        self.inflight_thread_count = 0
        self.inflight_thread_count_lck = threading.Lock()

    def execute(self, requests):
        for request in requests:
            thread = threading.Thread(target=self.response_thread, args=(
                request.get_response_sender(),
                pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy(),
                json.loads(request.parameters()),
                pb_utils.get_input_tensor_by_name(request, "max_tokens"),
                request.request_id()))
            thread.daemon = True
            with self.inflight_thread_count_lck:
                self.inflight_thread_count += 1
            thread.start()
        return None

    def response_thread(self, response_sender, prompt, parameters, max_tokens, request_id):
        words = prompt.flat[0].decode().split()
        most = int(max_tokens.as_numpy().flat[0]) if max_tokens is not None else len(words)
        for idx, word in enumerate(words[:most]):
            if response_sender.is_cancelled():
                break
            out = [pb_utils.Tensor("text_output", np.array([word.encode()], dtype=np.object_)),
                   pb_utils.Tensor("index", np.array([idx], dtype=np.uint32)),
                   pb_utils.Tensor("cumulative_logprob", np.array([-0.5 * idx], dtype=np.float64))]
            flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if idx == most - 1 and parameters.get("final_inline") else 0
            response_sender.send(pb_utils.InferenceResponse(output_tensors=out), flags=flags)
            if flags:
                break
        else:
            response_sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
        with self.inflight_thread_count_lck:
            self.inflight_thread_count -= 1

    def finalize(self):
        while self.inflight_thread_count:
            time.sleep(0.1)
"""
ROUTER = """
    async def execute(self, requests):
        responses = []
        for request in requests:
            text_tensor = pb_utils.get_input_tensor_by_name(request, "TEXT")
            pixels = pb_utils.get_input_tensor_by_name(request, "IMAGE")
            calls = [pb_utils.InferenceRequest(
                model_name="pub_tokenizer", requested_output_names=["input_ids", "attention_mask"],
                inputs=[text_tensor], request_id=request.request_id(), correlation_id=request.correlation_id())]
            if pixels is not None:
                calls.append(pb_utils.InferenceRequest(model_name="pub_image", requested_output_names=["PIXELS"], inputs=[pixels]))
            found = await asyncio.gather(*[call.async_exec() for call in calls])
            failed = next((each for each in found if each.has_error()), None)
            if failed is not None:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError(failed.error().message())))
                continue
            ids = pb_utils.get_output_tensor_by_name(found[0], "input_ids")
            summary = {"ids": ids.as_numpy().tolist(), "missing": pb_utils.get_output_tensor_by_name(found[0], "nope") is None,
                       "outputs": sorted(t.name() for each in found for t in each.output_tensors())}
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor.from_dlpack("input_ids", ids.to_dlpack()),
                pb_utils.Tensor("SUMMARY", np.array([[json.dumps(summary)]], dtype=object))]))
        return responses
"""
STATEFUL = """
    def initialize(self, args):
        self.state = {}

    def execute(self, requests):
        responses = []
        for request in requests:
            key = request.correlation_id()
            start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy().flat[0]
            end = pb_utils.get_input_tensor_by_name(request, "END").as_numpy().flat[0]
            value = pb_utils.get_input_tensor_by_name(request, "INPUT").as_numpy()
            if start:
                self.state[key] = np.zeros_like(value)
            if key not in self.state:
                responses.append(pb_utils.InferenceResponse(error=pb_utils.TritonError(f"unknown sequence {key}", pb_utils.TritonError.NOT_FOUND)))
                continue
            self.state[key] = self.state[key] + value
            total = self.state[key]
            if end:
                del self.state[key]
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", total), pb_utils.Tensor("OPEN", np.array([[len(self.state)]], np.int32))]))
        return responses
"""
SEQUENCES = """
sequence_batching {
  max_sequence_idle_microseconds: 60000000
  DIRECTION
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] } ] },
    { name: "END" control [ { kind: CONTROL_SEQUENCE_END int32_false_true: [ 0, 1 ] } ] }
  ]
}
"""
METRICS = """
    def initialize(self, args):
        self.metric_family = pb_utils.MetricFamily(
            name="pub_request_total", description="Requests and what they had", kind=pb_utils.MetricFamily.COUNTER)
        self.metric = self.metric_family.Metric(labels={"model": args["model_name"], "version": args["model_version"]})
        self.gauges = pb_utils.MetricFamily(name="pub_last", description="the last value", kind=pb_utils.MetricFamily.GAUGE)
        self.gauge = self.gauges.Metric(labels={})
        self.histograms = pb_utils.MetricFamily(name="pub_size", description="sizes", kind=pb_utils.MetricFamily.HISTOGRAM) if hasattr(pb_utils.MetricFamily, "HISTOGRAM") else None

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            self.metric.increment(float(x.sum()))
            self.gauge.set(float(x.max()))
            values = np.array([self.metric.value(), self.gauge.value()], np.float64)
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", values)]))
        return responses
"""
COMPLETED = """
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        inputs = [{'name': 'INPUT0', 'data_type': 'TYPE_FP32', 'dims': [4]}, {'name': 'INPUT1', 'data_type': 'TYPE_FP32', 'dims': [4], 'optional': True}]
        outputs = [{'name': 'OUTPUT0', 'data_type': 'TYPE_FP32', 'dims': [4]}]
        config = auto_complete_model_config.as_dict()
        input_names = [input['name'] for input in config['input']]
        output_names = [output['name'] for output in config['output']]
        for input in inputs:
            if input['name'] not in input_names:
                auto_complete_model_config.add_input(input)
        for output in outputs:
            if output['name'] not in output_names:
                auto_complete_model_config.add_output(output)
        auto_complete_model_config.set_max_batch_size(MAX)
        MORE
        return auto_complete_model_config

    def initialize(self, args):
        self.config = json.loads(args["model_config"])

    def execute(self, requests):
        responses = []
        for request in requests:
            a = pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()
            b = pb_utils.get_input_tensor_by_name(request, "INPUT1")
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", a if b is None else a + b.as_numpy())]))
        return responses
"""
LABELS = """
    def execute(self, requests):
        responses = []
        for request in requests:
            scores = pb_utils.get_input_tensor_by_name(request, "SCORES").as_numpy()
            names = np.array([[b"cat", "d\\u00f6g", b"bird"][int(i)] for i in scores.argmax(axis=-1)], dtype=object).reshape(-1, 1)
            responses.append(pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("LABEL", names), pb_utils.Tensor("SCORES_OUT", scores),
                pb_utils.Tensor("BEST", scores.max(axis=-1, keepdims=True)), pb_utils.Tensor("IS_CAT", scores.argmax(axis=-1).reshape(-1, 1) == 0)]))
        return responses
"""
VERSIONED = """
    def initialize(self, args):
        self.version = int(args["model_version"])
        self.told = {key: args[key] for key in ("model_instance_kind", "model_instance_device_id", "model_version", "model_name")}

    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("VERSION", np.array([self.version], np.int64)),
                pb_utils.Tensor("ARGS", np.array([json.dumps(self.told)], dtype=np.object_))]) for _ in requests]
"""
AFTER = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            x = pb_utils.get_input_tensor_by_name(request, "IN").as_numpy().copy()
            threading.Timer(0.02, self.send, (sender, x)).start()
        return None

    def send(self, sender, x):
        for each in x.flat:
            if each < 0:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError(f"negative: {each}")))
            else:
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array([each], np.int32))]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
HEADLESS = """import json, time, asyncio, threading
import numpy as np
import triton_python_backend_utils as pb_utils


"""
COMPLETED_CONFIGS = {
    "plain": ("0", ""),
    "batched": ("8", "auto_complete_model_config.set_dynamic_batching()"),
    "decoupled": ("0", "auto_complete_model_config.set_model_transaction_policy(dict(decoupled=False))"),
}
MODELS = (
    Model(
        "pub_tokenizer",
        TOKENIZER,
        config_of(
            "TEXT:STRING:-1",
            "input_ids:INT64:-1,-1 attention_mask:INT64:-1,-1",
            batch=4,
            more='parameters: { key: "max_length" value: { string_value: "5" } }\ninstance_group [{ count: 1 kind: KIND_CPU }]\ndynamic_batching { }',
        ).replace("dims: [-1,-1]", "dims: [-1]"),
        head=HEADLESS,
    ),
    Model("pub_image", IMAGE, config_of("IMAGE:STRING:1", "PIXELS:FP16:3,2,2 SIZES:INT64:1", batch=8), head=HEADLESS),
    Model(
        "pub_llm",
        LLM,
        config_of(
            "text_input:STRING:1 max_tokens:INT32:1?",
            "text_output:STRING:1 index:UINT32:1 cumulative_logprob:FP64:1",
            more=DECOUPLED,
        ),
        head=HEADLESS,
    ),
    Model(
        "pub_router",
        ROUTER,
        config_of("TEXT:STRING:-1 IMAGE:STRING:1?", "input_ids:INT64:-1 SUMMARY:STRING:1", batch=4),
        head=HEADLESS,
    ),
    *(
        Model(
            f"pub_stateful_{name}",
            STATEFUL,
            config_of(
                "INPUT:INT32:1", "OUTPUT:INT32:1 OPEN:INT32:1", batch=4, more=SEQUENCES.replace("DIRECTION", way)
            ),
            head=HEADLESS,
        )
        for name, way in (("direct", "direct { }"), ("oldest", "oldest { max_candidate_sequences: 4 }"))
    ),
    Model("pub_metrics", METRICS, config_of("INPUT0:FP32:-1", "OUTPUT0:FP64:2"), head=HEADLESS),
    *(
        Model(f"pub_completed_{name}", COMPLETED.replace("MAX", most).replace("MORE", more), head=HEADLESS)
        for name, (most, more) in COMPLETED_CONFIGS.items()
    ),
    Model(
        "pub_labels",
        LABELS,
        config_of("SCORES:FP32:3", "LABEL:STRING:1 SCORES_OUT:FP32:3 BEST:FP32:1 IS_CAT:BOOL:1", batch=8).replace(
            'name: "SCORES_OUT"', 'name: "SCORES_OUT" label_filename: "labels.txt"'
        ),
        {"labels.txt": "cat\ndog\nbird\n"},
        head=HEADLESS,
    ),
    *(
        Model(
            f"pub_{name}",
            VERSIONED,
            config_of("IN:INT32:1", "VERSION:INT64:1 ARGS:STRING:1", more=f"version_policy: {{ {policy} }}"),
            head=HEADLESS,
            versions=versions,
        )
        for name, policy, versions in (
            ("versions", "specific: { versions: [1, 3] }", (1, 2, 3, 10)),
            ("latest", "latest { num_versions: 2 }", (1, 2, 3, 10)),
            ("all", "all { }", (1, 7)),
        )
    ),
    Model("pub_after", AFTER, config_of("IN:INT32:-1", "OUT:INT32:1", more=DECOUPLED), head=HEADLESS),
    Model(
        "pub_pipeline",
        "",
        ensemble_of(
            "TEXT:STRING:-1 IMAGE:STRING:1",
            "ids:INT64:-1 PIXELS:FP16:3,2,2",
            [("pub_tokenizer", "TEXT=TEXT", "input_ids=ids"), ("pub_image", "IMAGE=IMAGE", "PIXELS=PIXELS")],
            batch=4,
        ),
    ),
)
