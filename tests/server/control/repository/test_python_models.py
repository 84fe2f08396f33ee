"""Configurations that model.py completes: of what it returns that counts for which `ModelConfig` has methods."""

import json
from typing import Any

import pytest
from google.protobuf import json_format

from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.control.repository.python_models import completed_config
from gangway.server.errors import ConfigError

TENSORS = {
    group: [{"name": name, "data_type": "TYPE_FP32", "dims": [-1]}] for group, name in (("input", "x"), ("output", "y"))
}
OWN = {"parameters": {"own": {"string_value": "yes"}}, "default_model_filename": "code.py"}


def completed(more: dict[str, Any], own: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what a configuration is when model.py has returned it with `more`."""
    config = json_format.ParseDict({**OWN, **(own or {})}, ModelConfig())
    found = completed_config(json.dumps({**OWN, **(own or {}), **TENSORS, **more}), config, "m")
    return json_format.MessageToDict(found, preserving_proto_field_name=True)


@pytest.mark.parametrize(
    "more",
    [
        {"max_batch_size": 4},
        {"dynamic_batching": {"preserve_ordering": True}},
        {"model_transaction_policy": {"decoupled": True}},
        {"input": [{"name": "other", "data_type": "TYPE_INT32", "dims": ["3"], "optional": True}]},
    ],
)
def test_what_a_model_can_complete(more: dict[str, Any]) -> None:
    assert completed(more) == completed({}) | more


@pytest.mark.parametrize(
    "more",
    [
        {"name": "other"},
        {"backend": "onnxruntime"},
        {"platform": "other"},
        {"parameters": {"more": {"string_value": "yes"}}},
        {"instance_group": [{"count": 2, "kind": "KIND_CPU"}]},
        {"version_policy": {"all": {}}},
        {"default_model_filename": "model.py"},
        {"response_cache": {"enable": True}},
        {"model_warmup": [{"name": "w", "batch_size": 1}]},
        {"optimization": {"priority": "PRIORITY_MAX"}},
    ],
)
def test_what_a_model_cannot_complete_stays(more: dict[str, Any]) -> None:
    assert completed(more) == completed({})


def test_a_scheduler_of_the_configuration_stays() -> None:
    own = {"dynamic_batching": {"preferred_batch_size": [2]}, "max_batch_size": 4}
    assert completed({"dynamic_batching": {}}, own)["dynamic_batching"] == {"preferred_batch_size": [2]}


@pytest.mark.parametrize("group", ["input", "output"])
@pytest.mark.parametrize(
    ("dims", "reshape", "reason"),
    [
        ([4], [8], r"dims \[4\] and reshape \[8\] differ in size"),
        ([4], [2, 2], ""),
        ([1], [], ""),
        ([2], [], "differ in size"),
        ([4], [0], r"reshape is \[0\], expected 1 or more, or -1"),
        ([4], [-2], r"reshape is \[-2\], expected 1 or more, or -1"),
        ([2, -1], [2, 2], "differ in size"),
        ([2, -1], [2, -1, -1], "differ in size"),
        ([2, -1, 3], [-1, 6], "differ in size"),
        ([6, -1, 3], [2, 3, -1, 3, 1], ""),
    ],
)
def test_a_reshape_has_as_many_elements(group: str, dims: list[int], reshape: list[int], reason: str) -> None:
    more = {group: [{"name": "t", "data_type": "TYPE_FP32", "dims": dims, "reshape": {"shape": reshape}}]}
    if not reason:
        completed(more)
        return
    with pytest.raises(ConfigError, match=f"{group} 't': .*{reason}"):
        completed(more)


def test_what_is_no_configuration() -> None:
    with pytest.raises(ConfigError, match=r"returns no model configuration: .*TYPE_FP31"):
        completed({"input": [{"name": "x", "data_type": "TYPE_FP31", "dims": [1]}]})
