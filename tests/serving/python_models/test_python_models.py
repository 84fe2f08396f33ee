"""`gangway serve` with Python models: what they get and give, alone, in batches, and as steps of ensembles."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from ml_dtypes import bfloat16
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from gangway.base.host_limits import memory_limit
from gangway.clients.connection import SERVICE
from gangway.clients.inputs import outputs_of
from gangway.protos import grpc_service_pb2 as pb
from gangway.protos.model_config_pb2 import ModelInstanceGroup
from testing.waiting import until
from tests.helpers import adder_models, ensemble_configs
from tests.helpers.http_requests import ask_http
from tests.helpers.python_models import ADD, config_of, four, parameter, write
from tests.helpers.served import TIMEOUT_S, Array, Served, inputs_of, serving
from tests.helpers.ways import WAYS, request_of

TYPES = ("BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64", "FP16", "FP32", "FP64")
IDENTITY = """
    def execute(self, requests):
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y" + x.name()[1:], x.as_numpy()) for x in r.inputs()])
                for r in requests]
"""
ARGUMENTS = """
    def initialize(self, args):
        self.args = args

    def execute(self, requests):
        import json, os
        found = []
        for r in requests:
            text = json.dumps({"args": {k: v for k, v in self.args.items() if k != "model_config"},
                "config": json.loads(self.args["model_config"]), "id": r.request_id(), "pid": os.getpid(),
                "parameters": json.loads(r.parameters()), "wanted": r.requested_output_names(),
                "timeout": r.timeout(), "priority": r.priority(), "correlation": r.correlation_id(),
                "flags": r.flags()})
            y = np.array([text.encode()], dtype=object)
            tensors = [pb_utils.Tensor("y", y), pb_utils.Tensor("z", np.zeros(1, np.int32))]
            found.append(pb_utils.InferenceResponse(tensors, parameters={"kind": "told", "count": 3, "yes": True}))
        return found
"""
BFLOAT = """
    def execute(self, requests):
        responses = []
        for r in requests:
            x = pb_utils.get_input_tensor_by_name(r, "x")
            try:
                why = x.as_numpy()
            except pb_utils.TritonModelException as error:
                why = str(error)
            y = pb_utils.Tensor.from_dlpack("y", x.to_dlpack())
            z = pb_utils.Tensor("z", np.array([f"{x.triton_dtype()} {x.shape()} {why}".encode()], dtype=object))
            responses.append(pb_utils.InferenceResponse([y, z]))
        return responses
"""
KINDS = (
    """
    def initialize(self, args):
        print(args["model_instance_name"], "is of kind", args["model_instance_kind"])
"""
    + ADD
)
BATCHED = """
    def execute(self, requests):
        import time
        time.sleep(0.05)
        return [pb_utils.InferenceResponse([
            pb_utils.Tensor("y", pb_utils.get_input_tensor_by_name(r, "x").as_numpy() * 2),
            pb_utils.Tensor("count", np.full((len(r.inputs()[0].as_numpy()), 1), len(requests), np.int32))])
            for r in requests]
"""
STRINGS = """
    def execute(self, requests):
        found = []
        for r in requests:
            x = pb_utils.get_input_tensor_by_name(r, "x").as_numpy()
            y = np.array([s.decode()[::-1] for s in x], dtype=object)
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", y)]))
        return found
"""
OPTIONAL = """
    def execute(self, requests):
        found = []
        for r in requests:
            b = pb_utils.get_input_tensor_by_name(r, "b")
            a = pb_utils.get_input_tensor_by_name(r, "a").as_numpy()
            found.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", a if b is None else a + b.as_numpy())]))
        return found
