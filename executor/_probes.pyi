"""The C extension executor/probes: what the profiler asks of the machine. Calls let go of the interpreter lock."""

def multiply_add(lanes: int, rounds: int, /) -> tuple[float, int]:
    """Return floating-point operations done and nanoseconds. Raises ValueError for vectors the machine lacks."""

def read_memory(memory: bytearray | memoryview, /) -> int:
    """Read all of it in order; return nanoseconds."""

def disturb(memory: bytearray | memoryview, random: bool, share: int, slice_us: int, at: int, /) -> int:
    """Change memory line by line for `slice_us`, `share` percent of the time; return where to go on (`at`)."""
