"""Queue policies, warm-up, kinds of instances, and loads that bring a configuration."""

import json
from collections.abc import Iterator
from typing import Any

from benchmarks.differential.asked import BOTH, GRPC, Behind, Case, Http, Infer, Request, Rpc, Scrape, Step, floats
from benchmarks.differential.models import Model, config_of

SLOW = """
    def execute(self, requests):
        x = max(float(request.inputs()[0].as_numpy().ravel()[0]) for request in requests)
        time.sleep(x)
        return [answer(pb_utils.Tensor("y", request.inputs()[0].as_numpy())) for request in requests]
"""
ECHO = """
    def execute(self, requests):
        return [answer(pb_utils.Tensor("y", request.inputs()[0].as_numpy())) for request in requests]
"""
KINDS = """
    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        told_args = [self.args[name] for name in ("model_instance_kind", "model_instance_device_id", "model_name")]
        groups = json.loads(self.args["model_config"])["instance_group"]
        return [answer(told([told_args, groups])) for _ in requests]
"""
X, Y = "x:FP32:1", "y:FP32:1"
POLICIES = {
    "no_default": "allow_timeout_override: true",
    "long_default": "default_timeout_microseconds: 10000000 allow_timeout_override: true",
    "short_default": "default_timeout_microseconds: 50000 allow_timeout_override: true",
    "no_override": "default_timeout_microseconds: 10000000",
    "delays": "timeout_action: DELAY default_timeout_microseconds: 50000",
    "short_queue": "max_queue_size: 1",
}
TIMEOUTS_US = {"none": None, "short": 50_000, "long": 5_000_000, "zero": 0}
WARM = (
    'model_warmup {{ name: "w" batch_size: {batch} count: {count} '
    'inputs {{ key: "x" value {{ data_type: TYPE_FP32 dims: [1] zero_data: true }} }} }}'
)
WARMED = {
    "once": WARM.format(batch=1, count=1),
    "thrice": WARM.format(batch=1, count=3),
    "two_samples": WARM.format(batch=1, count=1) + WARM.format(batch=1, count=2).replace('"w"', '"v"'),
    "random": WARM.format(batch=1, count=1).replace("zero_data", "random_data"),
    "no_count": WARM.format(batch=1, count=0),
}
GROUPS = {
    "cpu": "instance_group { kind: KIND_CPU }",
    "auto": "instance_group { kind: KIND_AUTO }",
    "auto_two": "instance_group { count: 2 }",
    "model": "instance_group { kind: KIND_MODEL }",
    "gpu": "instance_group { kind: KIND_GPU }",
    "gpu_zero": "instance_group { kind: KIND_GPU gpus: [0] }",
    "named": 'instance_group { name: "own" count: 2 kind: KIND_CPU } instance_group { count: 1 kind: KIND_CPU }',
    "rated": "instance_group { kind: KIND_CPU rate_limiter { priority: 2 } }",
}
OTHERS = {
    "operations": "model_operations {}",
    "policy_empty": "version_policy {}",
    "optimization": "optimization { }",
    "optimization_set": "optimization { priority: PRIORITY_MAX input_pinned_memory { enable: false } }",
    "batching_empty": "dynamic_batching {}",
    "transaction": "model_transaction_policy {}",
    "cache_empty": "response_cache {}",
    "tags": 'metric_tags { key: "a" value: "b" }',
    "cc_names": 'cc_model_filenames { key: "a" value: "b" }',
    "parameters_empty": 'parameters { key: "a" value { } }',
    "labels_missing": 'output { name: "z" data_type: TYPE_FP32 dims: [1] label_filename: "nothing.txt" }',
    "runtime": 'runtime: "python"',
    "platform": 'platform: "python"',
    "input_twice": 'input { name: "x" data_type: TYPE_FP32 dims: [1] }',
    "reshape": 'output { name: "z" data_type: TYPE_FP32 dims: [1] reshape { } }',
    "shape_tensor": 'output { name: "z" data_type: TYPE_INT32 dims: [1] is_shape_tensor: true }',
    "dims_none": 'output { name: "z" data_type: TYPE_FP32 }',
    "dims_zero": 'output { name: "z" data_type: TYPE_FP32 dims: [0] }',
    "type_none": 'output { name: "z" dims: [1] }',
    "format": 'input { name: "w" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [3, 4, 4] optional: true }',
}
MODELS = (
    *(
        Model(
            f"queue_{name}",
            SLOW,
            config_of(X, Y, batch=1, more=f"dynamic_batching {{ default_queue_policy {{ {policy} }} }}"),
        )
        for name, policy in POLICIES.items()
    ),
    *(Model(f"warm_{name}", ECHO, config_of(X, Y, more=more)) for name, more in WARMED.items()),
    *(Model(f"group_{name}", KINDS, config_of(X, "y:STRING:1", more=more)) for name, more in GROUPS.items()),
    *(
        Model(
            f"has_{name}",
            ECHO,
            config_of(X, Y, batch=4 if "batching" in name else 0, more=more).replace(
                "max_batch_size: 0\n" if "max_batch" in more else "\n\n", "\n"
            ),
        )
        for name, more in OTHERS.items()
    ),
    Model("configured", ECHO, config_of(X, Y)),
)