"""
GROWS = """
    def execute(self, requests):
        ends = [r.inputs()[0].as_numpy()[0] for r in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", np.arange(end, dtype=np.int64))]) for end in ends]
"""
NOISY = """
    def initialize(self, args):
        print("printed by initialize")
        pb_utils.Logger.log_warn("warned by the model")

    def execute(self, requests):
        print("printed by execute")
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", r.inputs()[0].as_numpy())]) for r in requests]
"""
HELPED = ADD.replace("np.float32(1)", "np.float32(NUMBER)")
BROKEN = {
    "raises": (
        "    def initialize(self, args):\n        raise ValueError('no weights here')\n",
        None,
        "ValueError: no weights here",
    ),
    "large": (
        "    def initialize(self, args):\n        self.weights = np.empty(1 << 50, np.uint8)\n",
        None,
        "Unable to allocate 1.00 PiB .* MiB of data; the model's parameter gangway_python_memory_mib raises that",
    ),
    "exits": (
        "    def initialize(self, args):\n        import os\n        os._exit(3)\n",
        None,
        "exited with status 3",
    ),
    "no_execute": ("    pass\n", None, "has no method 'execute'"),
    "no_output": (ADD, config_of(outputs=""), "must specify 'output'"),
    "states": (
        ADD,
        config_of(
            more='sequence_batching { state { input_name: "a" output_name: "b" data_type: TYPE_FP32 dims: [1] } }'
        ),
        "a Python model keeps its state itself",
    ),
    "decoupled": (
        ADD,
        config_of(more="sequence_batching { } model_transaction_policy { decoupled: true }"),
        "sequence_batching is not supported for decoupled models",
    ),
    "control": (
        ADD,
        config_of(
            more='sequence_batching { control_input { name: "x" control { kind: CONTROL_SEQUENCE_START'
            " fp32_false_true: [0, 1] } } }"
        ),
        "input 'x' is one of sequence_batching, too",
    ),
    "slow": (
        ADD,
        config_of(more='parameters { key: "gangway_python_timeout_s" value { string_value: "x" } }'),
        "expected a number",
    ),
    "nobody": (ADD, config_of(more=parameter("gangway_python_concurrency", 0)), 'whole number from 1 to 1000, got "0"'),
    "many": (ADD, config_of(more=parameter("gangway_python_concurrency", 1001)), "whole number from 1 to 1000"),
    "fraction": (
        ADD,
        config_of(more=parameter("gangway_python_concurrency", 1.5)),
        'whole number from 1 to 1000, got "1.5"',
    ),
    "elsewhere": (
        ADD,
        config_of(more='parameters { key: "EXECUTION_ENV_PATH" value { string_value: "/no/env" } }'),
        "is no environment",
    ),
}


# Memory that nobody writes to costs nothing but the limit.
HALF = f"""
    def initialize(self, args):
        self.weights = np.empty({memory_limit().size_bytes // 2}, np.uint8)
{ADD}"""


def fill(repository: Path) -> None:
    write(repository, "add")
    write(repository, "half", HALF)
    inputs, outputs = (" ".join(f"{letter}_{name}:{name}:-1" for name in TYPES) for letter in "xy")
    write(repository, "identity", IDENTITY, config_of(inputs, outputs))
    write(repository, "arguments", ARGUMENTS, config_of("x:FP32:1", "y:STRING:1 z:INT32:1"))
    write(
        repository,
        "batched",
        BATCHED,
        config_of("x:FP32:4", "y:FP32:4 count:INT32:1", batch=8, more="dynamic_batching { }"),
    )
    write(repository, "strings", STRINGS, config_of("x:STRING:-1", "y:STRING:-1"))
    optional = config_of(
        "a:FP32:4", "y:FP32:4", more='input { name: "b" data_type: TYPE_FP32 dims: [4] optional: true }'
    )
    write(repository, "optional", OPTIONAL, optional)
    groups = "instance_group { kind: KIND_MODEL } instance_group { kind: KIND_AUTO } instance_group { kind: KIND_GPU }"
    groups += ' instance_group { name: "own" kind: KIND_CPU count: 2 }'
    write(repository, "bfloat", BFLOAT, config_of("x:BF16:-1", "y:BF16:-1 z:STRING:1"))
    write(repository, "not_bfloat", ADD, config_of("x:FP32:4", "y:BF16:4"))
    write(repository, "kinds", KINDS, config_of(more=groups))
    write(repository, "grows", GROWS, config_of("x:INT64:1", "y:INT64:-1"))
    write(repository, "noisy", NOISY)
    write(
        repository,
        "helped",
        HELPED,
        head="import numpy as np\nimport triton_python_backend_utils as pb_utils\nfrom .helper import NUMBER\n\n\n",
    )
    (repository / "helped" / "1" / "helper.py").write_text("NUMBER = 41\n")
    for name, (body, config, _) in BROKEN.items():
        write(repository, name, body, config)
    write(repository, "syntax", "    def execute(self, requests) return\n")
    adder_models.write(repository, "two", 2)
    chain = [("add", "x=x", "y=a"), ("two", "x=a", "y=b"), ("add", "x=b", "y=y")]
    ensemble_configs.write(repository, "chain", ensemble_configs.config_of("x:FP32:4", "y:FP32:4", chain, batch=0))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, model_cache: Path) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("repository")
    fill(repository)
    flags = [f"--cache-dir={model_cache}", "--strict-readiness=false", "--model-control-mode=explicit"]
    names = [folder.name for folder in repository.iterdir() if folder.name not in (*BROKEN, "syntax")]
    flags += [f"--load-model={name}" for name in names]
    with serving(repository, *flags, cwd=repository.parent) as served:
        yield served


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_ask(served: Served, way: str) -> None:
    assert np.array_equal(served.over(way, "add", x=four(1.5))["y"], four(2.5))


def values_of(name: str) -> Array:
    dtype = {"BOOL": bool, "FP16": np.float16, "FP32": np.float32, "FP64": np.float64}.get(name, name.lower())
    return np.random.default_rng(0).integers(0, 2 if name == "BOOL" else 100, 17).astype(dtype)


@pytest.mark.parametrize("name", TYPES)
def test_every_type(served: Served, name: str) -> None:
    """It alone has elements, or it alone has none."""
    for has_elements in (True, False):
        feeds = {f"x_{each}": values_of(each)[: 17 * ((each == name) == has_elements)] for each in TYPES}
        answers = served.infer("identity", **feeds)
        for each in TYPES:
            assert answers[f"y_{each}"].dtype == feeds[f"x_{each}"].dtype
            assert np.array_equal(answers[f"y_{each}"], feeds[f"x_{each}"])


def test_bf16_is_for_dlpack_only(served: Served) -> None:
    values = np.array([1, -2.5, 3e38, 0], bfloat16)
    x = triton.InferInput("x", [4], "BF16")
    x.set_data_from_numpy(values)
    result = served.client.infer("bfloat", [x])
    assert result.get_response().raw_output_contents[0] == values.tobytes()
    assert result.as_numpy("z")[0].decode().startswith("14 [4] Tensor dtype is BF16 and cannot be converted to NumPy")
    assert np.array_equal(served.infer("not_bfloat", x=four(1))["y"], four(2))


def test_strings(served: Served) -> None:
    x = np.array([b"abc", "h\u00e9".encode(), b""], dtype=object)
    assert served.infer("strings", x=x)["y"].tolist() == [b"cba", "\u00e9h".encode(), b""]


def test_strings_that_are_cut_off_do_not_reach_it(served: Served) -> None:
    for content in (b"", b"\x05\x00\x00\x00ab", b"\x01\x00\x00\x00ab", b"\xff\xff\xff\xff"):
        request = pb.ModelInferRequest(model_name="strings", raw_input_contents=[content])
        request.inputs.add(name="x", datatype="BYTES", shape=[1])
        with grpc.insecure_channel(served.server.url) as channel:
            call = channel.unary_unary(SERVICE + "ModelInfer", pb.ModelInferRequest.SerializeToString)
            with pytest.raises(grpc.RpcError) as caught:
                call(request, timeout=TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_what_a_model_is_told(served: Served) -> None:
    parameters = {"mine": "text", "number": 7}
    x = inputs_of({"x": np.zeros(1, np.float32)})
    wanted = [triton.InferRequestedOutput("y")]
    result = served.client.infer(
        "arguments", x, request_id="r1", timeout=9_000_000, priority=2, parameters=parameters, outputs=wanted
    )
    told = json.loads(result.as_numpy("y")[0])
    assert told["args"] == {
        "model_instance_kind": "CPU",
        "model_instance_name": "arguments_0",
        "model_instance_device_id": "0",
        "model_repository": str(served.repository / "arguments"),
        "model_version": "1",
        "model_name": "arguments",
    }
    assert [tensor["dims"] for tensor in told["config"]["input"]] == [[1]]
    assert (told["id"], told["parameters"], told["wanted"]) == ("r1", parameters, ["y"])
    assert (told["timeout"], told["priority"], told["correlation"]) == (9_000_000, 2, 0)
    assert [output.name for output in result.get_response().outputs] == ["y"]
    given = result.get_response().parameters
    assert (given["kind"].string_param, given["count"].int64_param, given["yes"].bool_param) == ("told", 3, True)
    assert told["pid"] in served.instances("arguments")


@pytest.mark.parametrize(
    ("given", "identity", "flags"),
    [
        ({"sequence_id": 7}, 7, 0),
        ({"sequence_id": 7, "sequence_start": True}, 7, 1),
        ({"sequence_id": "seven", "sequence_start": True, "sequence_end": True}, "seven", 3),
        ({"sequence_id": 2**63 - 1, "sequence_end": True}, 2**63 - 1, 2),
    ],
)
def test_an_id_of_a_sequence_is_told_where_there_are_none(
    served: Served, given: dict[str, Any], identity: int | str, flags: int
) -> None:
    """As in Triton, it means nothing to a model without sequences. Python models see it."""
    request = request_of("arguments", {"x": np.zeros(1, np.float32)}, **given)
    for way in WAYS.values():
        said = json.loads(outputs_of(way(served.server, request))["y"][0])
        assert (said["correlation"], said["flags"], said["parameters"]) == (identity, flags, {})
    for name, y in (("add", 1), ("two", 2), ("chain", 4)):
        x = four(0)[None] if name == "two" else four(0)
        assert np.array_equal(served.client.infer(name, inputs_of({"x": x}), **given).as_numpy("y"), x + y)


def test_kinds_of_instances(served: Served) -> None:
    """As Triton without a GPU: KIND_AUTO is KIND_CPU. KIND_GPU is it, too, with a warning.

    Instances have the names of their groups, and a number.
    """
    for said in ("kinds_0_0 is of kind MODEL", "kinds_1_0 is of kind CPU", "kinds_2_0 is of kind CPU"):
        until(lambda said=said: said in served.log())  # type: ignore[misc]
    for number in range(2):
        until(lambda number=number: f"own_{number} is of kind CPU" in served.log())  # type: ignore[misc]
    groups = served.client.get_model_config("kinds").config.instance_group
    assert [group.name for group in groups] == ["kinds_0", "kinds_1", "kinds_2", "own"]
    shown = [ModelInstanceGroup.Kind.Name(group.kind) for group in groups]
    assert shown == ["KIND_MODEL", "KIND_CPU", "KIND_GPU", "KIND_CPU"]
    assert "KIND_GPU (there is no GPU)" in served.log()


def test_requests_are_joined_but_stay_apart(served: Served) -> None:
    def ask(value: int) -> tuple[bool, int]:
        x = np.full((1 + value % 2, 4), value, np.float32)
        answer = served.infer("batched", x=x)
        return np.array_equal(answer["y"], x * 2), int(answer["count"].max())

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(24)))
    assert all(right for right, _ in answers)
    assert max(count for _, count in answers) > 1, "no batch was formed"
    with pytest.raises(InferenceServerException, match="batch-size must be <= 8"):
        served.infer("batched", x=np.zeros((9, 4), np.float32))


def test_optional_inputs(served: Served) -> None:
    assert np.array_equal(served.infer("optional", a=four(1))["y"], four(1))
    assert np.array_equal(served.infer("optional", a=four(1), b=four(2))["y"], four(3))


def test_answers_of_any_size_are_computed_once(served: Served) -> None:
    """The memory for an answer is a guess: a larger one is fetched from the instance, and not computed again."""
    for count in (3, 50_000, 4, 3_000_000):
        assert np.array_equal(served.infer("grows", x=np.array([count]))["y"], np.arange(count))


def test_modules_beside_the_model(served: Served) -> None:
    assert np.array_equal(served.infer("helped", x=four(1))["y"], four(42))


def test_steps_of_an_ensemble(served: Served) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = pool.map(lambda value: (value, served.infer("chain", x=four(value))["y"]), range(40))
        assert all(np.array_equal(y, four(value + 4)) for value, y in answers)


def test_what_it_writes_is_in_the_log(served: Served) -> None:
    served.infer("noisy", x=four(0))
    for text in ("printed by initialize", "printed by execute", "warned by the model"):  # each by a way of its own
        until(lambda text=text: text in served.log())
    lines = {line.split("instance 0: ")[-1]: line for line in served.log().splitlines() if "noisy" in line}
    assert " INFO noisy" in lines["printed by initialize"]
    assert " WARNING noisy" in lines["warned by the model"]


def test_a_model_may_take_most_of_the_memory(served: Served) -> None:
    assert np.array_equal(served.infer("half", x=four(1))["y"], four(2))


@pytest.mark.parametrize("name", [*BROKEN, "syntax"])
def test_a_model_that_cannot_be_loaded_says_why(served: Served, name: str) -> None:
    reason = BROKEN[name][2] if name in BROKEN else "SyntaxError"
    with pytest.raises(InferenceServerException, match=reason):
        served.client.load_model(name)
    assert not served.client.is_model_ready(name)
    until(lambda: not served.instances(name))  # it says why, and ends
    assert np.array_equal(served.infer("add", x=four(1))["y"], four(2))


def test_clients_cannot_bring_code(served: Served) -> None:
    """A load request may bring ONNX files and configurations, but nothing that the server would run."""
    config = {"backend": "python", "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}]}
    config["output"] = [{"name": "y", "data_type": "TYPE_FP32", "dims": [4]}]
    code = (served.repository / "add" / "1" / "model.py").read_bytes()
    for name in ("brought", "add"):
        with pytest.raises(InferenceServerException, match="cannot come with a load request"):
            served.client.load_model(name, config=json.dumps(config), files={"file:1/model.py": code})
    parameters = {"EXECUTION_ENV_PATH": {"string_value": "/bin/sh"}}
    with pytest.raises(InferenceServerException, match="EXECUTION_ENV_PATH cannot come with a load request"):
        served.client.load_model("add", config=json.dumps({**config, "parameters": parameters}))
    assert np.array_equal(served.infer("add", x=four(1))["y"], four(2))
    served.client.load_model("add", config=json.dumps({**config, "instance_group": [{"count": 2}]}))
    until(lambda: len(served.instances("add")) == 2)
    served.client.load_model("add")


def test_what_clients_see_of_it(served: Served) -> None:
    config = served.client.get_model_config("add").config
    assert (config.backend, config.default_model_filename) == ("python", "model.py")
    assert [(group.name, group.count) for group in config.instance_group] == [("add", 1)]
    assert config.parameters["gangway_engine"].string_value == "python"
    metadata = served.client.get_model_metadata("add")
    assert (metadata.platform, config.platform) == ("python", "")
    assert ask_http(served.server.http_url, "GET", "/v2/models/add").content["platform"] == "python"
    assert [(tensor.name, tensor.datatype, list(tensor.shape)) for tensor in metadata.inputs] == [("x", "FP32", [4])]
    served.infer("add", x=four(1))
    counted = served.client.get_inference_statistics("add").model_stats[0].inference_stats
    assert counted.success.count >= 1


@pytest.mark.parametrize(
    ("feeds", "why"),
    [
        ({"x": np.zeros(5, np.float32)}, "unexpected shape"),
        ({"x": np.zeros(4, np.int32)}, "expects 'FP32'"),
        ({"z": np.zeros(4, np.float32)}, "unexpected inference input 'z'"),
    ],
)
def test_wrong_requests_do_not_reach_it(served: Served, feeds: dict[str, Any], why: str) -> None:
    assert {np_to_triton_dtype(array.dtype) for array in feeds.values()}
    with pytest.raises(InferenceServerException, match=why):
        served.infer("add", **feeds)
