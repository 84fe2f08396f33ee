import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gangway.server.requests.heap import Heap, HeapFullError, size_class

BEGIN, END = 1000, 1000 + 64 * 1024
KEPT = 4096


class System:
    """Notes which bytes a heap has memory for."""

    def __init__(self, limit: int = 1 << 62) -> None:
        self.held: set[int] = set()
        self.limit = limit

    def take(self, offset: int, size: int) -> None:
        if len(self.held) + size // 64 > self.limit:
            raise OSError("no memory")
        pieces = set(range(offset, offset + size, 64))
        assert not pieces & self.held
        self.held |= pieces

    def give_back(self, offset: int, size: int) -> None:
        self.held -= set(range(offset, offset + size, 64))


def make_heap(begin: int, end: int, kept_bytes: int = 1 << 30, system: System | None = None) -> Heap:
    system = system or System()
    return Heap(begin, end, system.take, system.give_back, kept_bytes)


@given(st.integers(0, 2**40))
def test_size_classes_waste_little(size_bytes: int) -> None:
    size = size_class(size_bytes)
    assert size >= size_bytes
    assert size % 64 == 0
    assert size <= max(64, size_bytes + 64, size_bytes * 9 / 8)
    assert size_class(size) == size


def test_the_warmest_block_comes_back_first() -> None:
    heap = make_heap(0, 1 << 20)
    first, second = heap.allocate(5000), heap.allocate(5000)
    heap.free(first)
    heap.free(second)
    assert (heap.allocate(4999), heap.allocate(5000)) == (second, first)


def test_what_waits_is_given_back_where_the_system_has_no_more() -> None:
    heap = make_heap(0, 1 << 20, system=System(limit=64))
    heap.free(heap.allocate(64 * 40))
    second = heap.allocate(64 * 30)
    with pytest.raises(OSError):
        heap.allocate(64 * 36)
    heap.free(second)
    heap.allocate(64 * 60)
    assert heap.bytes_in_use == 64 * 60


def test_pieces_are_merged_when_a_large_block_is_needed() -> None:
    heap = make_heap(0, 64 * 16)
    blocks = [heap.allocate(64) for _ in range(16)]
    with pytest.raises(HeapFullError, match="64 bytes asked for, 0 free"):
        heap.allocate(1)
    for offset in blocks[::2] + blocks[1::2]:
        heap.free(offset)
    assert heap.allocate(64 * 16) == 0


def test_the_memory_of_a_long_queue_is_given_back() -> None:
    system = System()
    heap = make_heap(0, 1 << 20, kept_bytes=2048, system=system)
    for offset in [heap.allocate(1024) for _ in range(100)]:
        heap.free(offset)
    assert len(system.held) * 64 == 2048


def test_what_has_waited_for_long_is_given_back_and_one_of_each_size_stays() -> None:
    system = System()
    heap = make_heap(0, 1 << 20, system=system)
    many = [heap.allocate(1024) for _ in range(10)]
    other = heap.allocate(4096)
    for offset in [*many, other]:
        heap.free(offset)
    assert heap.give_back_idle(100) == 0  # from now on
    warm = [heap.allocate(1024) for _ in range(3)]
    for offset in warm:
        heap.free(offset)
    assert [heap.give_back_idle(4), heap.give_back_idle(4), heap.give_back_idle(4)] == [4, 2, 0]
    assert system.held == {at for offset in [many[6], *warm, other] for at in range(offset, offset + 1024, 64)} | set(
        range(other, other + 4096, 64)
    )
    assert heap.allocate(1024) == warm[-1]
    assert heap.give_back_idle(100) == 2  # all but the one in use and the last one


def test_what_the_system_refuses_is_free_again() -> None:
    heap = make_heap(0, 4096, system=System(limit=32))
    heap.allocate(1024)
    with pytest.raises(OSError, match="no memory"):
        heap.allocate(2048)
    assert heap.bytes_in_use == 1024
    assert heap.allocate(1024) == 1024


def test_freeing_twice_is_an_error() -> None:
    heap = make_heap(0, 1024)
    offset = heap.allocate(1)
    heap.free(offset)
    with pytest.raises(KeyError):
        heap.free(offset)


class HeapMachine(RuleBasedStateMachine):
    """Any order of calls: blocks lie inside, aligned, apart from each other, and nothing is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.system = System()
        self.heap = make_heap(BEGIN, END, KEPT, self.system)
        self.blocks: dict[int, int] = {}

    @rule(size=st.one_of(st.integers(0, 200), st.integers(0, END - BEGIN)))
    def allocate(self, size: int) -> None:
        try:
            offset = self.heap.allocate(size)
        except HeapFullError:
            gaps, last = [], BEGIN + -BEGIN % 64
            for begin, taken in sorted(self.blocks.items()):
                gaps.append(begin - last)
                last = begin + size_class(taken)
            assert max([*gaps, END - END % 64 - last]) < size_class(size)
        else:
            self.blocks[offset] = size

    @precondition(lambda self: self.blocks)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.blocks)))
        self.heap.free(offset)
        del self.blocks[offset]

    @rule(most=st.integers(0, 5))
    def give_back_idle(self, most: int) -> None:
        held = len(self.system.held)
        count = self.heap.give_back_idle(most)
        assert count <= most and (held == len(self.system.held)) == (count == 0)

    @invariant()
    def blocks_are_apart(self) -> None:
        last = BEGIN
        for begin, size in sorted(self.blocks.items()):
            assert begin >= last
            assert begin % 64 == 0
            last = begin + max(size, 1)
        assert last <= END
        assert self.heap.blocks_in_use == len(self.blocks)
        assert self.heap.bytes_in_use == sum(map(size_class, self.blocks.values()))

    @invariant()
    def used_blocks_have_memory_and_few_others(self) -> None:
        for begin, size in self.blocks.items():
            assert self.system.held.issuperset(range(begin, begin + size_class(size), 64))
        assert len(self.system.held) * 64 <= self.heap.bytes_in_use + KEPT

    def teardown(self) -> None:
        for offset in self.blocks:
            self.heap.free(offset)
        assert self.heap.allocate(size_class(50_000)) >= BEGIN


TestHeap = HeapMachine.TestCase
