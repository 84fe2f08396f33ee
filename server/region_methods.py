"""The protocol's methods for shared memory: system regions work, GPU memory does not exist here."""

import os
from collections.abc import Callable
from typing import Final

import grpc

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import RequestError, invalid
from gangway.server.front_end_messages import RegionChange
from gangway.server.regions import MAX_NAME_BYTES, Regions, Registration, file_of

MAX_KEY_CHARACTERS: Final = 4096  # no path is longer


class RegionMethods:
    """Methods are named as the remote procedures. Each takes the request's message and returns the response's.

    `make` has all front ends `apply` a change, or raises RequestError.
    """

    def __init__(self, regions: Regions, make: Callable[[RegionChange], None]) -> None:
        self._regions = regions
        self._make = make

    def apply(self, change: RegionChange) -> None:
        """Make a change in this process. Raises RequestError."""
        if change.kind == "unregister":
            self._regions.unregister(change.name)
            return
        if change.file and _file_number(change.key) != change.file:  # a successor comes later than the client
            invalid(f"Unable to open shared memory region: '{change.key}': it is not the segment that was registered")
        self._regions.register(Registration(change.name, change.key, change.offset, change.size_bytes))

    def system_status(self, request: pb.SystemSharedMemoryStatusRequest) -> pb.SystemSharedMemoryStatusResponse:
        """List one region, or all of them if none is named."""
        response = pb.SystemSharedMemoryStatusResponse()
        for known in self._regions.registrations():
            if request.name in ("", known.name):
                status = response.regions[known.name]
                status.name, status.key = known.name, known.key
                status.offset, status.byte_size = known.offset, known.size_bytes
        if request.name and not response.regions:
            message = f"Unable to find system shared memory region: '{request.name}'"
            raise RequestError(grpc.StatusCode.NOT_FOUND, message)
        return response

    def system_register(self, request: pb.SystemSharedMemoryRegisterRequest) -> pb.SystemSharedMemoryRegisterResponse:
        """Register a region, in all front ends."""
        name, key = request.name, request.key
        if len(name) > MAX_NAME_BYTES or len(key) > MAX_KEY_CHARACTERS:
            self._regions.register(Registration(name, key, request.offset, request.byte_size))  # which refuses it
        else:
            file = _file_number(key)
            self._make(RegionChange("register", name, key, request.offset, request.byte_size, file))
        return pb.SystemSharedMemoryRegisterResponse()

    def system_unregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        """Forget one region, or all of them if none is named, in all front ends."""
        if len(request.name) <= MAX_NAME_BYTES:  # else it is not known, which is fine
            self._make(RegionChange("unregister", request.name))
        return pb.SystemSharedMemoryUnregisterResponse()

    def cuda_status(self, request: pb.CudaSharedMemoryStatusRequest) -> pb.CudaSharedMemoryStatusResponse:
        """Say that there are none."""
        if request.name in [known.name for known in self._regions.registrations()]:
            registered = "is registered as system shared memory, not CUDA shared memory"
            raise RequestError(grpc.StatusCode.NOT_FOUND, f"The region named '{request.name}' {registered}")
        if request.name:
            message = f"Unable to find cuda shared memory region: '{request.name}'"
            raise RequestError(grpc.StatusCode.NOT_FOUND, message)
        return pb.CudaSharedMemoryStatusResponse()

    def cuda_register(self, request: pb.CudaSharedMemoryRegisterRequest) -> pb.CudaSharedMemoryRegisterResponse:
        """Refuse: this server computes on CPUs."""
        invalid(f"failed to register CUDA shared memory region: '{request.name}', GPUs not supported")

    def cuda_unregister(self, _request: pb.CudaSharedMemoryUnregisterRequest) -> pb.CudaSharedMemoryUnregisterResponse:
        """Do nothing: what was never registered is fine, as in Triton."""
        return pb.CudaSharedMemoryUnregisterResponse()


def _file_number(key: str) -> int:
    """Return which file a key means now; 0 if there is none."""
    try:
        return os.stat(file_of(key), follow_symlinks=False).st_ino
    except (OSError, ValueError, RequestError):
        return 0
