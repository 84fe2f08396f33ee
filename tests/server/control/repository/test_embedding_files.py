"""What is known of a model's embeddings: from its tensors, the files beside it, and its configuration."""

import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format

from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.control.repository.embedding_files import complete_embeddings
from gangway.server.errors import ConfigError
from gangway.server.models.embeddings import EmbeddingSettings

TOKENS = [("input_ids", "INT64", [-1]), ("attention_mask", "INT64", [-1])]
STATES = ("last_hidden_state", "FP32", [-1, 8])
Tensors = list[tuple[str, str, list[int]]]


def config_of(inputs: Tensors, outputs: Tensors, given: str = "") -> ModelConfig:
    lines = ["max_batch_size: 4"]
    for group, tensors in (("input", inputs), ("output", outputs)):
        for name, datatype, dims in tensors:
            lines.append(f'{group} {{ name: "{name}" data_type: TYPE_{datatype} dims: {dims} }}')
    if given:
        lines.append(f'parameters {{ key: "gangway_embeddings" value: {{ string_value: "{given}" }} }}')
    return text_format.Parse("\n".join(lines), ModelConfig())


def settings_of(folder: Path, config: ModelConfig) -> EmbeddingSettings | None:
    complete_embeddings(config, "m", folder, folder / "1")
    return EmbeddingSettings.of(config)


def write(folder: Path, files: dict[str, Any]) -> None:
    for name, content in {"tokenizer.json": {}, **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))


MODULES = [{"type": "sentence_transformers.models.Transformer"}, {"type": "a.b.Pooling"}]
KNOWN: list[tuple[Tensors, dict[str, Any], str, EmbeddingSettings]] = [
    ([STATES], {}, "", EmbeddingSettings("embed", "last_hidden_state", "mean", True, "sigmoid", 512)),
    (
        [("token_embeddings", "FP32", [-1, 8]), ("sentence_embedding", "FP32", [8])],
        {"modules.json": [*MODULES, {"type": "x.Normalize"}], "tokenizer_config.json": {"model_max_length": 64}},
        "",
        EmbeddingSettings("embed", "sentence_embedding", "none", True, "sigmoid", 64),
    ),
    (
        [STATES, ("pooler_output", "FP32", [8])],
        {
            "modules.json": MODULES,
            "1_Pooling/config.json": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
            "sentence_bert_config.json": {"max_seq_length": 32},
            "tokenizer_config.json": {"model_max_length": 64},
        },
        "",
        EmbeddingSettings("embed", "last_hidden_state", "cls", False, "sigmoid", 32),
    ),
    (
        [STATES],
        {"1_Pooling/config.json": {"pooling_mode": "lasttoken"}, "tokenizer_config.json": {"model_max_length": 10**30},
         "config.json": {"max_position_embeddings": 100}},
        "",
        EmbeddingSettings("embed", "last_hidden_state", "last", True, "sigmoid", 100),
    ),
    ([("logits", "FP32", [1])], {}, "", EmbeddingSettings("rerank", "logits", "none", False, "sigmoid", 512)),
    (
        [STATES, ("other", "FP16", [4])],
        {},
        "output=other; normalize=false; max_tokens=9",
        EmbeddingSettings("embed", "other", "none", False, "sigmoid", 9),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("outputs", "files", "given", "expected"), KNOWN)
def test_settings(
    tmp_path: Path, outputs: Tensors, files: dict[str, Any], given: str, expected: EmbeddingSettings
) -> None:
    write(tmp_path, files)
    config = config_of(TOKENS, outputs, given)
    assert settings_of(tmp_path, config) == expected
    assert settings_of(tmp_path, config) == expected  # what is completed says the same


OTHERS: list[tuple[Tensors, Tensors, dict[str, Any]]] = [
    ([("x", "FP32", [4])], [STATES], {}),  # no tokens
    ([*TOKENS, ("pixels", "FP32", [4])], [STATES], {}),
    (TOKENS, [("logits", "FP32", [-1, 100])], {}),  # a language model
    (TOKENS, [("scores", "FP32", [8])], {}),  # a name that says nothing
    (TOKENS, [STATES], {"1_Pooling/config.json": {"pooling_mode_weightedmean_tokens": True}}),
    (TOKENS, [STATES], {"modules.json": [*MODULES, {"type": "sentence_transformers.models.Dense"}]}),
    (TOKENS, [STATES], {"config.json": "{"}),
]


@pytest.mark.parametrize(("inputs", "outputs", "files"), OTHERS)
def test_models_that_give_none(tmp_path: Path, inputs: Tensors, outputs: Tensors, files: dict[str, Any]) -> None:
    write(tmp_path, files)
    assert settings_of(tmp_path, config_of(inputs, outputs)) is None
    given = "task=embed" if outputs == [STATES] or inputs != TOKENS else "task=rerank"
    with pytest.raises(ConfigError, match="gangway_embeddings"):
        settings_of(tmp_path, config_of(inputs, outputs, given))


def test_a_file_in_a_folder_of_exports_has_its_files_above_it(tmp_path: Path) -> None:
    write(tmp_path, {"tokenizer_config.json": {"model_max_length": 77}})
    config = config_of(TOKENS, [STATES])
    assert complete_embeddings(config, "m", tmp_path / "onnx", tmp_path / "onnx") == str(tmp_path / "tokenizer.json")
    found = EmbeddingSettings.of(config)
    assert found is not None and found.max_tokens == 77


def test_no_tokenizer_and_no_parameter_is_no_service(tmp_path: Path) -> None:
    assert settings_of(tmp_path, config_of(TOKENS, [STATES])) is None
    write(tmp_path, {})
    assert settings_of(tmp_path, config_of(TOKENS, [STATES], "off")) is None


@pytest.mark.parametrize(
    "given", ["task=classify", "tokens=3", "pooling", "max_tokens=0", "max_tokens=x", "task=embed; task=embed"]
)
def test_wrong_settings(tmp_path: Path, given: str) -> None:
    with pytest.raises(ConfigError, match="gangway_embeddings"):
        settings_of(tmp_path, config_of(TOKENS, [STATES], given))
