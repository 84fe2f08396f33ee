"""The corpus of the wire: what a client sends, byte by byte, and what the server answers, as data.

A line of `grpc.jsonl` and `http.jsonl` is a case: its name, the server that it is for, steps, and the answers that are
right. Most have one answer; several are listed where a race decides. What varies from run to run is replaced by what
does not: ports, times, the version.
"""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PROTOCOLS = ("grpc", "http")
SEGMENT = "wire-corpus-00000000"  # stands for the name of the segment in shared memory, which is as long
LEGIBLE = frozenset(range(32, 127)) | {9, 10, 13}
SHOWN_CHARACTERS = 600

Step = list[Any]
Answer = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One case. The first word of a step says what is done; bytes are packed."""

    name: str
    server: str
    steps: Sequence[Step]
    answers: Sequence[Answer] = ()

    def line(self) -> str:
        """Return it as a line of the file."""
        content = {"name": self.name, "server": self.server, "steps": self.steps, "answers": self.answers}
        return json.dumps(content, separators=(",", ":"))


def path_of(protocol: str) -> Path:
    """Return the file of a protocol."""
    return FOLDER / f"{protocol}.jsonl"


def load(protocol: str) -> list[Case]:
    """Return the cases of a protocol, in the order in which they are sent."""
    return [Case(**json.loads(line)) for line in path_of(protocol).read_text().splitlines()]


def pack(data: bytes) -> str:
    """Return bytes as text, as short as can be: `=` as it is, `z` deflated, `b` in base64."""
    if len(data) < 300 and LEGIBLE.issuperset(data):
        return "=" + data.decode()
    deflated = zlib.compress(data, 9)
    kind, content = ("z", deflated) if len(deflated) < len(data) else ("b", data)
    return kind + base64.b64encode(content).decode()


def unpack(text: str) -> bytes:
    """Return what was packed."""
    if text[0] == "=":
        return text[1:].encode()
    data = base64.b64decode(text[1:])
    return zlib.decompress(data) if text[0] == "z" else data


@dataclass(frozen=True)
class Renaming:
    """What is called otherwise in the corpus: the segment's name in what is sent, it and ports in what is answered."""

    segment: str
    ports: Mapping[str, str]

    def sent(self, data: bytes) -> bytes:
        """Return what is sent instead of a packed text's bytes."""
        return data.replace(SEGMENT.encode(), self.segment.encode())

    def answered(self, data: bytes) -> bytes:
        """Return what the corpus has instead of bytes of an answer."""
        data = data.replace(self.segment.encode(), SEGMENT.encode())
        for name, port in self.ports.items():
            data = data.replace(f"port {port}".encode(), f"port {{{name}}}".encode())
        return data


def difference(case: Case, answer: Answer) -> str:
    """Return what is wrong with an answer, for people; empty if it is right."""
    if answer in case.answers:
        return ""
    texts = [f"  {word}: {_legible(found)}" for word, found in (("expected", case.answers[0]), ("got", answer))]
    return "\n".join((f"{case.name} ({case.server})", *texts))


def _legible(answer: Any) -> str:
    def opened(value: Any) -> Any:
        if isinstance(value, str) and value[:1] in ("z", "b") and len(value) > 8:
            try:
                return repr(unpack(value)[:SHOWN_CHARACTERS])
            except ValueError:
                return value
        if isinstance(value, dict):
            return {name: opened(item) for name, item in value.items()}
        return [opened(item) for item in value] if isinstance(value, list) else value

    return json.dumps(opened(answer))
