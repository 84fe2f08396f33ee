"""Where the code of a model lies, and what it may complete and find of its configuration."""

from collections.abc import Iterator

from benchmarks.differential.asked import BOTH, GRPC, Case, Http, Infer, Request, Rpc, by, doing, floats
from benchmarks.differential.models import HEAD, TEXT, Model, config_of

X, Y = '{"name": "x", "data_type": "TYPE_FP32", "dims": [-1]}', '{"name": "y", "data_type": "TYPE_FP32", "dims": [-1]}'
IN, OUT = f"config.add_input({X})", f"config.add_output({Y})"
ECHO = """
    def execute(self, requests):
        return [answer(pb_utils.Tensor("y", r.inputs()[0].as_numpy())) for r in requests]
"""
COMPLETES = (
    """
    @staticmethod
    def auto_complete_config(config):
{lines}
"""
    + ECHO
)
COMPLETED = {
    "nothing_returned": (IN, OUT),
    "a_dictionary": (IN, OUT, "return config.as_dict()"),
    "a_text": (IN, OUT, "return 'config'"),
    "another_one": (IN, OUT, "return pb_utils.ModelConfig(json.dumps(config.as_dict()))"),
    "by_dictionary": (
        f"config.as_dict()['input'].append({X})",
        f"config.as_dict()['output'].append({Y})",
        "return config",
    ),
    "dims_tuple": (f"config.add_input({X.replace('[-1]', '(-1,)')})", OUT, "return config"),
    "dims_none": (f"config.add_input({X.replace('[-1]', '[]')})", OUT, "return config"),
    "type_unknown": (f"config.add_input({X.replace('FP32', 'FP31')})", OUT, "return config"),
    "type_number": ('config.add_input({"name": "x", "data_type": 11, "dims": [-1]})', OUT, "return config"),
    "batch_zero": (IN, OUT, "config.set_max_batch_size(0)", "return config"),
    "batch_negative": (IN, OUT, "config.set_max_batch_size(-1)", "return config"),
    "dynamic_without_batch": (IN, OUT, "config.set_dynamic_batching()", "return config"),
    "policy_unknown": (IN, OUT, "config.set_model_transaction_policy({'other': True})", "return config"),
    "policy_empty": (IN, OUT, "config.set_model_transaction_policy({})", "return config"),
    "policy_false": (IN, OUT, "config.set_model_transaction_policy({'decoupled': False})", "return config"),
    "policy_twice": (
        *(IN, OUT, "config.set_model_transaction_policy({'decoupled': True})"),
        *("config.set_model_transaction_policy({'decoupled': False})", "return config"),
    ),
    "output_optional": (IN, f"config.add_output({Y[:-1]}, 'optional': True}})", "return config"),
    "name_changed": (IN, OUT, "config.as_dict()['name'] = 'other'", "return config"),
    "parameters_added": (
        IN,
        OUT,
        "config.as_dict()['parameters'] = {'added': {'string_value': 'yes'}}",
        "return config",
    ),
    "group_added": (
        IN,
        OUT,
        "config.as_dict()['instance_group'] = [{'count': 2, 'kind': 'KIND_CPU'}]",
        "return config",
    ),
    "prints": (IN, OUT, "print(config.as_dict()['name'])", "pb_utils.Logger.log_info('completes')", "return config"),
    "known_names": ("assert [each['name'] for each in config.as_dict()['input']] == []", IN, OUT, "return config"),
    "keys": ("open('/dev/null', 'w').write(str(config.as_dict()['max_batch_size']))", IN, OUT, "return config"),
}
ARGUMENTS = """
    @classmethod
    def auto_complete_config(cls, config):
        config.add_input({"name": "x", "data_type": "TYPE_FP32", "dims": [-1]})
        config.add_output({"name": "y", "data_type": "TYPE_FP32", "dims": [-1]})
        return config
"""
CODE = """import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array(["WHERE"], dtype=object))]) for _ in requests]
"""
TEXT_OUT = ("x:FP32:1", "y:STRING:1")
READS = """
    def initialize(self, args):
        self.config = json.loads(args["model_config"])
        self.args = args

    def execute(self, requests):
        parameters = self.config["parameters"]
        made = {
            "a parameter": lambda: parameters["path"]["string_value"],
            "a number": lambda: float(parameters["threshold"]["string_value"]),
            "JSON": lambda: json.loads(parameters["json"]["string_value"]),
            "an empty one": lambda: parameters["empty"]["string_value"],
            "one without a value": lambda: parameters["nothing"],
            "one that is not there": lambda: parameters.get("missing", {}).get("string_value", "default"),
            "all": lambda: {name: value["string_value"] for name, value in parameters.items() if value},
            "lines": lambda: parameters["lines"]["string_value"],
            "quotes": lambda: parameters["quotes"]["string_value"],
            "batch size": lambda: self.config["max_batch_size"],
            "inputs": lambda: self.config["input"],
            "outputs": lambda: self.config["output"],
            "groups": lambda: self.config["instance_group"],
            "batching": lambda: self.config.get("dynamic_batching"),
            "policy": lambda: self.config["version_policy"],
            "device": lambda: [self.args["model_instance_kind"], self.args["model_instance_device_id"]],
            "instance": lambda: self.args["model_instance_name"],
            "kind": lambda: self.config["instance_group"][0]["kind"],
            "optional": lambda: [each["optional"] for each in self.config["input"]],
            "reshape": lambda: [each.get("reshape") for each in self.config["output"]],
            "label file": lambda: [each["label_filename"] for each in self.config["output"]],
            "ragged": lambda: [each["allow_ragged_batch"] for each in self.config["input"]],
            "shape tensor": lambda: [each["is_shape_tensor"] for each in self.config["input"]],
            "format": lambda: [each["format"] for each in self.config["input"]],
            "type of dims": lambda: [type(size).__name__ for each in self.config["input"] for size in each["dims"]],
            "numpy type": lambda: [np.dtype(pb_utils.triton_string_to_numpy(each["data_type"])).name for each in self.config["output"]],
            "type of batch size": lambda: type(self.config["max_batch_size"]).__name__,
            "warm-up": lambda: self.config["model_warmup"],
            "transaction": lambda: self.config.get("model_transaction_policy"),
            "cache": lambda: self.config.get("response_cache"),
            "ensemble": lambda: self.config.get("ensemble_scheduling"),
            "backend": lambda: [self.config["backend"], self.config["platform"], self.config["runtime"]],
        }
        found = []
        for r in requests:
            try:
                value = json.dumps(made[text(r)](), sort_keys=True)
            except Exception as error:
                value = f"{type(error).__name__}: {error}"
            found.append(answer(pb_utils.Tensor("y", np.array([[value]], dtype=object))))
        return found
"""
READ = tuple(line.split('"')[1] for line in READS.splitlines() if '": lambda' in line)
READ_CONFIG = """
backend: "python"
max_batch_size: 8
input [ { name: "do" data_type: TYPE_STRING dims: [ 1 ] },
        { name: "z" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, 2, 2 ] optional: true allow_ragged_batch: true } ]
output { name: "y" data_type: TYPE_STRING dims: [ 1 ] label_filename: "labels.txt" }
output { name: "w" data_type: TYPE_FP16 dims: [ -1 ] }
dynamic_batching { }
parameters: { key: "path" value: { string_value: "/a/b" } }
parameters { key: "threshold", value: { string_value: "0.25" } }
parameters { key: "json" value { string_value: "{\\"a\\": [1, 2]}" } }
parameters { key: "empty" value { string_value: "" } }
parameters { key: "nothing" value { } }
parameters { key: "lines" value { string_value: "a\\nb" } }
parameters { key: "quotes" value { string_value: 'say "a"' } }
instance_group [ { count: 1, kind: KIND_CPU } ]
"""
FINALIZES = {
    "finalize_exits": "sys.exit('ended')",
    "finalize_asks": "pb_utils.InferenceRequest(model_name='sums', requested_output_names=['y'], inputs=[]).exec()",
    "finalize_prints": "print('ended')",
}
ENVIRONMENTS = {
    "environment_missing": "/nonexistent/environment.tar.gz",
    "environment_beside": "$$TRITON_MODEL_DIRECTORY/environment.tar.gz",
    "environment_broken": "$$TRITON_MODEL_DIRECTORY/labels.txt",
}
NAMED = {
    "named_file": ('default_model_filename: "code.py"', {"1/code.py": CODE.replace("WHERE", "version")}),
    "named_below": ('default_model_filename: "below/code.py"', {"1/below/code.py": CODE.replace("WHERE", "below")}),
    "named_both": (
        'default_model_filename: "code.py"',
        {"1/code.py": CODE.replace("WHERE", "code"), "1/model.py": CODE.replace("WHERE", "model")},
    ),
}
MODELS = (
    *(
        Model(f"completing_{name}", COMPLETES.format(lines="\n".join(f"        {line}" for line in lines)))
        for name, lines in COMPLETED.items()
    ),
    Model("completing_by_class", ARGUMENTS + ECHO),
    Model(
        "completing_sequences",
        COMPLETES.format(lines="        config.set_dynamic_batching()\n        return config"),
        config_of("x:FP32:-1", "y:FP32:-1", more="sequence_batching { }"),
    ),
    Model("reads", READS, READ_CONFIG, {"labels.txt": "a\n"}),
    *(
        Model(
            name,
            f"def execute(self, requests):\n    return [answer(told('fine')) for _ in requests]\ndef finalize(self):\n    {line}",
            TEXT,
        )
        for name, line in FINALIZES.items()
    ),
    *(
        Model(
            name,
            ECHO,
            config_of(
                "x:FP32:-1",
                "y:FP32:-1",
                more=f'parameters {{ key: "EXECUTION_ENV_PATH" value {{ string_value: "{path}" }} }}',
            ),
            {"labels.txt": "a\n"},
        )
        for name, path in ENVIRONMENTS.items()
    ),
    *(Model(name, "", config_of(*TEXT_OUT, more=more), files) for name, (more, files) in NAMED.items()),
    Model(
        "on_cpu_only",
        ECHO,
        config_of(
            "x:FP32:-1",
            "y:FP32:-1",
            more='parameters { key: "FORCE_CPU_ONLY_INPUT_TENSORS" value { string_value: "no" } }',
        ),
    ),
    Model("two_classes", ECHO, config_of("x:FP32:-1", "y:FP32:-1"), head=HEAD + "class Other:\n    pass\n\n\n"),
    Model("no_class", "", config_of("x:FP32:-1", "y:FP32:-1"), {"1/model.py": "import numpy\n"}),
    Model(
        "with_init",
        "def __init__(self):\n    self.word = 'made'\ndef execute(self, requests):\n    return [answer(told(self.word)) for _ in requests]",
        TEXT,
    ),
    Model(
        "init_returns",
        "def initialize(self, args):\n    return 3\ndef execute(self, requests):\n    return [answer(told('fine')) for _ in requests]",
        TEXT,
    ),
    Model(
        "slow_init",
        "def initialize(self, args):\n    time.sleep(0.2)\n    print('ready')\ndef execute(self, requests):\n    return [answer(told('fine')) for _ in requests]",
        TEXT,
    ),
    Model(
        "static_execute",
        "@staticmethod\ndef execute(requests):\n    return [answer(told('fine')) for _ in requests]",
        TEXT,
    ),
)


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for name in (*COMPLETED, "by_class", "sequences"):
        model = f"completing_{name}"
        yield Case(
            f"completing: config, {name}", [Rpc("ModelConfig", {"name": model}), Rpc("ModelMetadata", {"name": model})]
        )
        yield from by("completing", f"asked, {name}", Request(model, [floats("x", 1, 2)]), (GRPC,))
    for name in READ:
        yield from by("reading", name, doing("reads", name, wanted=["y"], rows=True), (GRPC,))
    for name in FINALIZES:
        asked = Infer(doing(name, "a"), GRPC)
        path = f"/v2/repository/models/{name}"
        yield Case(f"finalize: {name}", [asked, Http("POST", f"{path}/unload"), Http("POST", f"{path}/load"), asked])
    for name in ENVIRONMENTS:
        yield from by("not loaded", f"{name}", Request(name, [floats("x", 1)]), BOTH)
        yield Case(f"not loaded: load, {name}", [Http("POST", f"/v2/repository/models/{name}/load")])
    for name in NAMED:
        yield from by("files", name, Request(name, [floats("x", 1)]), BOTH)
        yield Case(f"files: {name}, config", [Rpc("ModelConfig", {"name": name})])
    for name in ("on_cpu_only", "two_classes", "no_class"):
        yield from by("files", name, Request(name, [floats("x", 1, 2)]), (GRPC,))
    for name in ("with_init", "init_returns", "slow_init", "static_execute"):
        yield from by("files", name, doing(name, "a"), (GRPC,))
