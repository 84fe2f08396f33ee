"""What the files beside a model say of its embeddings: those that sentence-transformers and transformers write.

They lie in the model's folder or in that of its version; of a folder as Hugging Face has it, which keeps exports in
`onnx`, beside that. What the configuration says comes first.
"""

import json
import logging
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from gangway.base.files import require_regular
from gangway.protos.model_config_pb2 import DataType, ModelConfig, ModelOutput
from gangway.server.errors import ConfigError, shortened
from gangway.server.models.embeddings import (
    CLS,
    EMBED,
    EMBEDDINGS_PARAMETER,
    IDS,
    LAST,
    MAX,
    MEAN,
    OFF,
    RERANK,
    SENTENCE,
    SIGMOID,
    TOKEN_INPUTS,
    EmbeddingSettings,
    given_settings,
)

_log = logging.getLogger(__name__)

TOKENIZER: Final = "tokenizer.json"
EXPORTS: Final = "onnx"  # a folder within that of a model
MODULES: Final = "modules.json"
POOLING: Final = "1_Pooling/config.json"
MAX_FILE_BYTES: Final = 1 << 20  # of all but the tokenizer
DEFAULT_TOKENS: Final = 512
UNBOUNDED_TOKENS: Final = 1 << 20  # transformers writes 1e30 for a tokenizer without a bound
# The first of these that a model has is taken; any other one that fits is guessed only if a configuration asks for it.
OUTPUTS: Final = ("sentence_embedding", "text_embeds", "last_hidden_state", "token_embeddings", "logits")
POOLING_MODES: Final = {
    "mean": MEAN, "mean_tokens": MEAN, "cls": CLS, "cls_token": CLS, "max": MAX, "max_tokens": MAX,
    "lasttoken": LAST,
}  # fmt: skip
_INTEGERS: Final = frozenset({DataType.TYPE_INT64, DataType.TYPE_INT32})
_FLOATS: Final = frozenset({DataType.TYPE_FP32, DataType.TYPE_FP16})


class _Output(NamedTuple):
    """An output that may hold embeddings or scores. `rank`: with the batch; `size`: of its last dimension."""

    name: str
    rank: int
    size: int


def complete_embeddings(config: ModelConfig, title: str, folder: Path, version_folder: Path) -> str:
    """Write the settings of a model that gives embeddings into its completed configuration.

    Returns the path of its tokenizer, "" if it has none. A model without the parameter and without a tokenizer beside
    it gives no embeddings, nor does one whose tensors are of another kind. Raises ConfigError, OSError.
    """
    given = given_settings(config)
    if given is None:
        return ""
    above = (version_folder.parent,) if version_folder.name == EXPORTS else ()
    files = _Files((version_folder, folder, *above))
    tokenizer = files.find(TOKENIZER)
    is_asked = bool(given)
    if not (is_asked or tokenizer):
        return ""
    try:
        settings = _settings(config, given, files)
    except ConfigError as error:
        if is_asked:
            raise ConfigError(f"parameter {EMBEDDINGS_PARAMETER}: {error}") from None
        _log.info("%s: no embeddings, although there is a %s: %s", title, TOKENIZER, error)
        return ""
    config.parameters[EMBEDDINGS_PARAMETER].string_value = settings.text
    takes_text = _takes_text(config)
    _log.info(
        "%s: POST /v1/%s: %s (%s)",
        title,
        "rerank" if settings.task == RERANK else "embeddings",
        settings.text,
        ", ".join(files.read) or "by its tensors",
    )
    if tokenizer and not takes_text and find_spec("tokenizers") is None:
        _log.warning(
            "%s: texts need the package tokenizers: pip install 'gangway-serve[embeddings]'; token ids are served",
            title,
        )
    return "" if takes_text or tokenizer is None else str(tokenizer)


def _settings(config: ModelConfig, given: dict[str, str], files: "_Files") -> EmbeddingSettings:
    """Return the settings, completed. Raises ConfigError if the tensors are of another kind, or a file is wrong."""
    _check_inputs(config)
    output = _output(config, given)
    is_score = output.rank == 1 or (output.rank == 2 and output.size == 1)
    task = given.get("task", RERANK if is_score else EMBED)
    if _takes_text(config) and len(config.input) != (2 if task == RERANK else 1):
        wanted = "two inputs, for a query and a document" if task == RERANK else "one input"
        raise ConfigError(f"a model that reads texts to {task} has {wanted}; there are {len(config.input)}")
    if task == RERANK and not is_score:
        raise ConfigError(f"a model that reranks has one score for a row, output '{output.name}' has {output.size}")
    if task == EMBED and output.rank not in (2, 3):
        raise ConfigError(f"output '{output.name}' has {output.rank} dimensions, embeddings have 2 or 3")
    modules = files.modules() if task == EMBED and output.rank == 3 else []
    if others := [name for name in modules if name not in ("Transformer", "Pooling", "Normalize")]:
        raise ConfigError(f"{MODULES} has {shortened(others[0])}, which the ONNX file has to compute")
    pooling = given.get("pooling", SENTENCE if output.rank != 3 else files.pooling())
    if _takes_text(config) and pooling not in (SENTENCE, CLS):
        # The tokens of each text are known to the model only; the others' padding would be pooled, too.
        raise ConfigError(
            f"output '{output.name}' has a vector for each token of texts that the model reads itself: it has to pool"
            f" them itself, too, unless pooling is {CLS}"
        )
    if (pooling == SENTENCE) != (output.rank != 3):
        raise ConfigError(f"pooling is {pooling}, but output '{output.name}' has {output.rank} dimensions")
    normalizes = "Normalize" in (modules or files.modules()) if files.find(MODULES) else task == EMBED
    return EmbeddingSettings(
        task,
        output.name,
        pooling,
        given["normalize"] == "true" if "normalize" in given else normalizes,
        given.get("activation", SIGMOID),
        int(given["max_tokens"]) if "max_tokens" in given else files.max_tokens(),
        given["matryoshka"] == "true" if "matryoshka" in given else task == EMBED and files.is_matryoshka(),
    )


