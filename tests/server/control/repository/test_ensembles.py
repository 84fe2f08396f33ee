"""What is refused of an ensemble's configuration, and how graphs are made of it."""

from pathlib import Path

import pytest
from google.protobuf import text_format

from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.control.repository.ensembles import check_members, load_order
from gangway.server.control.repository.repository import BrokenModel, ModelVersion, read_model
from gangway.server.errors import ConfigError
from gangway.server.messages import WHOLE_MODEL
from gangway.server.models.config import check_ensemble, check_supported, is_ensemble, longest_after
from tests.helpers.ensemble_configs import Step, config_of, write

X, Y = "x:FP32:4", "y:FP32:4"
GOOD: list[Step] = [("a", "x=x", "y=t"), ("b", "x=t", "y=y")]


def parsed(text: str) -> ModelConfig:
    return text_format.Parse(text, ModelConfig())


def member(inputs: str = X, outputs: str = Y, batch: int = 4) -> ModelConfig:
    config = parsed(config_of(inputs, outputs, [], batch))
    config.ClearField("ensemble_scheduling")
    return config


def test_a_right_one_passes() -> None:
    config = parsed(config_of(X, Y, GOOD, more='parameters { key: "qos_ms" value { string_value: "3x" } }'))
    assert is_ensemble(config)
    check_supported(config, "e")
    check_members("e", config, [member(), member()])


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (config_of(X, Y, GOOD).replace('"ensemble"', '"onnxruntime_onnx"'), "whose platform is not ensemble"),
        ('platform: "ensemble"', "ensemble scheduling must be set for ensemble 'e'"),
        (config_of(X, Y, GOOD, more="instance_group { count: 1 }"), "instance group should not be specified"),
        (config_of(X, Y, GOOD, more="optimization { priority: 1 }"), "optimization should not be specified"),
        (config_of(X, Y, GOOD, more='model_warmup { name: "w" batch_size: 1 }'), "model_warmup can not be specified"),
        (config_of(X, Y, GOOD, more='backend: "onnxruntime"'), "backend or runtime can not be specified"),
        (config_of(X, Y, GOOD, more='parameters { key: "max_queue_size" value { } }'), "max_queue_size can not be"),
        (config_of(X, Y, GOOD, more='parameters { key: "batching" value { } }'), "batching can not be"),
        (config_of("", Y, GOOD), "ensemble 'e' has 0 inputs, expected 1 to 1024"),
        (config_of(X, "", GOOD), "ensemble 'e' has 0 outputs"),
        (config_of(X, Y, GOOD).replace("data_type: TYPE_FP32", "", 1), "must specify 'data_type' of input 'x'"),
        (config_of(X, Y, GOOD).replace("dims: [ 4 ]", "", 1), "must specify 'dims' of input 'x'"),
        (config_of("x:FP32:0", Y, GOOD), r"dims are \[0\], expected 1 or more"),
        (
            config_of(X, Y, GOOD).replace("dims: [ 4 ]", "dims: [ 4 ] reshape { shape: 4 }", 1),
            "reshape is not supported",
        ),
        (config_of(X, Y, []), "must specify 'step' for ensemble 'e'"),
        (config_of(X, Y, GOOD * 40), "has 80 steps, at most 64"),
        (config_of(X, Y, [("", "x=x", "y=y")]), "must specify 'model_name' in step 0"),
        (config_of(X, Y, [*GOOD, ("c", "", "y=z")]), "must specify 'input_map' in step 2"),
        (config_of(X, Y, [*GOOD, ("c", "x=t", "")]), "must specify 'output_map' in step 2"),
        (config_of(X, Y, [("a@-2", "x=x", "y=y")]), "model_version of step 0 of ensemble 'e' is -2"),
        (config_of(X, Y, [*GOOD, ("c", "x=x", "y=t")]), "'t' can appear in an output map only once.* written already"),
        (config_of(X, Y, [*GOOD, ("c", "x=t", "y=x")]), "'x' can appear in an output map only once.* an input"),
        (config_of(f"{X} z:FP32:4", Y, GOOD), "ensemble input 'z' for ensemble 'e' is not used"),
        (config_of(X, f"{Y} z:FP32:4", GOOD), "output 'z' for ensemble 'e' is not written"),
        (config_of(X, f"{Y} {X}", GOOD), "output 'x' for ensemble 'e' is an input, too"),
        (config_of(X, Y, [("a", "x=x u=v", "y=t"), ("b", "x=t", "y=y z=v")]), "step 0 never gets .* 'v': it waits for"),
        (config_of(X, Y, [("a", "x=x u=v", "y=y")]), "step 0 never gets the ensemble tensor 'v': nothing writes it"),
        (config_of(X, Y, [*GOOD, ("c", "x=t", "y=z")]), "ensemble tensor 'z' is unused in ensemble 'e'"),
        (config_of(X, Y, GOOD).replace("model_version", 'model_namespace: "n" model_version', 1), "no namespaces"),
    ],
)
def test_what_is_wrong_in_itself(config: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_supported(parsed(config), "e")


def test_batching_is_for_the_models(tmp_path: Path) -> None:
    write(tmp_path, "e", config_of(X, Y, GOOD, more="dynamic_batching { }"))
    (entry,) = read_model(tmp_path / "e")
    assert isinstance(entry, BrokenModel)
    assert "dynamic_batching" in entry.reason and "ensemble_scheduling" in entry.reason
    write(tmp_path, "e", config_of(X, Y, GOOD))
    (version,) = read_model(tmp_path / "e")
    assert isinstance(version, ModelVersion) and version.is_ensemble
    (tmp_path / "e" / "1").rmdir()
    (entry,) = read_model(tmp_path / "e")
    assert entry == BrokenModel("e", WHOLE_MODEL, "there is no version folder (such as '1')")


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([member(batch=2), member()], "allows maximum batch size 4, but it contains model a which only .* to be 2"),
        ([member("z:FP32:4"), member()], "ensemble tensor x is mapping to non-existing input x in model a"),
        ([member(f"{X} z:FP32:4"), member()], "input z in model a is not mapped to any ensemble tensors"),
        ([member(outputs="z:FP32:4"), member()], "tensor t is mapped from non-existing output y in model a"),
        (
            [member(), member("x:INT32:4")],
            "t: inconsistent data type: TYPE_FP32 .* model a while TYPE_INT32 .* model b",
        ),
        ([member("x:STRING:4"), member()], "x: inconsistent data type: TYPE_FP32 .* model e while TYPE_STRING"),
        ([member(), member("x:FP32:5")], r"t: inconsistent shape: \[-1, 4\] .* model a while \[-1, 5\] .* model b"),
        ([member(), member(outputs="y:FP32:4,1")], "y: inconsistent shape"),
        ([member(), member("x:FP32:3,5", batch=0)], "t: inconsistent shape"),
    ],
)
def test_models_that_do_not_fit_together(members: list[ModelConfig], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        check_members("e", parsed(config_of(X, Y, GOOD)), members)


def decoupled() -> ModelConfig:
    config = member()
    config.model_transaction_policy.decoupled = True
    return config


def test_models_with_sequences_and_decoupled_ones_are_steps() -> None:
    stateful = member()
    stateful.sequence_batching.SetInParent()
    check_members("e", parsed(config_of(X, Y, GOOD)), [decoupled(), stateful])


def test_tensors_of_different_decoupled_models_do_not_meet() -> None:
    steps = [("a", "x=x", "y=s"), ("b", "x=x", "y=t"), ("c", "x=s z=t", "y=y")]
    config = parsed(config_of(X, Y, steps))
    both = member(f"{X} z:FP32:4")
    check_members("e", config, [decoupled(), member(), both])
    with pytest.raises(ConfigError, match="in ensemble e, step of model 'c' receives inputs originated from different"):
        check_members("e", config, [decoupled(), decoupled(), both])
    config = parsed(config_of(X, f"{Y} z:FP32:4", [("a", "x=x", "y=y"), ("b", "x=x", "y=z")]))
    check_members("e", config, [decoupled(), member()])
    with pytest.raises(ConfigError, match="in ensemble e, outputs originate from different decoupled models"):
        check_members("e", config, [decoupled(), decoupled()])


def test_sizes_that_only_a_request_tells_and_batches_that_are_dimensions() -> None:
    config = parsed(config_of(X, Y, GOOD))
    check_members("e", config, [member(outputs="y:FP32:-1"), member()])
    check_members("e", config, [member("x:FP32:-1,4", "y:FP32:-1,4", batch=0), member()])
    optional = member()
    optional.input[0].optional = True
    check_members("e", config, [optional, member()])
    config.input[0].optional = True
    check_members("e", config, [optional, member()])
    with pytest.raises(ConfigError, match="the optional input x is mapped to input x in model a, which is not"):
        check_members("e", config, [member(), member()])


def test_the_longest_chain_after_each_step() -> None:
    #      0 (1) -> 1 (10) -> 3 (5) -> 4 (2)
    #            -> 2 (20) -/
    assert longest_after([1, 10, 20, 5, 2], [[1, 2], [3], [3], [4], []]) == (27, 7, 7, 2, 0)
    assert longest_after([1, 10], [[], []]) == (0, 0)
    ladder = [[2 * step + 2, 2 * step + 3] for step in range(30) for _ in range(2)]  # 2^30 ways through it
    assert longest_after([1.0] * 62, [*ladder, [], []])[0] == 30


def test_each_ensemble_is_loaded_after_its_models() -> None:
    order = load_order({"outer": ["inner", "m"], "inner": ["m", "elsewhere"], "m": [], "self": ["self"]})
    assert order.index("m") < order.index("inner") < order.index("outer")
    assert sorted(order) == ["inner", "m", "outer", "self"]
    assert sorted(load_order({"a": ["b"], "b": ["a"]})) == ["a", "b"]
    chain = {f"m{number}": [f"m{number + 1}"] for number in range(5000)}
    assert load_order(chain)[0] == "m4999"


def test_a_name_in_a_message_has_an_end() -> None:
    with pytest.raises(ConfigError) as raised:
        check_ensemble(parsed(config_of(f"{'x' * 5000}:FP32:4", Y, GOOD)), "e")
    assert len(str(raised.value)) < 600
