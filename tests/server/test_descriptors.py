"""Descriptors are counted and looked at without taking any, and a process that has none for long is replaced."""

import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from gangway.server.descriptors import DescriptorWatch, borrowed_socket, open_descriptors
from testing.waiting import until


@contextmanager
def no_further_descriptors() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def all_taken() -> Iterator[None]:
    taken = []
    with suppress(OSError):
        while True:
            taken.append(os.open(os.devnull, os.O_RDONLY))
    try:
        yield
    finally:
        for descriptor in taken:
            os.close(descriptor)


def test_looking_at_what_is_no_socket_takes_nothing() -> None:
    with socket.socket() as own:
        kept = {0, 1, 2, own.fileno()}
        before = len(open_descriptors())
        for descriptor in kept:
            with suppress(OSError), borrowed_socket(descriptor):
                pass
        assert kept <= set(open_descriptors())
        until(lambda: len(open_descriptors()) <= before)


def test_a_borrowed_socket_stays_open() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with borrowed_socket(ours.fileno()) as borrowed:
            borrowed.send(b"x")
        with pytest.raises(ZeroDivisionError), borrowed_socket(ours.fileno()):
            _ = 1 / 0
        ours.send(b"y")
        assert theirs.recv(2) == b"xy"


def test_descriptors_are_known_when_none_is_left() -> None:
    with no_further_descriptors(), all_taken():
        assert {0, 1, 2} <= set(open_descriptors())


def test_a_process_without_any_descriptor_for_long_is_replaced() -> None:
    ended: list[bool] = []
    watch = DescriptorWatch(lambda descriptors, wanted: 0, lambda: ended.append(True), replace_after_s=0.0)
    watch.poll()
    assert not watch.is_short
    with no_further_descriptors():
        watch.poll()
        assert watch.is_short
        os.close(os.open(os.devnull, os.O_RDONLY))  # what has been reserved is free
        with all_taken():
            watch.poll()
            assert ended
    ended.clear()
    watch.poll()
    assert (watch.is_short, ended) == (False, [])
