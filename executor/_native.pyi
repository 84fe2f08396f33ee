"""The C extension (executor/native). Offsets are bytes into a writable view; what lies outside it is a ValueError."""

from collections.abc import Callable, Sequence
from mmap import mmap
from typing import Any, Literal, Self

LAYOUT: dict[str, tuple[int, dict[str, tuple[int, int, str]]]]
"""Of native/layout.h: struct -> size in bytes, {field -> offset, size in bytes, letter of module `struct`}."""

LEASE_BYTES: int
MAX_ARGUMENTS: int
MAX_OPERANDS: int
MAX_AWAITED: int
MAX_CHECKS: int
MAX_COMPLETED: int
MAX_LAYERS: int
MAX_MEMBERS: int
MAX_MODELS: int
MAX_PHASES: int
MAX_PARTS: int
MAX_RANKS: int
MAX_REGIONS: int
MAX_TASKS: int
MAX_TENSORS: int
MAX_VERSIONS: int
INLINE_PLACES: int
REGION_ALIGNMENT: int
REGION_SHIFT: int
RING_HEADER_BYTES: int

MESSAGE_SUBMIT: int
MESSAGE_CANCEL: int
MESSAGE_RUN: int
MESSAGE_LOAD: int
MESSAGE_UNLOAD: int
MESSAGE_EXIT: int
MESSAGE_LEFT: int
MESSAGE_LOADED: int
MESSAGE_UNLOADED: int
MESSAGE_READY: int
LEFT_DONE: int
LEFT_STOPPED: int
LEFT_SHRUNK: int
LEFT_ABORTED: int
LEFT_TIMEOUT: int
LEFT_INVALID: int
LEFT_STALE: int
SLOT_FREE: int
SLOT_FILLING: int
SLOT_SUBMITTED: int
SLOT_RUNNING: int
SLOT_DONE: int
STATUS_OK: int
STATUS_CANCELLED: int
STATUS_UNAVAILABLE: int
STATUS_DEADLINE: int
STATUS_INTERNAL: int
STATUS_LATE: int
STATUS_QUEUE_FULL: int
STATUS_CROWDED: int
STATUS_INVALID: int
STATUS_CRASHED: int
STATUS_NO_MEMORY: int
CONTROL_RUN: int
CONTROL_STOP: int
CONTROL_STOP_NOW: int
PHASE_OPEN: int
PHASE_STOPPED: int
PHASE_END: int
PHASE_PACK: int
PHASE_UNPACK: int

def ring_init(view: memoryview, offset: int, capacity: int, /) -> None: ...
def ring_send(view: memoryview, offset: int, message: bytes, /) -> bool: ...
def ring_receive(view: memoryview, offset: int, /) -> bytes | None: ...
def rings_drain(view: memoryview, offsets: tuple[int, ...], /) -> list[tuple[int, bytes]]: ...
def ring_pending(view: memoryview, offset: int, /) -> int: ...
def ring_discard(view: memoryview, offset: int, /) -> None: ...
def bell_ring(view: memoryview, offset: int, /) -> None: ...
def bell_arm(view: memoryview, offset: int, /) -> None: ...
def bell_ring_for_best_effort(view: memoryview, offset: int, /) -> None: ...
def bell_seen(view: memoryview, offset: int, /) -> int: ...
def bell_ring_for_control(view: memoryview, offset: int, /) -> None: ...
def bell_control_seq(view: memoryview, offset: int, /) -> int: ...
def bell_take_over(view: memoryview, offset: int, /) -> None: ...
def bell_wait(
    view: memoryview,
    offset: int,
    seen: int,
    spin_us: int,
    timeout_us: int,
    skip_completion_wakeups: bool,
    skip_best_effort_wakeups: bool,
    /,
) -> int: ...
def slot_reset(view: memoryview, slot: int, /) -> None: ...
def slot_acquire(view: memoryview, slots: int, first: int, /) -> int: ...
def slot_read(view: memoryview, slot: int, /) -> tuple[int, int, int]: ...
def slot_change(view: memoryview, slot: int, generation: int, mask: int, state: int, status: int, /) -> bool: ...
def slot_fill(view: memoryview, slot: int, request: tuple[object, ...], /) -> None: ...
def slot_submit(view: memoryview, slot: int, /) -> int: ...
def slot_release(view: memoryview, slot: int, /) -> bool: ...
def slot_see(view: memoryview, slot: int, generation: int, /) -> bool: ...
def slot_start(view: memoryview, slot: int, generation: int, parts: int, batch_rows: int, leads: bool, /) -> bool: ...
def slot_lead(view: memoryview, slot: int, generation: int, leads: bool, /) -> bool: ...
def slot_part_is_done(view: memoryview, slot: int, generation: int, part: int, /) -> bool: ...
def slot_wait(view: memoryview, slot: int, spin_us: int, timeout_us: int, /) -> bool: ...
def slot_wait_any(view: memoryview, slots: bytes, spin_us: int, timeout_us: int, /) -> bool: ...
def slot_wake(view: memoryview, slot: int, /) -> None: ...
def slots_done(view: memoryview, slots: tuple[int, ...], /) -> list[int]: ...
def lease_initialise(
    view: memoryview,
    offset: int,
    model_id: int,
    members: tuple[tuple[int, int, int, int, int, int], ...],
    arena_offset: int,
    arena_stride: int,
    first_layer: int,
    end_layer: int,
    versions: bytes,
    wanted: int,
    timeout_us: int,
    pass_layers: int,
    passes: int,
    block_ranks: bytes,
    /,
) -> int: ...
def lease_resume(
    view: memoryview, offset: int, end_layer: int, wanted: int, versions: bytes, block_ranks: bytes, /
) -> None: ...
def lease_plan(view: memoryview, offset: int, step: int, versions: bytes, block_ranks: bytes, /) -> None: ...
def lease_set_control(view: memoryview, offset: int, control: int, /) -> None: ...
def lease_resize(view: memoryview, offset: int, before: int, wanted: int, /) -> bool: ...
def lease_blocks(view: memoryview, offset: int, /) -> tuple[int, int, int]: ...
def lease_abort(view: memoryview, offset: int, /) -> None: ...
def lease_progress(view: memoryview, offset: int, /) -> tuple[int, int, int, int, int, bool]: ...
def counters_add(view: memoryview, offset: int, words: int, latest: int, /, *pairs: int) -> None:
    """Add to 64-bit words of a record of so many; `pairs` are the number of a word and what is added. Keeps the GIL.

    Word 0 is odd meanwhile and grows by 2; word 1 becomes `latest` if that is more. At most 32 pairs. Raises ValueError
    for a word that is none of the counters, and changes nothing then.
    """

