"""What is appended to a file is in it whole, or not at all."""

import os
from pathlib import Path

import pytest

from gangway.base.files import append_whole
from tests.helpers.full_disk import files_of_at_most


@pytest.mark.parametrize("mode", ["r+b", "ab"])
def test_what_fits_only_in_part_leaves_the_file_as_it_was(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"one\n")
    with path.open(mode, buffering=0) as file:
        with files_of_at_most(10), pytest.raises(OSError, match="too large"):
            append_whole(file.fileno(), b"two and three\n")
        assert path.read_bytes() == b"one\n"
        append_whole(file.fileno(), b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"


def test_the_tail_is_replaced_or_stays(tmp_path: Path) -> None:
    path = tmp_path / "list"
    path.write_bytes(b"[1]")
    with path.open("r+b", buffering=0) as file:
        append_whole(file.fileno(), b",2]", b"]")
        with files_of_at_most(8), pytest.raises(OSError, match="too large"):
            append_whole(file.fileno(), b",3,4,5,6]", b"]")
        assert path.read_bytes() == b"[1,2]"
        append_whole(file.fileno(), b",3]", b"]")
    assert path.read_bytes() == b"[1,2,3]"


def test_a_pipe_gets_the_content() -> None:
    reading, writing = os.pipe()
    append_whole(writing, b"line\n", b"]")
    assert os.read(reading, 100) == b"line\n"
    os.close(reading)
    os.close(writing)
