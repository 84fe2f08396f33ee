"""Messages about regions, and the descriptors that come with some of them."""

import os
from contextlib import closing

import pytest

from gangway.base.peer import peer_sockets
from gangway.executor.regions import (
    REGION_MESSAGE_BYTES,
    AllMapped,
    MapRegion,
    OfferRegion,
    RegionDone,
    RegionMapped,
    UnmapRegion,
    WithdrawRegion,
    pack_region_message,
    region_peer,
    unpack_region_message,
)
from testing.processes import open_descriptors
from testing.waiting import until

LARGE = 2**64 - 1
PLAIN = [RegionMapped(1, 2), WithdrawRegion(LARGE), UnmapRegion(128), AllMapped(), RegionDone(1)]
WITH_DESCRIPTOR = [OfferRegion(LARGE, 2, LARGE), MapRegion(3, 4096, 5)]


@pytest.fixture
def peers():
    ends = [region_peer(end) for end in peer_sockets()]
    with closing(ends[0]), closing(ends[1]):
        yield ends


@pytest.mark.parametrize("message", [*PLAIN, *WITH_DESCRIPTOR], ids=str)
def test_round_trip(message):
    raw = pack_region_message(message)
    assert len(raw) == REGION_MESSAGE_BYTES
    assert unpack_region_message(raw) == message


@pytest.mark.parametrize("raw", [b"", bytes(31), bytes(33), b"\x07" + bytes(31), b"\xff" * 32])
def test_what_is_no_message(raw):
    with pytest.raises(ValueError):
        unpack_region_message(raw)


def test_a_descriptor_is_handed_over(peers, tmp_path):
    ours, theirs = peers
    path = tmp_path / "file"
    path.write_bytes(b"content")
    descriptor = os.open(path, os.O_RDONLY)
    ours.send(WITH_DESCRIPTOR[0], descriptor)
    ours.send(PLAIN[0])
    os.close(descriptor)
    message, received = theirs.receive_with_descriptor()
    assert message == WITH_DESCRIPTOR[0]
    assert not os.get_inheritable(received)
    assert os.pread(received, 100, 0) == b"content"
    os.close(received)
    assert theirs.receive_with_descriptor() == (PLAIN[0], -1)
    ours.close()
    with pytest.raises(EOFError):
        theirs.receive_with_descriptor()


@pytest.mark.parametrize(("message", "has_descriptor"), [(PLAIN[0], True), (WITH_DESCRIPTOR[0], False)])
def test_a_descriptor_too_many_or_too_few(peers, message, has_descriptor):
    ours, theirs = peers
    before = open_descriptors(os.getpid())
    ours.send(message, 0 if has_descriptor else -1)
    with pytest.raises(ValueError, match="with the descriptor"):
        theirs.receive_with_descriptor()
    until(lambda: open_descriptors(os.getpid()) <= before)
