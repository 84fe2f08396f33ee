"""Restricted protocols: groups of methods that only clients with a certain header may call, in Triton's groups.

Pure: gRPC and HTTP both ask here, each with the header's value as it came.
"""

import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256

GRPC_KEY_PREFIX = "triton-grpc-protocol-"  # what Triton's clients put before the key in gRPC's metadata
MAX_KEY_CHARACTERS = 256
_KEY = re.compile(r"[a-z0-9_.-]+")
_VALUE = re.compile(r"[\x20-\x7e]+")


class Category(StrEnum):
    """What can be restricted, by the name that it has on the command line."""

    HEALTH = "health"
    METADATA = "metadata"
    INFERENCE = "inference"
    SHARED_MEMORY = "shared-memory"
    MODEL_CONFIG = "model-config"
    MODEL_REPOSITORY = "model-repository"
    STATISTICS = "statistics"
    TRACE = "trace"
    LOGGING = "logging"


# By the method's name in the service; a route of HTTP has the category of the method it stands for.
CATEGORY_OF_METHOD: Mapping[str, Category] = {
    "ServerLive": Category.HEALTH,
    "ServerReady": Category.HEALTH,
    "ModelReady": Category.HEALTH,
    "Check": Category.HEALTH,
    "Watch": Category.HEALTH,
    "ServerMetadata": Category.METADATA,
    "ModelMetadata": Category.METADATA,
    "ModelInfer": Category.INFERENCE,
    "ModelStreamInfer": Category.INFERENCE,
    "SystemSharedMemoryStatus": Category.SHARED_MEMORY,
    "SystemSharedMemoryRegister": Category.SHARED_MEMORY,
    "SystemSharedMemoryUnregister": Category.SHARED_MEMORY,
    "CudaSharedMemoryStatus": Category.SHARED_MEMORY,
    "CudaSharedMemoryRegister": Category.SHARED_MEMORY,
    "CudaSharedMemoryUnregister": Category.SHARED_MEMORY,
    "ModelConfig": Category.MODEL_CONFIG,
    "RepositoryIndex": Category.MODEL_REPOSITORY,
    "RepositoryModelLoad": Category.MODEL_REPOSITORY,
    "RepositoryModelUnload": Category.MODEL_REPOSITORY,
    "ModelStatistics": Category.STATISTICS,
    "TraceSetting": Category.TRACE,
    "LogSettings": Category.LOGGING,
}


@dataclass(frozen=True)
class Restriction:
    """Whoever calls a method of these categories must send the header `key` (lower case) with this value."""

    categories: tuple[Category, ...]
    key: str
    value: str

    def admits(self, given: Iterable[str | bytes]) -> bool:
        """Say whether one of the values that came under the key is the right one.

        The time this takes tells nothing of how much of a wrong value was right, nor of the right one's length.
        """
        wanted = _digest(self.value)
        return sum(hmac.compare_digest(_digest(value), wanted) for value in given) > 0


@dataclass(frozen=True)
class Restrictions:
    """All restrictions of one protocol; each category is in one of them at most.

    `is_visible`: values of some stand on the server's command line.
    """

    groups: tuple[Restriction, ...] = ()
    is_visible: bool = False

    def of(self, category: Category) -> Restriction | None:
        """Return what a caller of this category must satisfy, if anything."""
        return next((group for group in self.groups if category in group.categories), None)

    @property
    def categories(self) -> frozenset[Category]:
        """All that is restricted."""
        return frozenset(category for group in self.groups for category in group.categories)

    def twice(self) -> Category | None:
        """Return a category that is named more than once, if any."""
        named = [category for group in self.groups for category in group.categories]
        return next((category for category in named if named.count(category) > 1), None)


def parse_restriction(text: str) -> Restriction:
    """Return the restriction in "CATEGORY,...:KEY=VALUE". Raises ValueError."""
    names, colon, pair = text.partition(":")
    key, equals, value = pair.partition("=")
    if not (names and colon and key and equals and value):
        raise ValueError("expected CATEGORY,...:KEY=VALUE")  # without the text, which may hold a secret
    key = key.lower()  # names of headers are the same in any case
    if not _KEY.fullmatch(key) or len(key) > MAX_KEY_CHARACTERS:
        raise ValueError(f"{key!r} cannot be a header's name")
    if not _VALUE.fullmatch(value) or value != value.strip():
        raise ValueError(f"the value of {key!r} cannot be a header's")
    known = [category.value for category in Category]
    for name in names.split(","):
        if name not in known:
            raise ValueError(f"unknown category {name!r}; known: {', '.join(known)}")
    return Restriction(tuple(map(Category, names.split(","))), key, value)


def _digest(value: str | bytes) -> bytes:
    return sha256(value.encode() if isinstance(value, str) else value).digest()
