"""The overview's figures are those of the sections that it names: one measurement, one number."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

MEASUREMENTS = Path(__file__).parents[2] / "docs" / "measurements"
HEADING = re.compile(r"^(#+) (.+)$", re.MULTILINE)
NUMBER = re.compile(r"(?<![\d.])(?:\d*\.)?\d+(?![\d.]*\d)")
NO_FIGURE = re.compile(r"\([^)]*\)")  # what a bracket adds: numbers of clients, dates


def rows() -> list[list[str]]:
    """The cells of each row that names a section."""
    lines = (MEASUREMENTS / "overview.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [row for row in cells if len(row) == 4 and re.search(r"\]\([a-z-]+\.md", row[3])]


def section(page: str, anchor: str) -> str:
    """The text below a heading, with what is below lower ones; the whole page without an anchor."""
    text = (MEASUREMENTS / page).read_text()
    if not anchor:
        return text
    headings = list(HEADING.finditer(text))
    plain = [re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", one[2]).strip().lower()) for one in headings]
    first = plain.index(anchor)
    later = (one.start() for one in headings[first + 1 :] if len(one[1]) <= len(headings[first][1]))
    return text[headings[first].start() : next(later, len(text))]


def numbers(text: str) -> Iterator[str]:
    """The numbers, without the zero before a point and those at the end behind one."""
    for found in NUMBER.findall(text):
        whole, point, part = found.partition(".")
        part = part.rstrip("0")
        yield f"{whole.removeprefix('0')}.{part}" if point and part else whole


def test_rows_name_their_sections() -> None:
    assert len(rows()) > 10


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[0])
def test_figures_stand_in_the_section_that_is_named(row: list[str]) -> None:
    """The pipeline's 8 clients had .92 and 1.05 in the overview, and .95 and 1.06 on the page."""
    page, anchor = re.findall(r"\]\(([a-z-]+\.md)#?([\w-]*)\)", row[3])[0]
    known = set(numbers(section(page, anchor)))
    assert [number for number in numbers(NO_FIGURE.sub("", row[1])) if number not in known] == []
