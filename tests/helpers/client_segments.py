"""POSIX segments for tests of shared memory, and requests with tensors in them."""

import os
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm

FOLDER = Path("/dev/shm")
A = np.arange(16, dtype=np.int32)
B = np.full(16, 3, np.int32)
TENSOR_BYTES = 64


@dataclass
class Segments:
    """POSIX segments of this test, registered with the server under the names that they have here."""

    client: Any
    handles: dict[str, Any] = field(default_factory=dict)
    own: dict[str, int] = field(default_factory=dict)  # descriptors of the handles
    prefix: str = field(default_factory=lambda: f"regions-test-{uuid.uuid4().hex[:12]}")

    def key(self, name: str) -> str:
        return f"/{self.prefix}-{name}"

    def path(self, name: str) -> Path:
        return FOLDER / self.key(name)[1:]

    def create(self, name: str, size_bytes: int = 4096, register: bool = True) -> Any:
        self.handles[name] = shm.create_shared_memory_region(name, self.key(name), size_bytes)
        self.own[name] = self._descriptors(name)
        if register:
            self.client.register_system_shared_memory(name, self.key(name), size_bytes)
        return self.handles[name]

    def is_open(self, name: str) -> bool:
        """Whether the server, which is in this process, has the segment open."""
        return self._descriptors(name) > self.own[name]

    def _descriptors(self, name: str) -> int:
        links = []
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                links.append(os.readlink(descriptor))
        return links.count(str(self.path(name)))


def inputs_in(region: str, offset: int = 0) -> list[triton.InferInput]:
    inputs = [triton.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
    for number, tensor in enumerate(inputs):
        tensor.set_shared_memory(region, TENSOR_BYTES, offset + number * TENSOR_BYTES)
    return inputs


def outputs_in(region: str, size_bytes: int = TENSOR_BYTES) -> list[triton.InferRequestedOutput]:
    outputs = [triton.InferRequestedOutput(name) for name in ("OUTPUT0", "OUTPUT1")]
    for number, tensor in enumerate(outputs):
        tensor.set_shared_memory(region, size_bytes, number * TENSOR_BYTES)
    return outputs


def values_in(handle: Any, offset: int = 0) -> Any:
    return shm.get_contents_as_numpy(handle, np.int32, [1, 16], offset)
