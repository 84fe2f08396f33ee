"""Files of today's exporters, without their weights: each is served as `benchmarks/exported/expected.json` says."""

from pathlib import Path

import pytest

from benchmarks.exported.graphs import ARCHIVES, names_in, unpack
from benchmarks.exported.outcomes import changes, check, outcome, read_expected

PARTS = 10  # of each archive: one in every run of the suite, the others in the long one
REMEDY = "a gain is entered by `python -m benchmarks.exported.outcomes --update`"


@pytest.mark.parametrize("part", [pytest.param(part, marks=[pytest.mark.long] * bool(part)) for part in range(PARTS)])
@pytest.mark.parametrize("archive", sorted(path.name for path in ARCHIVES.glob("*.tar.xz")))
def test_outcomes(archive: str, part: int, tmp_path: Path) -> None:
    files = unpack(ARCHIVES / archive, tmp_path, slice(part, None, PARTS))
    found = {file.name: outcome(check(file)) for file in files}
    expected = {name: said for name, said in read_expected().items() if name in found}
    assert not changes(found, expected), REMEDY


def test_nothing_else_is_expected() -> None:
    names = {name for path in ARCHIVES.glob("*.tar.xz") for name in names_in(path)}
    assert names == read_expected().keys(), REMEDY
