"""Weights that several artifacts of a model share."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from gangway.artifact.weights import SharedWeights

KEY = "k" * 64
TABLE = bytes(range(256)) * 64


@pytest.fixture
def weights(tmp_path: Path) -> Iterator[SharedWeights]:
    with closing(SharedWeights(tmp_path, KEY, tmp_path / "weights.bin")) as weights:
        yield weights


def test_equal_arrays_lie_in_one_place(weights: SharedWeights) -> None:
    offsets = [weights.put(memoryview(content)) for content in (TABLE, b"small", TABLE, b"small")]
    assert offsets[:2] == offsets[2:] and len(set(offsets)) == 2


def test_the_beginning_of_an_array_is_not_written_again(weights: SharedWeights, tmp_path: Path) -> None:
    offset = weights.put(memoryview(TABLE))
    weights.finish()
    weights.close()
    again = SharedWeights(tmp_path, KEY, tmp_path / "again.bin")
    assert again.put(memoryview(TABLE)[:9000]) == offset
    other = bytearray(TABLE[:9000])
    other[-1] ^= 1
    longer = TABLE + b"more"
    places = [again.put(memoryview(content)) for content in (bytes(other), longer, longer[:-1])]
    assert offset < places[0] < places[1] == places[2]
    again.finish()
    again.close()
    content = (tmp_path / "again.bin").read_bytes()
    assert [content[place : place + 9000] for place in (offset, places[0])] == [TABLE[:9000], bytes(other)]
    assert content[places[1] :].startswith(longer)
