"""Where a tensor's contents are, if they are not in the message: from its parameters to a place to copy from or to.

A `RegionRange` is what a request says, so it can be part of a plan; which region has that name is looked up for each
request. A `RegionPart` is both, for one request.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import internal, invalid
from gangway.server.regions import Region

REGION = "shared_memory_region"
OFFSET = "shared_memory_offset"
SIZE = "shared_memory_byte_size"

AnyTensor: TypeAlias = "pb.ModelInferRequest.InferInputTensor | pb.ModelInferRequest.InferRequestedOutputTensor"


@dataclass(frozen=True)
class RegionRange:
    """Contents of a tensor: `size_bytes` from `offset` on in the region of this name."""

    region: str
    offset: int
    size_bytes: int

    @classmethod
    def of(cls, tensor: AnyTensor) -> "RegionRange | None":
        """Read a tensor's parameters; None if its contents are in the message. Raises RequestError."""
        parameters = tensor.parameters
        if REGION not in parameters:
            for name in (OFFSET, SIZE):
                if name in parameters:
                    invalid(f"'{name}' can not be specified without '{REGION}' parameter for tensor '{tensor.name}'")
            return None
        if SIZE not in parameters:
            invalid(f"'{SIZE}' must be specified along with '{REGION}' parameter for tensor '{tensor.name}'")
        if parameters[REGION].WhichOneof("parameter_choice") != "string_param":
            invalid(f"invalid value type for '{REGION}' parameter for tensor '{tensor.name}', expected string_param.")
        offset = _number(tensor, OFFSET) if OFFSET in parameters else 0
        return cls(parameters[REGION].string_param, offset, _number(tensor, SIZE))

    def within(self, regions: Mapping[str, Region]) -> "RegionPart":
        """Return the place itself. Raises RequestError unless it lies within the region."""
        region = regions[self.region]
        region.check(self.offset, self.size_bytes)
        return RegionPart(region, self.offset, self.size_bytes)

    def require(self, size_bytes: int, output: str) -> None:
        """Raise RequestError (INTERNAL, as Triton does) unless an output of so many bytes has room."""
        if size_bytes > self.size_bytes:
            internal(
                f"shared memory size specified with the request for output '{output}' ({self.size_bytes} bytes)"
                f" should be at least {size_bytes} bytes to hold the results"
            )


@dataclass(frozen=True)
class RegionPart:
    """A place in a region that is held open. Its size is `len`, as that of bytes."""

    region: Region
    offset: int
    size_bytes: int

    def __len__(self) -> int:
        return self.size_bytes

    def read_into(self, view: memoryview) -> None:
        """Copy the contents to `view`, which has their size. Raises RequestError."""
        self.region.read_into(self.offset, view)

    def read(self) -> bytes:
        """Return a copy that the client cannot change any more. Raises RequestError."""
        content = bytearray(self.size_bytes)
        self.read_into(memoryview(content))
        return bytes(content)

    def write(self, content: memoryview) -> None:
        """Copy `content`, which may be shorter, to the place's beginning. Raises RequestError."""
        self.region.write(self.offset, content)


def _number(tensor: AnyTensor, name: str) -> int:
    if tensor.parameters[name].WhichOneof("parameter_choice") != "int64_param":
        invalid(f"invalid value type for '{name}' parameter for tensor '{tensor.name}', expected int64_param.")
    value = tensor.parameters[name].int64_param
    if value < 0:
        invalid(f"invalid value for '{name}' parameter for tensor '{tensor.name}': {value} is negative")
    return value
