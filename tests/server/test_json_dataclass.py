"""Options survive their way to another process; anything else is refused."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import pytest

from gangway.server import json_dataclass
from gangway.server.options.command_line import FrontEndOptions, parse_options


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    path: Path | None
    pair: tuple[int, str]
    colours: tuple[Colour, ...]


@dataclass(frozen=True)
class Outer:
    inner: tuple[Inner, ...]
    share: float
    wanted: bool


def test_nested_values_return_as_what_they_were() -> None:
    inner = Inner(Path("/a b/ü"), (1, "x"), (Colour.RED,))
    outer = Outer((inner, Inner(None, (2, ""), ())), 0.5, True)
    assert json_dataclass.loads(Outer, json_dataclass.dumps(outer)) == outer


def test_the_whole_command_line_reaches_the_front_end(tmp_path: Path) -> None:
    serve = parse_options(["--model-repository", str(tmp_path), "--cores=0", "--grpc-port=1", "--log-verbose=2"])
    options = FrontEndOptions(1, 2, 3, 4, 5, "[::]:6", serve=serve)
    assert json_dataclass.loads(FrontEndOptions, json_dataclass.dumps(options)) == options


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"inner":[],"share":1,"wanted":true,"other":1}'])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        json_dataclass.loads(Outer, text)
