"""What a load request may bring along: a configuration in place of config.pbtxt, and the model's files.

Files are kept in a temporary folder for as long as the model is loaded. A server that is killed leaves its folder
behind; the next one removes it. Whose server still lives is told by a lock on the folder, which the kernel frees.
"""

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import grpc
from google.protobuf import json_format
from google.protobuf.message import DecodeError

from gangway.protos import grpc_service_pb2 as pb
from gangway.protos.model_config_pb2 import ModelConfig
from gangway.server.errors import RequestError, invalid, unavailable

CONFIG_PARAMETER = "config"
FILE_PREFIX = "file:"
MAX_FILES = 1024
MAX_CONFIG_CHARACTERS = 1 << 20
PREFIX = "gangway-override-"

Parameters = Mapping[str, pb.ModelRepositoryParameter]


@dataclass(frozen=True, eq=False)
class Override:
    """`config` None: that of the repository. `folder` None: the files of the repository."""

    config: ModelConfig | None
    folder: Path | None


class OverrideKeeper:
    """Makes overrides and removes them. `take` may be called by any thread."""

    def __init__(self) -> None:
        self._root: Path | None = None
        self._lock_fd = -1

    def take(self, path: str) -> Override | None:
        """Return what the request in this file brings along, None for nothing.

        Raises RequestError, FileNotFoundError when the front end that has the file is gone.
        """
        try:
            request = pb.RepositoryModelLoadRequest.FromString(Path(path).read_bytes() if path else b"")
        except DecodeError as error:
            invalid(f"not a RepositoryModelLoadRequest: {error}")
        name, parameters = request.model_name, request.parameters
        for key in parameters:
            if key != CONFIG_PARAMETER and not key.startswith(FILE_PREFIX):
                invalid(f"unrecognized load parameter '{key}'")
        config = _config(name, parameters)
        files = [key for key in parameters if key.startswith(FILE_PREFIX)]
        if not files:
            return None if config is None else Override(config, None)
        if config is None:
            _not_polled(name, "Load parameter 'config' must be specified for model file override")
        if len(files) > MAX_FILES:
            _not_polled(name, f"{len(files)} files are given, at most {MAX_FILES} are possible")
        return Override(config, self._write(name, parameters, files))

    def remove(self, override: Override) -> None:
        """Remove the files of an override, if it has any."""
        if override.folder is not None:
            shutil.rmtree(override.folder, ignore_errors=True)

    def close(self) -> None:
        """Remove all there is."""
        if self._root is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            os.close(self._lock_fd)
            self._root = None

    def _write(self, name: str, parameters: Parameters, files: list[str]) -> Path:
        try:
            folder = Path(tempfile.mkdtemp(dir=self._own_root()))
        except OSError as error:
            unavailable(f"no place for the model's files: {error}")
        try:
            for key in files:
                _write_file(name, folder, key, parameters[key])
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder

    def _own_root(self) -> Path:
        if self._root is None:
            hidden = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))  # from others, until it is locked
            self._lock_fd = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            self._root = hidden.rename(hidden.with_name(hidden.name.removeprefix(".")))
        return self._root


def sweep_overrides() -> list[Path]:
    """Remove the folders of servers that were killed; return them."""
    swept = []
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # another server is quicker, lives, or belongs to another user
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
                    swept.append(folder)
            finally:
                os.close(descriptor)
    return swept


def _config(name: str, parameters: Parameters) -> ModelConfig | None:
    if CONFIG_PARAMETER not in parameters:
        return None
    parameter = parameters[CONFIG_PARAMETER]
    if parameter.WhichOneof("parameter_choice") != "string_param":
        invalid("Config parameter 'config' must have string type for its value")
    if len(parameter.string_param) > MAX_CONFIG_CHARACTERS:
        invalid(f"Config parameter 'config' has more than {MAX_CONFIG_CHARACTERS} characters")
    try:
        return json_format.Parse(parameter.string_param, ModelConfig())
    except (json_format.ParseError, RecursionError) as error:
        _not_polled(name, f"Config parameter 'config' is no model configuration in JSON: {error}")


def _write_file(name: str, folder: Path, key: str, parameter: pb.ModelRepositoryParameter) -> None:
    if parameter.WhichOneof("parameter_choice") != "bytes_param":
        _not_polled(name, f"File parameter '{key}' must have bytes type for its value")
    relative = key.removeprefix(FILE_PREFIX)
    target = Path(os.path.normpath(folder / relative.lstrip("/")))
    if "\0" in relative or not target.is_relative_to(folder) or target == folder:
        _not_polled(name, f"Invalid file parameter '{key}': it must stay within model directory.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(parameter.bytes_param)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            unavailable(f"no place for the model's files: {error.strerror}")
        # Triton's public clients know this status for a name that no file can have.
        _not_polled(name, f"Invalid file parameter '{key}': {error.strerror}", grpc.StatusCode.INTERNAL)


def _not_polled(name: str, reason: str, code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT) -> NoReturn:
    message = f"failed to load '{name}', failed to poll from model repository: {reason}"
    raise RequestError(code, message)
