"""Loading and unloading of models by a model. The supervisor does it, as for clients of the repository.

What comes along with a load lies in memory that the supervisor reads by itself: the message of Triton's protocol,
RepositoryModelLoadRequest, as a client would send it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from gangway.python_backend.supervisor_link import TritonModelException, linked

_NAME, _PARAMETERS = 2, 3  # fields of the message
_TEXT, _BYTES = 3, 4  # of a parameter


def load(model_name: str, config: str, files: Mapping[str, bytes] | None) -> None:
    """Load or reload a model; return when it answers requests. Raises TritonModelException with the reason why not."""
    if files is not None and not isinstance(files, dict):
        raise TritonModelException(
            f"failed to load model '{model_name}', files should be a dictionary of file paths and file contents"
        )
    message = [_field(_NAME, _text(model_name))]
    if config:
        message.append(_parameter("config", _field(_TEXT, _text(config))))
    message += [_parameter(path, _field(_BYTES, content)) for path, content in (files or {}).items()]
    descriptor = os.memfd_create("gangway-load", os.MFD_CLOEXEC)
    with open(descriptor, "wb") as file:
        file.write(b"".join(message))
        file.flush()
        _call("load model", name=model_name, message=descriptor if config or files else -1)


def unload(model_name: str, unload_dependents: bool) -> None:
    """Unload a model; return when it takes no new requests. Raises TritonModelException."""
    _call("unload model", name=_text(model_name).decode(), dependents=bool(unload_dependents))


def is_ready(model_name: str, model_version: str) -> bool:
    """Whether a model answers requests; `model_version` empty: any version. Raises TritonModelException."""
    version = str(model_version)
    if version and not (version.isascii() and version.isdigit()):
        raise TritonModelException(
            f"failed to get model version from specified version string '{version}', version should be an integral"
            " value > 0"
        )
    name = _text(model_name).decode()
    return bool(_call("check model readiness", name=name, version=int(version or -1))["ready"])


def _call(what: str, **arguments: Any) -> Mapping[str, Any]:
    try:
        return linked().call(control=what, **arguments)
    except TritonModelException as error:
        raise TritonModelException(f"Failed to {what}: {error}") from None


def _text(text: str) -> bytes:
    if not isinstance(text, str):
        raise TritonModelException(f"expected a text, got {type(text).__name__}")
    return text.encode()


def _parameter(name: str, value: bytes) -> bytes:
    return _field(_PARAMETERS, _field(1, _text(name)) + _field(2, value))


def _field(number: int, content: bytes) -> bytes:
    """Return a field of protobuf that has a length."""
    if not isinstance(content, bytes):
        raise TritonModelException(f"expected bytes, got {type(content).__name__}")
    size, length = len(content), bytearray([number << 3 | 2])
    while size >= 128:
        length.append(size & 127 | 128)
        size >>= 7
    length.append(size)
    return bytes(length) + content