def cases() -> Iterator[Case]:
    """Yield the cases."""
    for policy in POLICIES:
        model = f"queue_{policy}"
        first = Request(model, [floats("x", 0.5, shape=(1, 1))])
        for what, timeout_us in TIMEOUTS_US.items():
            parameters = {} if timeout_us is None else {"timeout": timeout_us}
            second = Request(model, [floats("x", 0, shape=(1, 1))], parameters=parameters)
            for way in BOTH if what == "short" else (GRPC,):
                count = 3 if policy == "short_queue" else 1
                yield Case(f"queue: {policy}, {what} timeout, {way}", [Behind(first, [second] * count, way)])
    for name in WARMED:
        model = f"warm_{name}"
        yield Case(
            f"warm-up: statistics, {name}",
            [
                Rpc("ModelStatistics", {"name": model}),
                Infer(Request(model, [floats("x", 1)]), GRPC),
                Rpc("ModelStatistics", {"name": model}),
                Scrape([f'nv_inference_{each}{{model="{model}"' for each in ("request_success", "exec", "count")]),
            ],
        )
    for name in (*(f"group_{each}" for each in GROUPS), *(f"has_{each}" for each in OTHERS)):
        yield Case(
            f"configured: {name}, asked",
            [Infer(Request(name, [floats("x", 1, shape=(1, 1) if "batching" in name else (1,))]), GRPC)],
        )
        yield Case(
            f"configured: {name}, config", [Rpc("ModelConfig", {"name": name}), Rpc("ModelMetadata", {"name": name})]
        )
    own: dict[str, Any] = {
        "backend": "python",
        "max_batch_size": 2,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [1]}],
    }
    own["output"] = [{"name": "y", "data_type": "TYPE_FP32", "dims": [1]}]
    told: list[Step] = [Rpc("ModelConfig", {"name": "configured"}), Http("GET", "/v2/models/configured")]
    path = "/v2/repository/models/configured/load"
    brings = Http("POST", path, {"parameters": {"config": json.dumps(own)}})
    yield Case("load: a configuration", [brings, *told])
    yield Case("load: without, after one with a configuration", [brings, Http("POST", path), *told])
    yield Case(
        "load: another one after that",
        [brings, Http("POST", path, {"parameters": {"config": json.dumps({**own, "max_batch_size": 0})}}), *told],
    )
    wrong = {
        "no JSON": "{",
        "empty": "",
        "no object": "[]",
        "an unknown field": json.dumps({**own, "unheard_of": 1}),
        "another name": json.dumps({**own, "name": "other"}),
        "no backend": json.dumps({key: own[key] for key in own if key != "backend"}),
    }
    for what, config in wrong.items():
        yield Case(f"load: {what}", [Http("POST", path, {"parameters": {"config": config}}), *told, Http("POST", path)])
    yield Case("load: empty object", [Http("POST", path, {"parameters": {"config": "{}"}}), Http("POST", path)])
    yield Case(
        "load: over gRPC",
        [
            Rpc(
                "RepositoryModelLoad",
                {"model_name": "configured", "parameters": {"config": {"string_param": json.dumps(own)}}},
            ),
            *told,
            Rpc("RepositoryModelLoad", {"model_name": "configured"}),
            *told,
        ],
    )
    yield Case(
        "load: unloaded between", [brings, Http("POST", path.replace("/load", "/unload")), Http("POST", path), *told]
    )
