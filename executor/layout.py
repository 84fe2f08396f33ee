"""Python's formats of the structures in shared memory, made of what native/layout.h says about them."""

import struct
from collections.abc import Sequence
from typing import Final

from gangway.executor import _native


class Layout:
    """One structure. `size_bytes`: with what follows its last field."""

    def __init__(self, name: str) -> None:
        self.size_bytes, self._fields = _native.LAYOUT[name]

    def offset(self, field: str) -> int:
        """Return where a field begins, in bytes."""
        return self._fields[field][0]

    def size(self, field: str) -> int:
        """Return the size of a field in bytes."""
        return self._fields[field][1]

    def reading(self, *fields: str) -> tuple[struct.Struct, int]:
        """Return a format of these fields, which skips what lies between them, and the offset of the first one.

        They are to be in the structure's order; else ValueError is raised.
        """
        begin = self.offset(fields[0])
        return struct.Struct("<" + self._format(fields, begin)[0]), begin

    def writing(self, *fields: str) -> tuple[struct.Struct, int]:
        """Return the same of fields that lie side by side: what is between them would be overwritten (ValueError)."""
        made, begin = self.reading(*fields)
        if made.size != sum(map(self.size, fields)):
            raise ValueError(f"{', '.join(fields)} do not lie side by side")
        return made, begin

    def whole(self, *fields: str, size_bytes: int = 0) -> struct.Struct:
        """Return a format of the whole structure, or of more, in which all other bytes are 0."""
        text, end = self._format(fields, 0)
        return struct.Struct(f"<{text}{max(size_bytes, self.size_bytes) - end}x")

    def _format(self, fields: Sequence[str], at: int) -> tuple[str, int]:
        parts = []
        for field in fields:
            offset, size_bytes, letter = self._fields[field]
            if offset < at or not letter:
                raise ValueError(f"{field} is out of order, or a structure")
            count = size_bytes if letter == "s" else size_bytes // struct.calcsize(f"<{letter}")
            parts.append(f"{offset - at}x{count}{letter}")
            at = offset + size_bytes
        return "".join(parts), at


MESSAGE: Final = Layout("message")
REQUEST_MESSAGE: Final = Layout("request_message")
GANG_MESSAGE: Final = Layout("gang_message")
MODEL_MESSAGE: Final = Layout("model_message")
WORKER_MESSAGE: Final = Layout("worker_message")
BELL: Final = Layout("bell")
WORKER_STATUS: Final = Layout("worker_status")
SLOT: Final = Layout("slot")
CONTROL_HEADER: Final = Layout("control_header")
MODEL_ACCOUNT: Final = Layout("model_account")
SCHEDULER_BLOCK: Final = Layout("scheduler_block")
WORKER_ACCOUNT: Final = Layout("worker_account")
SERVER_BLOCK: Final = Layout("server_block")
HEARTBEAT: Final = Layout("heartbeat")
LOST_REGIONS: Final = Layout("lost_regions")
