"""A digest depends on the bytes alone, however they come."""

import hashlib
from pathlib import Path

import pytest
from gangway.artifact import digest

PIECE = 100


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE, 5 * PIECE + 37])
def test_streamed_and_file_digests_agree(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digest, "PIECE_BYTES", PIECE)
    content = bytes(i * i % 251 for i in range(size))
    path = tmp_path / "file"
    path.write_bytes(content)
    streamed = digest.Digest()
    for begin in range(0, size, 33):
        streamed.update(content[begin : begin + 33])
    pieces = [hashlib.sha256(content[begin : begin + PIECE]).digest() for begin in range(0, size, PIECE)]
    assert streamed.hexdigest() == digest.file_digest(path) == hashlib.sha256(b"".join(pieces)).hexdigest()
