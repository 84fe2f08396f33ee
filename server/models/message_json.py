"""Messages of the protocol as JSON, in the form that Triton gives configurations."""

import base64
from typing import Any

from google.protobuf.message import Message


def to_json(message: Message) -> dict[str, Any]:
    """Return a message with all its fields by name, numbers as numbers, enumerations by name; unset messages are left
    out.
    """
    content = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        content[field.name] = _field(field, getattr(message, field.name))
    return content


def _field(field: Any, value: Any) -> Any:
    if not field.is_repeated:
        return _message_scalar(field, value)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        kind = field.message_type.fields_by_name["value"]
        return {str(key): _message_scalar(kind, value[key]) for key in sorted(value)}
    return [_message_scalar(field, item) for item in value]


def _message_scalar(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return to_json(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known else value
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value
