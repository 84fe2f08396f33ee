"""The tables of the reference are those that the code would write, and the chart shows the numbers of its page."""

import re
from pathlib import Path

import pytest

from docs import chart, generate, life_drawing
from gangway.base.command_line import parser_of
from gangway.base.commands import COMMANDS
from gangway.server.options.command_line import make_parser
from tests.test_rooms import ARROWS


@pytest.mark.parametrize("page", generate.pages(), ids=lambda page: page.stem)
def test_generated_tables_are_up_to_date(page: Path) -> None:
    text = page.read_text()
    assert generate.with_tables(text) == text, "run python -m docs.generate"


def test_every_table_has_its_place() -> None:
    texts = "".join(page.read_text() for page in generate.pages())
    assert [name for name in generate.TABLES if generate.BEGIN.format(name=name) not in texts] == []


def test_the_chart_is_drawn_of_its_numbers() -> None:
    assert chart.PICTURE.read_text() == chart.svg(), "run python -m docs.chart"


def test_the_life_of_a_model_is_drawn_of_its_table() -> None:
    assert life_drawing.PICTURE.read_text() == life_drawing.svg(), "run python -m docs.life_drawing"


def test_contributing_says_which_room_may_import_which() -> None:
    said = {}
    for line in (generate.DOCS.parent / "CONTRIBUTING.md").read_text().splitlines():
        if match := re.fullmatch(r"\| `(\w+)/` \| .+ \| ([\w, -]+) \|", line):
            said[match[1]] = set(match[2].split(", ")) - {"-"}
    assert said == dict(ARROWS)


def test_commands_on_pages_have_flags_that_exist() -> None:
    known = {name: parser_of(name) for name in COMMANDS if name != generate.SERVE}
    known[generate.SERVE] = make_parser()
    unknown = set()
    for page in (generate.DOCS.parent / "README.md", *generate.DOCS.rglob("*.md")):
        text = page.read_text().replace("\\\n", " ")
        for command, arguments in re.findall(r"^ *(?:`|\d\. `)?gangway (\w+)([^`\n#|]*)", text, flags=re.MULTILINE):
            if command in known:
                flags = {name for action in known[command]._actions for name in action.option_strings}
                given = {flag.partition("=")[0] for flag in re.findall(r"(?<!\S)--?[a-z][\w=-]*", arguments)}
                unknown |= {f"{page.name}: gangway {command} {flag}" for flag in given - flags}
    assert unknown == set()
