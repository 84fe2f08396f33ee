"""config.pbtxt: reading it, and what in it this server understands."""

import codecs
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from google.protobuf import text_format

from gangway.artifact.files import require_regular
from gangway.protos.model_config_pb2 import DataType, ModelConfig
from gangway.server.config_check import BACKEND as BACKEND  # noqa: PLC0414 - others take it from here
from gangway.server.config_check import PLATFORM as PLATFORM  # noqa: PLC0414
from gangway.server.config_check import check_fields
from gangway.server.config_error import ConfigError as ConfigError  # noqa: PLC0414 - others take it from here
from gangway.server.config_error import shortened
from gangway.server.ensemble.config import check_ensemble, is_ensemble

ONNX_SUFFIX = ".onnx"
DEFAULT_MODEL_FILENAME = "model.onnx"
QOS_PARAMETER = "qos_ms"
BATCHING_PARAMETER = "batching"  # whether requests are joined to batches, and batches split
BATCHING_OFF = "off"
BUCKETS_PARAMETER = "gangway_buckets"  # sizes of symbolic dimensions that are compiled before the model is ready
ENGINE_PARAMETER = "gangway_engine"  # what executes the model; set by the server
LEAST_TARGET_PARAMETER = "gangway_least_target_ms"  # of targets that are multiples; set by the server
FALLBACK_PARAMETER = "gangway_fallback_reason"  # why it was not compiled; set by the server
MAX_FILE_BYTES = 1 << 20
MAX_FILENAME_BYTES = 255
MAX_CONFIG_BYTES = 40_000  # serialised; it travels to the front end in one message


@dataclass(frozen=True)
class Qos:
    """A latency target: absolute, as a multiple of the model's isolated latency, or (neither) none."""

    milliseconds: float | None = None
    multiple: float | None = None


def parse_qos(text: str) -> Qos:
    """Read the parameter `qos_ms`: "15" (milliseconds), "3x" (times the isolated latency). Raises ConfigError."""
    number = text.strip()
    is_multiple = number.endswith("x")
    try:
        value = float(number.removesuffix("x"))
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise ConfigError(f'parameter {QOS_PARAMETER}: expected milliseconds ("15") or a multiple ("3x"), got "{text}"')
    return Qos(multiple=value) if is_multiple else Qos(milliseconds=value)


def qos_of(config: ModelConfig) -> Qos:
    """Return the model's latency target. Raises ConfigError."""
    if QOS_PARAMETER not in config.parameters:
        return Qos()
    return parse_qos(config.parameters[QOS_PARAMETER].string_value)


def is_batching_off(config: ModelConfig) -> bool:
    """Whether the parameter `batching` says that requests are neither joined nor split."""
    parameters = config.parameters
    return BATCHING_PARAMETER in parameters and parameters[BATCHING_PARAMETER].string_value == BATCHING_OFF


def buckets_of(config: ModelConfig, symbols: Sequence[str]) -> list[tuple[int, ...]]:
    """Read the parameter `gangway_buckets`: "S=32,64" or "S=32,64; T=1,2" (then every pair of sizes).

    Returns sizes in the order of `symbols`, each once. Raises ConfigError.
    """
    text = config.parameters[BUCKETS_PARAMETER].string_value if BUCKETS_PARAMETER in config.parameters else ""
    if not text.strip():
        return []
    sizes: dict[str, list[int]] = {}
    for part in text.split(";"):
        name, _, numbers = part.strip().rpartition("=")
        values = [number.strip() for number in numbers.split(",")]
        if name.strip() not in symbols or not all(value.isascii() and value.isdigit() for value in values):
            known = ", ".join(symbols) or "none"
            raise ConfigError(
                f'parameter {BUCKETS_PARAMETER}: expected "NAME=SIZE,SIZE" with a name of {known}: "{part}"'
            )
        sizes[name.strip()] = [int(value) for value in values]
    if missing := [symbol for symbol in symbols if symbol not in sizes]:
        raise ConfigError(f"parameter {BUCKETS_PARAMETER}: no sizes of '{missing[0]}'")
    return list(dict.fromkeys(itertools.product(*(sizes[symbol] for symbol in symbols))))


def read_config(path: Path) -> ModelConfig:
    """Parse a config.pbtxt. Raises ConfigError with file, line and column."""
    try:
        require_regular(path)
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path.name} has more than {MAX_FILE_BYTES} bytes")
        return text_format.Parse(_decoded(path.read_bytes()), ModelConfig())
    except text_format.ParseError as error:
        raise ConfigError(f"{path.name}: {shortened(str(error))}") from None  # the message begins with line:column
    except (OSError, ValueError, TypeError) as error:  # the latter two: values that the parser lets pass
        raise error if isinstance(error, ConfigError) else ConfigError(f"{path.name}: {error}") from error


def _decoded(content: bytes) -> str:
    """Return the text. What is neither UTF-8 nor begins with a mark is mostly a comment in an old 8-bit encoding."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.decode("utf-16")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")  # every byte is a character


def check_supported(config: ModelConfig, name: str) -> None:
    """Raise ConfigError if the config of model `name` contradicts itself or asks for what this server cannot do."""
    if config.ByteSize() > MAX_CONFIG_BYTES:
        raise ConfigError(f"the configuration has {config.ByteSize()} bytes, at most {MAX_CONFIG_BYTES} are possible")
    if config.name not in ("", name):
        raise ConfigError(f"name '{shortened(config.name)}' differs from the folder's name '{name}'")
    if config.max_batch_size < 0:
        raise ConfigError(f"max_batch_size is {config.max_batch_size}, expected 0 or more")
    _check_filename(config.default_model_filename)
    check_fields(config)
    _check_names([tensor.name for tensor in config.input], "input")
    _check_names([tensor.name for tensor in config.output], "output")
    if is_ensemble(config):
        check_ensemble(config, name)


def _check_filename(name: str) -> None:
    if "/" in name or name in (".", ".."):
        raise ConfigError(f"default_model_filename '{shortened(name)}' leaves the version folder")
    if "\0" in name or len(name.encode()) > MAX_FILENAME_BYTES:
        raise ConfigError(f"default_model_filename '{shortened(name)}' is no name of a file")


def _check_names(names: list[str], group: str) -> None:
    if "" in names:
        raise ConfigError(f"an {group} has no name")
    if any("\0" in name for name in names):
        raise ConfigError(f"the name of an {group} has a zero byte")
    if len(set(names)) < len(names):
        raise ConfigError(f"the config names an {group} twice: {shortened(', '.join(names))}")


def datatype_name(data_type: int) -> str:
    """Return the protocol's name of an element type: TYPE_FP32 is "FP32"."""
    return "BYTES" if data_type == DataType.TYPE_STRING else DataType.Name(data_type).removeprefix("TYPE_")


def datatype_value(name: str) -> DataType:
    """Return the config's element type for the protocol's name."""
    return cast("DataType", DataType.Value("TYPE_STRING" if name == "BYTES" else f"TYPE_{name}"))


def require_complete(config: ModelConfig) -> None:
    """Raise ConfigError if the config leaves out anything that would have to be taken from the model."""
    missing = [] if config.platform or config.backend else ["platform or backend"]
    for group, tensors in (("input", config.input), ("output", config.output)):
        missing += [] if tensors else [group]
        for tensor in tensors:
            missing += [] if tensor.data_type else [f"data_type of {group} '{tensor.name}'"]
            missing += [] if tensor.dims else [f"dims of {group} '{tensor.name}'"]
    if missing:
        raise ConfigError(f"the config does not say {', '.join(missing)}, and it is not completed from the model")
