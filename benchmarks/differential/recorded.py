"""Triton's answers as a file, so that they can be compared with where there is no Triton."""

import json
import lzma
from collections.abc import Mapping
from pathlib import Path

from benchmarks.differential.wire import Answer

FILE = Path(__file__).with_name("triton.jsonl.xz")


def write(answers: Mapping[str, list[Answer]]) -> None:
    """Keep answers by the names of their cases."""
    lines = (json.dumps([name, answer], ensure_ascii=False, separators=(",", ":")) for name, answer in answers.items())
    FILE.write_bytes(lzma.compress("\n".join(lines).encode(), preset=9))


def read() -> dict[str, list[Answer]]:
    """Return what was kept."""
    return dict(json.loads(line) for line in lzma.decompress(FILE.read_bytes()).decode().splitlines())
