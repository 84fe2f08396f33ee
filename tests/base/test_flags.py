"""A field of options is the one place that says anything of a flag."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest

from gangway.base.command_line import CommandParser
from gangway.base.flags import OptionError, add_flags, common_flags, flag, from_flags, nested, read_flags


def _even(number: int) -> int:
    if number % 2:
        raise ValueError(f"{number} is odd")
    return number


@dataclass(frozen=True)
class _Inner:
    depth: int = flag("--depth", 1, type=int, metavar="N", help="how deep (%(default)s)")


@dataclass(frozen=True)
class _Options:
    pairs: int = flag("--pairs", 2, type=int, read=_even, is_common=True, metavar="N", help="how many (%(default)s)")
    inner: _Inner = nested(_Inner)
    doubled: int = from_flags("--pairs", lambda given: 2 * given.pairs, default=4)
    own: str = "no flag"


def read(*arguments: str) -> _Options:
    parser = CommandParser("gangway serve", common=common_flags(_Options))
    add_flags(_Options, parser.add_argument_group("group"))
    return read_flags(_Options, parser.parse_args(arguments))


def test_default_command_line_variable_and_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read() == _Options()
    assert read("--pairs=6", "--depth=3") == _Options(6, _Inner(3), 12)
    file = tmp_path / "settings.toml"
    file.write_text("pairs = 10\n[serve]\ndepth = 5\n")
    assert read(f"--config={file}") == _Options(10, _Inner(5), 20)
    monkeypatch.setenv("GANGWAY_PAIRS", "8")
    assert read(f"--config={file}") == _Options(8, _Inner(5), 16)


def test_help_and_shown_settings(capsys: pytest.CaptureFixture[str]) -> None:
    for argument, names in (("--help", {"--pairs"}), ("--help-all", {"--pairs", "--depth"})):
        with pytest.raises(SystemExit):
            read(argument)
        said = capsys.readouterr().out
        assert {name for name in ("--pairs", "--depth") if name in said} == names
        assert "how many (2)" in said
    with pytest.raises(SystemExit):
        read("--depth=7", "--show-config")
    assert tomllib.loads(capsys.readouterr().out) == {"serve": {"depth": "7"}}


def test_an_error_names_its_flag() -> None:
    with pytest.raises(OptionError, match="3 is odd") as refused:
        read("--pairs=3")
    assert refused.value.flag == "--pairs"
