"""Reading config.pbtxt, and saying in plain words where a text cannot be read and what may be meant."""

import codecs
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from google.protobuf import text_format

from gangway.base.files import require_regular
from gangway.base.suggestion import did_you_mean
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.errors import ConfigError, shortened

MAX_FILE_BYTES: Final = 1 << 20
_POOL: Final = ModelConfig.DESCRIPTOR.file.pool
_PARAMETER: Final = "inference.ModelConfig.ParametersEntry"
_QUOTES: Final = "\"'"
_END: Final = "the end of the file"

# Words of protobuf's parser.
_UNKNOWN_FIELD: Final = re.compile(r'Message type "([\w.]+)" has no field named "(\w+)"')
_UNKNOWN_VALUE: Final = re.compile(r'Enum type "([\w.]+)" has no value named (["\']?)([\w+-]+)')
_EXPECTED: Final = re.compile(r'Expected "(.)"')
_NO_TEXT: Final = re.compile(r"Expected string but found: ")
_NO_QUOTE: Final = "String missing ending quote"

# What is in a string or a comment is no bracket. The last quote may be missing, so that each is looked at once.
_TOKEN: Final = re.compile(r'"(?:[^"\\\n]|\\.)*"?|\'(?:[^\'\\\n]|\\.)*\'?|#.*|[\w.+-]+|\S')
_FIELD_BEFORE: Final = re.compile(r"(\w+)\s*:?\s*$")
_CLOSING: Final = {"[": "]", "{": "}", "<": ">"}


def read_config(path: Path) -> ModelConfig:
    """Parse a config.pbtxt. Raises ConfigError with file, line and column."""
    try:
        require_regular(path)
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path.name} has more than {MAX_FILE_BYTES} bytes")
        return _parsed(_decoded(path.read_bytes()), path.name)
    except (OSError, ValueError, TypeError) as error:  # the latter two: values that the parser lets pass
        raise error if isinstance(error, ConfigError) else ConfigError(f"{path.name}: {error}") from error


def _parsed(text: str, name: str) -> ModelConfig:
    try:
        return text_format.Parse(text, ModelConfig())
    except text_format.ParseError as error:
        raise ConfigError(f"{name}: {_explained(text, error)}") from None


def _decoded(content: bytes) -> str:
    """Return the text. What is neither UTF-8 nor begins with a mark is mostly a comment in an old 8-bit encoding."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return content.decode("utf-16")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return content.decode("latin-1")  # every byte is a character


def _explained(text: str, error: text_format.ParseError) -> str:
    """Return where a text cannot be read, why, and what may be meant."""
    line, column = error.GetLine(), error.GetColumn()
    if line is None or column is None:
        return shortened(str(error))
    lines = text.split("\n")
    here = lines[line - 1] if line <= len(lines) else ""
    said = str(error).removeprefix(f"{line}:{column} : ")
    what = said.removeprefix(f"'{here}': ").removeprefix("'': ")  # the parser quotes the line that it is at
    is_end = what == said or said.startswith("'': ")
    token = None if is_end else _TOKEN.match(here, column - 1)
    got = token[0] if token else _END
    what = shortened(what.rstrip("."))
    if expected := _EXPECTED.fullmatch(what):
        what = f'expected "{expected[1]}", got {shortened(got)}'
    hint = _meant(what, here[: column - 1], got)
    open_bracket = "" if what.startswith(_NO_QUOTE) else _bracket(text)
    return f"line {line}, column {column}: {what}{hint}{open_bracket}"


def _meant(what: str, before: str, got: str) -> str:
    """Return what may be meant by `got`, which follows `before` in its line; "" if that is not known."""
    if found := _UNKNOWN_FIELD.search(what):
        if found[1] == _PARAMETER:
            return '; write parameters { key: "NAME" value: { string_value: "VALUE" } }'
        return did_you_mean(found[2], _POOL.FindMessageTypeByName(found[1]).fields_by_name)
    if found := _UNKNOWN_VALUE.search(what):
        near = _near_value(found[3], tuple(_POOL.FindEnumTypeByName(found[1]).values_by_name))
        return near.replace("?", ", without quotes?") if found[2] else near
    if _NO_TEXT.match(what):
        return "; write it in quotes"
    if got == "/":
        return "; a comment begins with #"
    field = _FIELD_BEFORE.search(before)
    if field is None or not what.startswith('expected "{"') or got == _END:
        return ""
    if field[1] == "value":
        return f'; write value: {{ string_value: "{shortened(got).strip(_QUOTES)}" }}'
    return f"; write {field[1]} {{ }}, with its fields between the braces"


def _near_value(word: str, values: tuple[str, ...]) -> str:
    """Return which value of an enumeration may be meant: TYPE_FP32 by FP32, float32 and TYPE_FLOAT32."""
    plain = word.upper().replace("BFLOAT", "BF").replace("FLOAT", "FP")
    whole = next((value for value in values if value == plain or value.endswith(f"_{plain}")), "")
    return did_you_mean(whole or plain, values)


def _bracket(text: str) -> str:
    """Return which bracket is not closed, or closes nothing."""
    opened: list[tuple[str, int]] = []
    for token, at in _brackets(text):
        if token in _CLOSING:
            opened.append((token, at))
        elif not opened:
            return f"; the {token} at {_place(text, at)} closes nothing"
        elif _CLOSING[opened[-1][0]] != token:
            break
        else:
            opened.pop()
    return f"; the {opened[-1][0]} at {_place(text, opened[-1][1])} is not closed" if opened else ""


def _brackets(text: str) -> Iterator[tuple[str, int]]:
    for match in _TOKEN.finditer(text):
        if match[0] in "[]{}<>":
            yield match[0], match.start()


def _place(text: str, at: int) -> str:
    line = text.count("\n", 0, at) + 1
    return f"line {line}, column {at - text.rfind(chr(10), 0, at)}"
