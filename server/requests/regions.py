"""Regions: stretches of the clients' shared memory, registered by name, so that tensors need not be in messages.

Memory of a segment belongs to whoever touches it first. What a client has not touched (a hole) would become memory of
the server. So holes are only filled as far as the memory budget allows, and no worker touches them.

A client may shrink its segment at any time. Touching a mapping behind the end of a file is a SIGBUS, which kills a
process that is not prepared for it. So regions are never mapped here. The kernel copies from and to their descriptors,
and a segment that is too small is an error of that request. Workers are prepared, and may use large tensors in place
(`mapped_tensors.py`).
"""

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import msgspec
import posix_ipc

from gangway.base.memory_budget import memory_budget
from gangway.protos import StatusCode
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.descriptors import max_regions
from gangway.server.errors import RequestError, internal, invalid
from gangway.server.threads import RefCount


@dataclass(frozen=True, eq=False)
class MappedRegion:
    """A region that all workers have mapped, as a front end sees it. `number` is what slots call it.

    It stays mapped as long as requests use it, also when its name is gone.
    """

    token: int  # between this front end and the supervisor
    number: int
    uses: RefCount = field(default_factory=RefCount)


MAX_NAME_BYTES = 1024
RESERVED_PREFIXES: Final = ("gangway.", "sem.")  # reserved for servers; POSIX semaphores: no tensors
_LONGEST_BYTES: Final = 255  # of a segment's name
_BLOCK_BYTES: Final = 512  # of stat


class Registration(msgspec.Struct, frozen=True):
    """What a client said: `size_bytes` from `offset` on in the POSIX segment `key` are called `name`."""

    name: str
    key: str
    offset: int
    size_bytes: int