def _takes_text(config: ModelConfig) -> bool:
    return all(tensor.data_type == DataType.TYPE_STRING for tensor in config.input)


def _check_inputs(config: ModelConfig) -> None:
    if _takes_text(config):
        return
    names = [tensor.name for tensor in config.input]
    if IDS not in names or not TOKEN_INPUTS.issuperset(names):
        raise ConfigError(
            f"inputs are {', '.join(map(shortened, names))}; expected texts alone, or some of"
            f" {', '.join(sorted(TOKEN_INPUTS))}"
        )
    for tensor in config.input:
        rank = len(tensor.dims) + (config.max_batch_size > 0)
        if tensor.data_type not in _INTEGERS or rank != 2:
            raise ConfigError(f"input '{tensor.name}' has {rank} dimensions or another type than INT64 or INT32")
        if config.max_batch_size == 0 and tensor.dims[0] > 1:
            raise ConfigError(f"input '{tensor.name}' has exactly {tensor.dims[0]} rows; requests have any number")


def _output(config: ModelConfig, given: dict[str, str]) -> _Output:
    """Return the output that the settings name, the first known one, or the only one. Raises ConfigError."""
    outputs = {tensor.name: tensor for tensor in config.output}
    if "output" in given:
        if given["output"] not in outputs:
            raise ConfigError(
                f"the model has no output '{shortened(given['output'])}'; there are: {', '.join(outputs)}"
            )
        return _described(outputs[given["output"]], config)
    known = [name for name in OUTPUTS if name in outputs and _is_known(outputs[name], config)]
    if known:
        return _described(outputs[known[0]], config)
    if given and len(outputs) == 1:
        return _described(config.output[0], config)
    raise ConfigError(
        f"outputs are {', '.join(map(shortened, outputs))}; write output=NAME for the one to use, or {OFF}"
    )


def _is_known(tensor: ModelOutput, config: ModelConfig) -> bool:
    """Whether a known name means what it should: `logits` of a language model have a third dimension."""
    return tensor.name != "logits" or len(tensor.dims) + (config.max_batch_size > 0) < 3


def _described(tensor: ModelOutput, config: ModelConfig) -> _Output:
    if tensor.data_type not in _FLOATS:
        raise ConfigError(f"output '{tensor.name}' has another type than FP32 or FP16")
    rank = len(tensor.dims) + (config.max_batch_size > 0)
    return _Output(tensor.name, rank, tensor.dims[-1] if tensor.dims else 1)


class _Files:
    """Files beside a model, in the first of `folders` that has them. `read`: names of those that were looked into."""

    def __init__(self, folders: tuple[Path, ...]) -> None:
        self._folders = folders
        self.read: list[str] = []

    def find(self, name: str) -> Path | None:
        """Return where it is; None: there is none."""
        return next((folder / name for folder in self._folders if (folder / name).is_file()), None)

    def modules(self) -> list[str]:
        """Return the names of the modules of sentence-transformers, without their packages; none without the file."""
        found = self._json(MODULES)
        modules = found if isinstance(found, list) else []
        return [str(module.get("type", "")).rpartition(".")[2] for module in modules if isinstance(module, dict)]

    def pooling(self) -> str:
        """Return how vectors of tokens are pooled, by their mean without the file. Raises ConfigError."""
        content = self._object(POOLING)
        mode = content.get("pooling_mode")
        prefix = "pooling_mode_"
        modes = [mode] if mode else [name.removeprefix(prefix) for name in content if name.startswith(prefix)]
        chosen = modes if mode else [each for each in modes if content[prefix + each] is True]
        if not content:
            return MEAN
        if len(chosen) != 1 or not isinstance(chosen[0], str) or chosen[0] not in POOLING_MODES:
            known = ", ".join(dict.fromkeys(POOLING_MODES.values()))
            raise ConfigError(f"{POOLING} says {shortened(str(chosen))}; there are {known}, one at a time")
        return POOLING_MODES[chosen[0]]

    def max_tokens(self) -> int:
        """Return how many tokens a text may have, as the first file says that has a number."""
        numbers = (
            self._object("sentence_bert_config.json").get("max_seq_length"),
            self._object("tokenizer_config.json").get("model_max_length"),
            self._object("config.json").get("max_position_embeddings"),
        )
        known = (each for each in numbers if isinstance(each, int) and 0 < each < UNBOUNDED_TOKENS)
        return next(known, DEFAULT_TOKENS)

    def is_matryoshka(self) -> bool:
        """Return whether the model is trained for vectors of fewer values, as its configuration may say."""
        content = self._object("config.json")
        return content.get("is_matryoshka") is True or bool(content.get("matryoshka_dimensions"))

    def _object(self, name: str) -> dict[str, Any]:
        found = self._json(name)
        return found if isinstance(found, dict) else {}

    def _json(self, name: str) -> Any:
        """Return what a file says, None if there is none. Raises ConfigError."""
        path = self.find(name)
        if path is None:
            return None
        try:
            require_regular(path)
            if path.stat().st_size > MAX_FILE_BYTES:
                raise ConfigError(f"{name} has more than {MAX_FILE_BYTES} bytes")
            content = json.loads(path.read_bytes())
        except (ValueError, RecursionError) as error:
            raise error if isinstance(error, ConfigError) else ConfigError(f"{name} is no JSON: {error}") from None
        if name not in self.read:
            self.read.append(name)
        return content
