"""The C extension executor/probes: what the profiler asks of the machine. Calls let go of the interpreter lock."""

def multiply_add(lanes: int, rounds: int, /) -> tuple[float, int]:
    """Return floating-point operations done and nanoseconds. Raises ValueError for vectors the machine lacks."""

def read_memory(memory: memoryview, /) -> int:
    """Read all of it in order; return nanoseconds."""

def disturb(memory: memoryview, at: int, share: int, slice_us: int, /) -> int:
    """Change memory line by line from line `at` on, for `slice_us`, `share` percent of the time; return the next `at`.

    Raises ValueError for a share outside 1 to 100.
    """
