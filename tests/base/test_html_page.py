"""One page of what a command printed: complete, and nothing in it is markup that a user has named."""

import base64
import re
from pathlib import Path

import pytest

from gangway.base.console import Console, Table
from gangway.base.html_page import write_html

PICTURE = b"\x89PNG of some bytes"


def test_a_page_has_text_pictures_command_and_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["gangway", "perf", "--mix", "a b=1"])
    console = Console(record=True, width=80)
    table = Table("model", "p50")
    table.add_row("<script>alert(1)</script>", "1.5")
    console.print(table)
    write_html(
        tmp_path / "new" / "page.html", "gangway perf: <mix>", console, {"shares & rates": PICTURE}, ["times <1 us"]
    )
    page = (tmp_path / "new" / "page.html").read_text()
    assert "<script" not in page and "&lt;script&gt;" in page and "&lt;mix&gt;" in page
    assert "<strong>warning:</strong> times &lt;1 us" in page
    assert "gangway perf --mix &#x27;a b=1&#x27;" in page
    assert re.search(r"<dt>machine</dt><dd>.+, \d+ cores</dd>", page)
    (source,) = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert base64.b64decode(source) == PICTURE
    assert not re.search(r'(src|href)="(?!data:)', page), "it needs nothing but itself"