def lease_generation(view: memoryview, offset: int, /) -> int: ...
def lease_start_ns(view: memoryview, offset: int, /) -> int: ...
def lease_position(view: memoryview, offset: int, /) -> tuple[int, int, int]: ...
def lease_glance(view: memoryview, offset: int, /) -> tuple[int, int, int, int, int, int]: ...
def lease_layer_end_ns(view: memoryview, offset: int, first_layer: int, end_layer: int, /) -> list[int]: ...

class Program:
    """A model's table for the layer loop, with its kernels and weights mapped. See `executor/worker.py`."""

    def __init__(
        self,
        kernels: str,
        weights: str,
        table: bytes,
        symbols: Sequence[str],
        arena_bytes: int,
        staging_bytes: int,
        inputs: Sequence[tuple[int, int]],
        outputs: Sequence[tuple[int, int]],
        checks: tuple[tuple[str, ...], ...],
        calls: tuple[Callable[..., tuple[bool, str] | None] | None, ...],
        tail: bool = False,
        instances: tuple[bytes, bytes, Sequence[str]] | None = None,
    ) -> None:
        """Tensors are pairs: bytes of a row, its place if staged (`plan_staging`). `checks` and `calls`: of each layer.

        A layer with a function is the call `run(addresses, cores)` for each row, without kernels: where its arguments
        lie, and the CPU numbers on which it may have threads, the caller's first. It returns None, or why the row was
        not computed: whether what is in the request is to blame (INVALID, else INTERNAL), and a text. An exception
        answers INTERNAL. `tail`: the last layer is the call `run(rows, frame, cores)` for each request: the addresses
        for each of its rows, and the block for the frame of all outputs, which no other layer makes.
        `instances`: where numbers go (three uint32 each), the numbers of all instances (uint64), names of kernels.
        """
    @classmethod
    def whole(
        cls,
        run: Callable[
            [list[tuple[memoryview, memoryview]], tuple[int, ...], bool],
            Sequence[tuple[bool, str] | tuple[bytes, bytes, Callable[[], object]] | Literal[False] | None],
        ],
        /,
    ) -> Self:
        """Return a program of one layer that is the call `run([(request, answer), ...], cores, again)` on frames, by
        rank 0.

        `cores`: CPU numbers of the gang, rank 0's first; the other ranks sleep until it returns. The
        views are valid so long. It says of each request None, or why it was not computed: whether what is in it is to
        blame (INVALID, else INTERNAL), and a text. An exception answers INTERNAL.

        `again`: a request in the same memory was computed lately, on one core. Then `run` may say instead of None how
        the next one is computed there: what its frame begins with, what that of its answer does, and a function that
        computes the contents. If that raises an exception, the request is given to `run`. None: it is not asked again;
        False: not this time.

        The function may return True: it has written all of the answer. False: nothing was computed, so the request is
        given to `run`; NotImplemented: so is each further one.
        """

