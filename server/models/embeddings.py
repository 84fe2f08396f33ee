"""How a model answers `/v1/embeddings` and `/v1/rerank`, as the parameter `gangway_embeddings` says it.

Its text is "NAME=VALUE; NAME=VALUE"; what it leaves out follows from the model's tensors and from the files beside it
(`control/repository/embedding_files.py`). The server completes it, so that clients see in a configuration what holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.errors import ConfigError, shortened
from gangway.server.models.config_table import parameter_of

EMBEDDINGS_PARAMETER: Final = "gangway_embeddings"
OFF: Final = "off"
EMBED, RERANK = "embed", "rerank"
SENTENCE, MEAN, CLS, LAST, MAX = "none", "mean", "cls", "last", "max"
SIGMOID: Final = "sigmoid"
CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "task": (EMBED, RERANK),
    "pooling": (SENTENCE, MEAN, CLS, LAST, MAX),
    "normalize": ("true", "false"),
    "activation": (SIGMOID, "none"),
    "matryoshka": ("true", "false"),
}
NAMES: Final = (*CHOICES, "max_tokens", "output")
MOST_TOKENS: Final = 1 << 20
MAX_INPUTS: Final = 2048  # of a request, as OpenAI has it
FLOAT, BASE64 = "float", "base64"  # how an answer has vectors

# What inputs of tokens are called, by Hugging Face and whoever follows it.
IDS, MASK, TYPES, POSITIONS = "input_ids", "attention_mask", "token_type_ids", "position_ids"
TOKEN_INPUTS: Final = frozenset({IDS, MASK, TYPES, POSITIONS})


@dataclass(frozen=True)
class EmbeddingSettings:
    """What becomes of a model's output, and how long its texts may be.

    `pooling`: how the vectors of tokens become one, "none" where the output has one for a text. `normalize`: to length
    1. `activation`: of a score. `max_tokens`: with those that a tokenizer adds. `output`: the name of the output.
    `matryoshka`: whether the first values of a vector are one of their own (Kusupati et al., 2022).
    """

    task: str
    output: str
    pooling: str = MEAN
    normalize: bool = False
    activation: str = SIGMOID
    max_tokens: int = 512
    matryoshka: bool = False

    @classmethod
    def of(cls, config: ModelConfig) -> "EmbeddingSettings | None":
        """Return what a completed configuration says; None if the model gives no embeddings. Raises ConfigError."""
        given = given_settings(config)
        if not given:
            return None
        return cls(
            given["task"],
            given["output"],
            given["pooling"],
            given["normalize"] == "true",
            given["activation"],
            int(given["max_tokens"]),
            given["matryoshka"] == "true",
        )

    @property
    def text(self) -> str:
        """The parameter's value."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return "; ".join(f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in values)


def given_settings(config: ModelConfig) -> dict[str, str] | None:
    """Return the settings that the parameter names; None if it is "off", none without it. Raises ConfigError."""
    text = parameter_of(config, EMBEDDINGS_PARAMETER).strip()
    if text == OFF:
        return None
    given: dict[str, str] = {}
    for part in text.split(";") if text else ():
        name, _, value = (piece.strip() for piece in part.partition("="))
        if not part.strip():
            continue
        if name not in NAMES or not value or name in given:
            wrong = "is given twice" if name in given else f"expected one of {', '.join(NAMES)}, and a value"
            raise ConfigError(f'parameter {EMBEDDINGS_PARAMETER}: "{shortened(part.strip())}": {wrong}, or "{OFF}"')
        if name in CHOICES and value not in CHOICES[name]:
            raise ConfigError(
                f"parameter {EMBEDDINGS_PARAMETER}: {name} is {' or '.join(CHOICES[name])}, not '{shortened(value)}'"
            )
        if name == "max_tokens" and not (value.isascii() and value.isdigit() and 1 <= int(value[:9]) <= MOST_TOKENS):
            raise ConfigError(
                f"parameter {EMBEDDINGS_PARAMETER}: max_tokens is 1 to {MOST_TOKENS}, not '{shortened(value)}'"
            )
        given[name] = value
    return given
