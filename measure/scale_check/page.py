"""The page of a check: for each section its conclusions, table and picture, and what a bad figure means."""

import html
import io
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from gangway.base.html_page import figure, write_page
from gangway.measure.scale_check.section import Chart, Row, Section, cell_text

DPI: Final = 110
TITLE: Final = "gangway scale-check"
_CLASSES: Final = {True: "good", False: "bad", None: ""}


def write_check(path: Path, sections: Sequence[Section], warnings: Sequence[str]) -> None:
    """Write the page, pictures included. Raises OSError."""
    bad = [(section.title, finding) for section in sections for finding in section.findings if finding.good is False]
    lines = [f"<li>{html.escape(title)}: {_words(finding.text)}</li>" for title, finding in bad]
    summary = f"<ul>{''.join(lines)}</ul>" if bad else "<p class=good>nothing stands out</p>"
    parts = [f"<h2>What to look at</h2>{summary}", *map(_section, sections)]
    write_page(path, TITLE, "\n".join(parts), warnings)


def _section(section: Section) -> str:
    findings = "".join(
        f'<li class="{_CLASSES[finding.good]}">{_words(str(finding))}</li>' for finding in section.findings
    )
    chart = section.chart
    picture = figure(f"{section.title}: {chart.y} by {chart.x}", draw(chart)) if chart else ""
    return (
        f"<h2 id={section.name}>{html.escape(section.title)}</h2>\n<ul>{findings}</ul>\n"
        f"{_table(section.rows)}\n{picture}\n"
        f"<dl><dt>a bad figure</dt><dd>{_words(section.meaning)}</dd>"
        f"<dt>what to do</dt><dd>{_words(section.action)}</dd></dl>"
    )


def _words(text: str) -> str:
    """Return text as HTML, with what stands between backquotes as code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(text))


def _table(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    headings = "".join(f"<th>{html.escape(column)}</th>" for column in rows[0])
    return f"<table><tr>{headings}</tr>{''.join(_lines(rows))}</table>"


def _lines(rows: Sequence[Row]) -> Iterator[str]:
    for row in rows:
        cells = (
            f"<td>{html.escape(value)}</td>" if isinstance(value, str) else f"<td class=number>{cell_text(value)}</td>"
            for value in row.values()
        )
        yield f"<tr>{''.join(cells)}</tr>"


def draw(chart: Chart) -> bytes:
    """Return a picture as PNG. What is predicted is a dashed line in the colour of what was measured before it."""
    drawn = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes: Any = drawn.subplots()
    number = -1
    for curve in chart.curves:
        number += not curve.predicted
        x, y = zip(*curve.points, strict=True) if curve.points else ((), ())
        axes.plot(x, y, "--" if curve.predicted else "o-", color=f"C{max(number, 0)}", label=curve.label)
    axes.set(xlabel=chart.x, ylabel=chart.y, ylim=(0, None))
    if all(x.is_integer() for curve in chart.curves for x, _ in curve.points):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    file = io.BytesIO()
    drawn.savefig(file, dpi=DPI, format="png")
    return file.getvalue()