class InstanceEnd:
    """A worker's end of an instance of a Python model (`executor/python_instance.py`), for `Handover`."""

    def __init__(self, socket: int, process: int, pid: int) -> None:
        """`process`: a descriptor of it. Both stay the caller's, until `close`."""
    def share(self, memory: mmap | None, /) -> None:
        """Use this memory from now on; None: none."""
    def show(self, status: memoryview, /) -> None:
        """Look into this memory for whether it is free."""
    def poll(self, most_ms: float, /) -> bool:
        """Whether a message comes within this time. It waits no longer when the core is wanted."""
    @property
    def core_is_wanted(self) -> bool:
        """Whether what the calling worker executes is to leave its core."""
    def close(self) -> None: ...

class Handover:
    """How requests of one kind are handed over, and answered, if that is possible in one go."""

    def __init__(
        self,
        instance: InstanceEnd,
        request: memoryview,
        block: memoryview,
        header: bytes,
        common: bytes,
        answer: bytes,
        status: bytes,
        told: tuple[int, int],
        status_at: int,
        inputs: Sequence[tuple[int, int, int]],
        outputs: Sequence[tuple[int, int, int]],
        elements: Sequence[tuple[int, int, int]],
        needed_bytes: int,
        timeout_ns: int,
        core: int,
        go_on: Callable[[int, int, tuple[int, int], bytes], None],
    ) -> None:
        """`header`, `answer`: of the messages. `common`: how what the instance is told ends. `told`: where that is.

        `inputs`, `outputs`: (from, to, bytes) from `request` to the memory, and from there to `block`. `elements`:
        (offset, bytes, count) of BYTES. `go_on(number, begin_ns, (looked_ns, computed_ns), received)` answers what was
        handed over and has no plain answer. Raises ValueError for long messages, and for places that are outside.
        """
    def __call__(self) -> bool | None:
        """As `Program.whole` says. Releases the GIL."""

class FastPath:
    """What the scheduler's process begins without a decision. See `executor/fast_path.py`."""

    def __init__(
        self,
        control: memoryview,
        bell: int,
        front_ends: tuple[tuple[memoryview, int, int], ...],
        workers: tuple[tuple[int, int, int], ...],
        leases: int,
        lease_count: int,
        lease_timeout_us: int,
        worker_slots: int,
    ) -> None:
        """`front_ends`: io segment, slots, submit ring; `workers`: bell, command ring, completion ring of each."""
    def open(
        self,
        model_id: int,
        layers: int,
        expected_us: int,
        ranks: int,
        min_slack_us: int,
        may_grow: bool,
        arena_stride: int,
        arenas: tuple[int, ...],
        versions: bytes,
        /,
    ) -> None: ...
    def close(self, model_id: int, /) -> None: ...
    def poll(
        self, leases: tuple[int, ...] | None, control_seq: int, spin_us: int, timeout_us: int, watch_us: int, /
    ) -> tuple[list[tuple[int, ...]], list[tuple[Any, ...]]]:
        """Wait and begin requests. `leases`: of each worker slot, -1: unused; None: as before. Releases the GIL.

        Returns the fields of Completed, its times as those of InFlight, for those that have ended, and those of
        InFlight for those under way.
        """

class Worker:
    """What one worker process needs to serve its rings."""

    def __init__(
        self,
        control: memoryview,
        bell: int,
        status: int,
        commands: int,
        completions: int,
        scheduler_bell: int,
        leases: int,
        lease_count: int,
        arena: memoryview,
        io: Sequence[memoryview],
        spin_us: int,
        lost_regions: int,
    ) -> None: ...
    def set_program(self, model_id: int, program: Program | None, /) -> None: ...
    def send(self, message: bytes, /) -> None: ...
    def loop(self, background: bool, /) -> bytes | None:
        """Run leases until another command arrives; return its 64 bytes. In between only whole programs call Python.

        None after a nudge. `background`: commands are being worked on, so the worker is busy also while it waits.
        """

    def nudge(self) -> None:
        """Have `loop` return None soon, between two leases. For other threads."""

    def map_region(self, number: int, descriptor: int, offset: int, size_bytes: int, /) -> None:
        """Map a part of a file, writable. From any thread. Raises OSError."""

    def clear_region(self, number: int, /) -> None:
        """Hide the region from leases. For the thread that calls `loop`."""

    def unmap_region(self, number: int, /) -> None:
        """Give the addresses of a region back that has been cleared. From any thread."""
