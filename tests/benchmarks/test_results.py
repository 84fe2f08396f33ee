"""Tables of results: what a run enters, and that each stands on a page."""

from pathlib import Path

from docs.generate import BEGIN, DOCS
from testing import results
from testing.report import Report

SUITES = sorted((results.ROOT / "benchmarks").glob(f"*/{results.NAME}"))


def test_a_run_enters_its_tables_and_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / results.NAME
    for title, share in (("one", 0.123456), ("two", 1.0), ("one", 0.5)):
        report = Report("title", {"cpu": "a processor"}, "python -m benchmarks.some")
        report.table(title, [{"case": "x", "share": share}])
        report.target("a bound, which is no table of the page", share, 2)
        assert report.finish(path) == 0
    found = results.read(path)
    assert {title: table.rows for title, table in found.items()} == {"one": [["x", "0.500"]], "two": [["x", "1.00"]]}
    made, _, *table = found["one"].markdown()
    assert made.startswith("`python -m benchmarks.some`, a processor, 20")
    assert table == ["|case|share|", "|---|---|", "|x|0.500|"]


def test_each_table_stands_on_a_page_and_fits() -> None:
    pages = "".join(page.read_text() for page in DOCS.rglob("*.md"))
    assert len(SUITES) > 8
    for path in SUITES:
        for title, table in results.read(path).items():
            assert BEGIN.format(name=f"{path.parent.name}: {title}") in pages, title
            assert {len(row) for row in table.rows} == {len(table.columns)}, title
