"""Computations in processes of their own: how they end is told."""

import faulthandler
import gc
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import weakref

import pytest

from gangway.compiler.errors import EndedApartError, UnsupportedModelError
from gangway.compiler.lower.reference import run_apart, working_apart

FEW = 20_000


class Garbage:
    """What only the collector ends, with a thread of its own; it notes by which process."""

    def __init__(self, owners: list[int]) -> None:
        self.itself = self
        ended = threading.Event()
        thread = threading.Thread(target=ended.wait)
        thread.start()
        weakref.finalize(self, lambda: (ended.set(), owners.append(os.getpid()), thread.join()))


def end_by(number: int) -> None:
    faulthandler.disable()  # pytest's would tell
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGFPE, signal.SIGSEGV, signal.SIGABRT])
def test_a_signal_ends_only_the_process_apart(number: signal.Signals) -> None:
    with pytest.raises(EndedApartError, match=f"by {number.name}$"):
        run_apart(lambda: end_by(number))


def test_a_library_that_exits_ends_only_the_process_apart() -> None:
    with pytest.raises(EndedApartError, match="with status 3"):
        run_apart(lambda: os._exit(3))


def test_too_much_time_is_no_crash() -> None:
    """The kernel ends by these signals what has used its time."""
    for number in (signal.SIGXCPU, signal.SIGKILL):
        with pytest.raises(UnsupportedModelError, match="takes more than") as caught:
            run_apart(lambda number=number: end_by(number))
        assert not isinstance(caught.value, EndedApartError)
    with pytest.raises(EndedApartError, match="by SIGKILL"):
        run_apart(lambda: end_by(signal.SIGKILL), is_limited=False)


def test_results_and_exceptions_arrive() -> None:
    assert run_apart(lambda: ("a", 1), is_limited=False) == ("a", 1)
    with pytest.raises(UnsupportedModelError, match="ZeroDivisionError"):
        run_apart(lambda: 1 // (len(sys.argv) - len(sys.argv)))


def test_what_never_ends_is_left() -> None:
    with working_apart(signal.pause, wall_s=0.1) as result, pytest.raises(UnsupportedModelError, match="does not end"):
        result()


def test_what_computes_is_not_left_however_long_it_takes() -> None:
    """A process that gets no core is as slow; what it may use of one is limited by the kernel."""

    def spend() -> float:
        while time.process_time() < 0.2:
            pass
        return time.process_time()

    with working_apart(spend, wall_s=0.1) as result:
        assert result() >= 0.2


def test_garbage_of_this_process_is_collected_here_alone() -> None:
    """Its end may need threads: that of a session of onnxruntime waits for its own, which are in this process."""
    owners: list[int] = []
    gc.disable()
    try:
        Garbage(owners)
        assert run_apart(lambda: (gc.collect(), list(owners))[1]) == []
        gc.collect()
    finally:
        gc.enable()
    assert owners == [os.getpid()]


def test_it_is_not_collected_while_the_process_begins() -> None:
    """What multiprocessing does there, before any of ours, may be one object more than the collector waits for."""

    class Begins:
        """Makes more objects in a new process than this one makes before."""

        def __init__(self) -> None:
            multiprocessing.util.register_after_fork(self, lambda _: [[] for _ in range(4 * FEW)])

    owners: list[int] = []
    begins, threshold = Begins(), gc.get_threshold()
    gc.collect()
    gc.set_threshold(FEW)
    try:
        Garbage(owners)
        assert run_apart(lambda: (list(owners), gc.isenabled())) == ([], True)
        assert gc.isenabled()
        gc.collect()
    finally:
        gc.set_threshold(*threshold)
        del begins
    assert owners == [os.getpid()]
