"""The process of an instance, started as the supervisor does it."""

import json
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from gangway.python_backend.messages import Connection
from gangway.server.control.supervisor.python_instances import HOST
from tests.helpers.python_models import config_of, write
from tests.helpers.served import TIMEOUT_S


class Host(NamedTuple):
    """The process that executes the model, and the address of its socket."""

    pid: int
    address: str


@contextmanager
def instance_of(folder: Path, body: str, size: int, ends_well: bool = True) -> Iterator[Host]:
    """An instance that is ready, of a model with a tensor x and a tensor y of so many numbers."""
    model = write(folder, "own", body, config_of(f"x:FP32:{size}", f"y:FP32:{size}"))
    config = {
        "max_batch_size": 0,
        "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [size]}],
        "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [size]}],
    }
    name = f"\0gangway-test-{secrets.token_hex(8)}"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name)
    ours, theirs = socket.socketpair()
    values, flags = os.memfd_create("values"), os.memfd_create("flags")
    os.ftruncate(flags, 1 << 16)
    fds = (theirs.fileno(), listener.fileno(), values, flags)
    process = subprocess.Popen([sys.executable, str(HOST), *map(str, fds), str(os.getpid())], pass_fds=fds)
    listener.close()
    theirs.close()
    os.close(values)
    os.close(flags)
    control = Connection(ours)
    arguments = {"model_version": "1", "model_instance_name": "own_0", "model_name": "own"}
    order = {"folder": str(model), "filename": "model.py", "arguments": arguments, "memory_bytes": 0}
    order["strict_outputs"] = False
    control.send({**order, "completes": False, "config": json.dumps(config)})
    pid = control.receive().header["begun"]
    assert "ready" in control.receive().header
    yield Host(pid, name)
    with suppress(OSError):  # it has ended
        control.send({"finalize": True})
    assert (process.wait(TIMEOUT_S) == 0) == ends_well
    control.close()
