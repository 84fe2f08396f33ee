"""Where the instances of Python models listen, in memory that the supervisor writes and workers read.

Each process of an instance has an address of its own: what a predecessor has left behind may hold the old one.
"""

import os
from typing import Final

import msgspec

MOST_INSTANCES: Final = 64  # of a model
ADDRESS_BYTES: Final = 128


class InstanceAddresses(msgspec.Struct, frozen=True):
    """`fd`: of the memory; of each model number, a place for each instance; zeros: it is not ready."""

    fd: int

    @classmethod
    def create(cls) -> "InstanceAddresses":
        """Return a new one, without addresses. Raises OSError."""
        return cls(os.memfd_create("gangway-instances", os.MFD_CLOEXEC))

    def set(self, model_id: int, instance: int, address: str) -> None:
        """Have workers use this address from now on; empty: none."""
        os.pwrite(self.fd, address.encode().ljust(ADDRESS_BYTES, b"\0"), _place(model_id, instance))

    def get(self, model_id: int, instance: int) -> str:
        """Return the address of a ready instance, or an empty text."""
        return os.pread(self.fd, ADDRESS_BYTES, _place(model_id, instance)).rstrip(b"\0").decode()


def _place(model_id: int, instance: int) -> int:
    return (model_id * MOST_INSTANCES + instance) * ADDRESS_BYTES
