"""Digests and checksums depend on the bytes alone, however they come."""

import hashlib
import zlib
from pathlib import Path

import pytest

from gangway.base import files

PIECE = 100


@pytest.mark.parametrize("size", [0, 1, PIECE - 1, PIECE, PIECE + 1, 5 * PIECE, 5 * PIECE + 37])
def test_files_are_summed_up_piece_by_piece(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", PIECE)
    content = bytes(i * i % 251 for i in range(size))
    path = tmp_path / "file"
    path.write_bytes(content)
    streamed = files.Checksum()
    for begin in range(0, size, 33):
        streamed.update(content[begin : begin + 33])
    pieces = [content[begin : begin + PIECE] for begin in range(0, size, PIECE)]
    checks = [zlib.crc32(piece).to_bytes(4, "little") for piece in pieces]
    assert streamed.hexdigest() == files.file_checksum(path) == hashlib.sha256(b"".join(checks)).hexdigest()
    digests = [hashlib.sha256(piece).digest() for piece in pieces]
    assert files.file_digest(path) == hashlib.sha256(b"".join(digests)).hexdigest()
