"""The protocol's methods for shared memory: system regions work, GPU memory does not exist here."""

import grpc
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import RequestError, invalid
from gangway.server.regions import Regions, Registration


class RegionMethods:
    """Methods are named as the remote procedures. Each takes the request's message and returns the response's."""

    def __init__(self, regions: Regions) -> None:
        self._regions = regions

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
        """Register a region."""
        self._regions.register(Registration(request.name, request.key, request.offset, request.byte_size))
        return pb.SystemSharedMemoryRegisterResponse()

    def system_unregister(
        self, request: pb.SystemSharedMemoryUnregisterRequest
    ) -> pb.SystemSharedMemoryUnregisterResponse:
        """Forget one region, or all of them if none is named."""
        self._regions.unregister(request.name)
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
