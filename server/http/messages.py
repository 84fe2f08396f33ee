"""Protobuf messages in Triton's JSON: fields by their names in the protocol, numbers as numbers, enumerations by name.

protobuf's own JSON writes 64-bit integers as strings, which Triton's clients do not expect.
"""

import base64
from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import invalid
from gangway.server.http.json_text import kind_of, shown

MAX_UINT64 = 2**64 - 1
MAX_INT64 = 2**63 - 1


def to_json(message: Message) -> dict[str, Any]:
    """Return a message with all its fields; without those messages and choices in it that are not set."""
    content = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        content[field.name] = _field(field, getattr(message, field.name))
    return content


def _field(field: Any, value: Any) -> Any:
    if not field.is_repeated:
        return _scalar(field, value)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        kind = field.message_type.fields_by_name["value"]
        return {str(key): _scalar(kind, value[key]) for key in sorted(value)}
    return [_scalar(field, item) for item in value]


def _scalar(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return to_json(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known else value
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


def set_parameters(target: Any, content: Any, where: str) -> None:
    """Copy a JSON object of parameters to a map of InferParameter. Raises RequestError (INVALID_ARGUMENT)."""
    if not isinstance(content, dict):
        invalid(f"{where}: expected 'parameters' to be an object, got {kind_of(content)}")
    for name, value in content.items():
        set_parameter(target[name], value, f"{where}: parameter '{name}'")


def set_parameter(target: pb.InferParameter, value: Any, where: str) -> None:
    """Give a parameter its value, in the kind that JSON has for it. Raises RequestError (INVALID_ARGUMENT)."""
    match value:
        case bool():
            target.bool_param = value
        case int() if -MAX_INT64 - 1 <= value <= MAX_INT64:
            target.int64_param = value
        case int() if MAX_INT64 < value <= MAX_UINT64:
            target.uint64_param = value
        case int():
            invalid(f"{where}: the number has more than 64 bits")
        case float():
            target.double_param = value
        case str():
            target.string_param = utf8(value, where)
        case _:
            invalid(f"{where}: expected a string, a number or a boolean, got {kind_of(value)}")


def parameters_of(parameters: Mapping[str, pb.InferParameter]) -> dict[str, Any]:
    """Return a map of InferParameter as a JSON object; a parameter without value is null."""
    content = {}
    for name in sorted(parameters):
        choice = parameters[name].WhichOneof("parameter_choice")
        content[name] = getattr(parameters[name], choice) if choice else None
    return content


def utf8(text: str, where: str) -> str:
    """Return a string that can be sent: JSON may name half a character. Raises RequestError (INVALID_ARGUMENT)."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        invalid(f"{where}: the string is not UTF-8: {error.reason}")
    return text


def string_of(content: Mapping[str, Any], name: str, where: str) -> str:
    """Return a member that must be a string. Raises RequestError (INVALID_ARGUMENT)."""
    value = content.get(name)
    if not isinstance(value, str):
        invalid(f"{where}: expected a string as '{name}', got {kind_of(value) if name in content else 'nothing'}")
    return utf8(value, where)


def count_of(content: Mapping[str, Any], name: str, where: str, default: int | None = None) -> int:
    """Return a member that must be a number from 0 to 2^64 - 1. Raises RequestError (INVALID_ARGUMENT)."""
    value = content.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_UINT64:
        invalid(f"{where}: expected a number from 0 as '{name}', got {shown(value)}")
    return value
