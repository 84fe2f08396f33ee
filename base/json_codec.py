"""Frozen dataclasses to JSON and back, by msgspec: files of the cache, messages between processes, process options.

The declared types of the fields are the schema. An object has no other fields, and all that have no default. Integers
have 64 bits, other numbers are finite. A member of a union has one field more, `type`: the name of its class. Members
of a union inside of a dataclass are `msgspec.Struct`s with `tag=True`. Whatever is wrong raises ValueError, whose text
begins with the path of the value: "manifest.layers[3].flops: expected `int`, got `str`".
"""

import threading
from dataclasses import is_dataclass
from pathlib import Path, PurePath
from typing import Any, Final, TypeVar, get_args

import msgspec

TAG: Final = "type"  # of a union's object
ValueT = TypeVar("ValueT")
_known: set[type] = set()  # whose fields msgspec has read
_reading = threading.Lock()


def encode(value: Any, indent: int | None = None) -> bytes:
    """Return a dataclass as JSON, UTF-8. Raises ValueError for what `decode` would not take.

    What is no Unicode, as names of files may be, has question marks there.
    """
    text = _encode(value)
    decode(type(value), text, type(value).__name__)  # of a number that is not finite msgspec writes null
    return text if indent is None else msgspec.json.format(text, indent=indent)


def encode_tagged(message: Any) -> bytes:
    """Return a member of a union as JSON, UTF-8. Raises ValueError for what `decode_tagged` would not take."""
    text = encode(message)
    if isinstance(message, msgspec.Struct):  # which has its tag
        return text
    tag = b'{"%b":"%b"' % (TAG.encode(), type(message).__name__.encode())
    return tag + (b"}" if text == b"{}" else b"," + text[1:])


def decode(kind: type[ValueT], text: bytes | str, where: str) -> ValueT:
    """Return the dataclass that `text` holds; `where` is its name in messages. Raises ValueError."""
    return _convert(kind, _parse(text, where), where)


def decode_tagged(union: Any, text: bytes | str, where: str) -> Any:
    """Return the member of a union that `text` holds. Raises ValueError."""
    content, kinds = _parse(text, where), {kind.__name__: kind for kind in get_args(union)}
    if not isinstance(content, dict):
        raise ValueError(f"{where} is not an object")
    if not isinstance(name := content.get(TAG), str) or name not in kinds:
        raise ValueError(f"{where}.{TAG} is not one of {', '.join(kinds)}")
    if is_dataclass(kinds[name]):
        del content[TAG]
    return _convert(kinds[name], content, where)


def _encode(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value, enc_hook=_plain)
    except UnicodeEncodeError:  # the name of a file that is no UTF-8
        return msgspec.json.encode(_readable(msgspec.to_builtins(value, enc_hook=_plain)))


def _readable(value: Any) -> Any:
    """Return plain values with question marks in place of surrogates."""
    if isinstance(value, dict):
        return {name: _readable(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_readable(part) for part in value]
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def _parse(text: bytes | str, where: str) -> Any:
    try:
        return msgspec.json.decode(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error


def _read_fields(kind: type) -> None:
    """Have msgspec read a type's fields, which it keeps, in one thread.

    It keeps the type before it has read all of them: another thread that converts to it then would crash the process.
    """
    with _reading:
        msgspec.json.Decoder(kind, dec_hook=_path)
        _known.add(kind)


def _convert(kind: type[ValueT], content: Any, where: str) -> ValueT:
    if kind not in _known:
        _read_fields(kind)
    try:
        value = msgspec.convert(content, kind, dec_hook=_path)
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(value, enc_hook=_plain))  # integers of 64 bits only
    except (ValueError, OverflowError) as error:
        problem, _, path = str(error).partition(" - at `$")
        raise ValueError(f"{where}{path.rstrip('`')}: {problem[:1].lower()}{problem[1:]}") from None
    if unknown := _unknown(content, again):
        raise ValueError(f"{where}{unknown}")
    return value


def _plain(value: Any) -> str:
    if not isinstance(value, PurePath):
        raise TypeError(f"{type(value).__name__} has no form in JSON")
    return str(value)


def _path(kind: type, content: Any) -> Path:
    if kind is not Path or not isinstance(content, str):
        raise ValueError("expected a path")
    return Path(content)


def _unknown(found: Any, wanted: Any) -> str:
    """Return where a field is unknown: msgspec ignores those."""
    if found == wanted:
        return ""
    if isinstance(found, list):
        pairs = [(f"[{number}]", *pair) for number, pair in enumerate(zip(found, wanted, strict=True))]
    elif not isinstance(found, dict):
        return ""  # another spelling of a path
    elif unknown := found.keys() - wanted.keys():
        return f" has an unknown field '{min(unknown)}'"
    else:
        pairs = [(f".{name}", part, wanted[name]) for name, part in found.items()]
    return next((step + unknown for step, *pair in pairs if (unknown := _unknown(*pair))), "")