@dataclass(eq=False)
class Region:
    """An open segment. Its descriptor is closed when it is neither registered nor used by a request.

    `identity`: which file that is (device and inode). `offered`, `mapped` and `closed` belong to `Mappings`: whether
    workers were to map it, what came of that, and whether the descriptor is closed.
    """

    registration: Registration
    descriptor: int
    identity: tuple[int, int]
    users: int = 1  # the registration itself
    offered: bool = False
    mapped: MappedRegion | None = None
    closed: bool = False

    @property
    def is_whole(self) -> bool:
        """Whether the segment still has all that was registered."""
        end = self.registration.offset + self.registration.size_bytes
        return os.fstat(self.descriptor).st_size >= end

    @property
    def is_filled(self) -> bool:
        """Whether all of the segment has memory."""
        return _is_filled(os.fstat(self.descriptor))

    def holes(self, offset: int, size_bytes: int, status: os.stat_result | None = None) -> Iterator[tuple[int, int]]:
        """Yield where a range has no memory: begin and end in the file. One look at the file if it has no holes.

        `status`: of the file, if the caller has just looked.
        """
        status, begin = status or os.fstat(self.descriptor), self.registration.offset + offset
        if _is_filled(status):
            return
        end = min(begin + size_bytes, status.st_size)
        while begin < end and (hole := _seek(self.descriptor, begin, os.SEEK_HOLE, end)) < end:
            begin = _seek(self.descriptor, hole, os.SEEK_DATA, end)
            yield hole, begin

    def check(self, offset: int, size_bytes: int) -> None:
        """Raise RequestError (INVALID_ARGUMENT) unless the range lies within what was registered."""
        name = self.registration.name
        if not 0 <= offset < self.registration.size_bytes:
            invalid(f"Invalid offset for shared memory region: '{name}'")
        if size_bytes < 0 or offset + size_bytes > self.registration.size_bytes:
            invalid(f"Invalid offset + byte size for shared memory region: '{name}'")

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill `view` from `offset` on, with the one copy. Raises RequestError if the segment has become too small."""
        begin, done = self.registration.offset + offset, 0
        while done < len(view):
            count = os.preadv(self.descriptor, [view[done:]], begin + done)
            if count == 0:
                self._refuse_shrunk(begin + len(view))
            done += count

    def write(self, offset: int, content: memoryview) -> None:
        """Write `content` from `offset` on. Raises RequestError if the segment has become too small: it never grows.

        Unless it is shrunk between the look at its size and the writing: then it gets its old size again. Raises
        RequestError, too, if there is no memory for holes.
        """
        begin, done = self.registration.offset + offset, 0
        status = os.fstat(self.descriptor)
        if status.st_size < begin + len(content):
            self._refuse_shrunk(begin + len(content))
        try:
            for hole, end in self.holes(offset, len(content), status):
                memory_budget().take(end - hole)
            while done < len(content):
                done += os.pwrite(self.descriptor, content[done:], begin + done)
        except OSError as error:  # a sparse segment, and no memory left
            message = f"shared memory region '{self.registration.name}' cannot be written: {error.strerror}"
            raise RequestError(StatusCode.RESOURCE_EXHAUSTED, message) from error

    def _refuse_shrunk(self, needed_bytes: int) -> None:
        size_bytes = os.fstat(self.descriptor).st_size
        invalid(
            f"shared memory region '{self.registration.name}' has shrunk since it was registered:"
            f" '{self.registration.key}' has {size_bytes} bytes, {needed_bytes} are needed"
        )


def _is_filled(status: os.stat_result) -> bool:
    return status.st_blocks * _BLOCK_BYTES >= status.st_size


def _seek(descriptor: int, begin: int, whence: int, end: int) -> int:
    """Return where a hole or data begins, from `begin` on; `end` if none does, as behind the end of a file that shrinks
    meanwhile."""
    try:
        return min(end, os.lseek(descriptor, begin, whence))
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return end


NO_REGIONS: Final[Mapping[str, Region]] = {}


class Regions:
    """All regions of a server. For the loop's thread.

    They are gone when the front end is: clients register again, as they must when Triton has been started again.
    """

    def __init__(self, forget: Callable[[Region], None] = lambda region: None) -> None:
        """`forget` is told of a region that is about to be closed: no request uses it."""
        self._regions: dict[str, Region] = {}
        self._forget = forget

    def register(self, registration: Registration) -> None:
        """Open a segment under a new name. Raises RequestError."""
        name = registration.name
        if not name or len(name.encode()) > MAX_NAME_BYTES:
            invalid(f"a shared memory region needs a name of 1 to {MAX_NAME_BYTES} bytes")
        if name in self._regions:
            message = f"shared memory region '{name}' already in manager"
            raise RequestError(StatusCode.ALREADY_EXISTS, message)
        if len(self._regions) >= max_regions():
            message = f"{len(self._regions)} shared memory regions are registered already"
            raise RequestError(StatusCode.RESOURCE_EXHAUSTED, message)
        self._regions[name] = _open(registration)

    def unregister(self, name: str) -> None:
        """Forget a region, all of them if the name is empty. Requests that use it finish; an unknown name is fine."""
        names = [name] if name else list(self._regions)
        for region in [self._regions.pop(known) for known in names if known in self._regions]:
            self._let_go(region)

    def registrations(self) -> list[Registration]:
        """Return what is registered, by name."""
        return [self._regions[name].registration for name in sorted(self._regions)]

    def hold(self, names: Iterable[str]) -> Mapping[str, Region]:
        """Give access to regions until they are released. Raises RequestError (NOT_FOUND), and holds none then."""
        held: dict[str, Region] = {}
        try:
            for name in names:
                held[name] = self._take(name)
        except RequestError:
            self.release(held)
            raise
        return held

    def release(self, held: Mapping[str, Region]) -> None:
        """Let go of regions that were held."""
        for region in held.values():
            self._let_go(region)

    def _take(self, name: str) -> Region:
        region = self._regions.get(name)
        if region is None:
            raise RequestError(StatusCode.NOT_FOUND, f"Unable to find shared memory region: '{name}'")
        region.users += 1
        return region

    def _let_go(self, region: Region) -> None:
        region.users -= 1
        if region.users == 0:
            self._forget(region)
            os.close(region.descriptor)


def open_segment(key: str) -> int:
    """Open a POSIX segment that there is, for reading and writing; return its descriptor.

    Symbolic links are not followed, and nothing waits for the other end of a pipe. Raises RequestError: INTERNAL if the
    key is not one component, or cannot be opened, as in Triton; INVALID_ARGUMENT if the name is reserved.
    """
    component = key.lstrip("/")  # as the C library does
    if component in ("", ".", "..") or "/" in component or "\0" in component:
        internal(f"Unable to open shared memory region: '{key}': a key is a name with one slash in front of it")
    if component.startswith(RESERVED_PREFIXES):
        invalid(f"Unable to open shared memory region: '{key}': the name is reserved")
    size_bytes = 0
    try:
        size_bytes = len(component.encode())  # posix_ipc does not say what is no text
        descriptor: int = posix_ipc.SharedMemory(f"/{component}").fd
    except UnicodeError:
        reason = "not a file's name"
    except posix_ipc.ExistentialError:
        reason = os.strerror(errno.ENOENT)
    except posix_ipc.PermissionsError:
        reason = os.strerror(errno.EACCES)
    except ValueError:
        reason = os.strerror(errno.ENAMETOOLONG if size_bytes > _LONGEST_BYTES else errno.EISDIR)
    except OSError as error:
        reason = error.strerror or str(error)
    else:
        return descriptor
    internal(f"Unable to open shared memory region: '{key}': {reason}")


def _open(registration: Registration) -> Region:
    key = registration.key
    descriptor = open_segment(key)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            internal(f"Unable to open shared memory region: '{key}': not a segment of memory")
        end = registration.offset + registration.size_bytes
        if registration.size_bytes == 0 or end > status.st_size:
            invalid(
                f"failed to register shared memory region '{registration.name}': invalid args:"
                f" {registration.size_bytes} bytes from {registration.offset} on, of {status.st_size} that '{key}' has"
            )
    except BaseException:
        os.close(descriptor)
        raise
    return Region(registration, descriptor, (status.st_dev, status.st_ino))


REGION = "shared_memory_region"
OFFSET = "shared_memory_offset"
SIZE = "shared_memory_byte_size"

AnyTensor: TypeAlias = "pb.ModelInferRequest.InferInputTensor | pb.ModelInferRequest.InferRequestedOutputTensor"


class RegionRange(msgspec.Struct, frozen=True):
    """What a request says of a tensor that is not in the message: `size_bytes` from `offset` on in the region of this
    name.

    It can be part of a plan: the region of that name is looked up for each request.
    """

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
        """Raise RequestError (INTERNAL, as Triton does) unless an output of this size has room."""
        if size_bytes > self.size_bytes:
            internal(
                f"shared memory size specified with the request for output '{output}' ({self.size_bytes} bytes)"
                f" should be at least {size_bytes} bytes to hold the results"
            )


class RegionPart(msgspec.Struct, frozen=True):
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


Content = bytes | memoryview | RegionPart  # of an input, wherever it is
Contents = Sequence[Content]


def _number(tensor: AnyTensor, name: str) -> int:
    if tensor.parameters[name].WhichOneof("parameter_choice") != "int64_param":
        invalid(f"invalid value type for '{name}' parameter for tensor '{tensor.name}', expected int64_param.")
    value = tensor.parameters[name].int64_param
    if value < 0:
        invalid(f"invalid value for '{name}' parameter for tensor '{tensor.name}': {value} is negative")
    return value
