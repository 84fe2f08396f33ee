"""Engines part as `docs/reference/differences.md` says: each row's model is asked again."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.conformance.runner import CaseRunner
from benchmarks.differences.__main__ import agrees, ask
from benchmarks.differences.rows import DIFFERENCES, GANGWAY, ORT, REFERENCE, TVM, Difference
from benchmarks.differential.known.all import KNOWN

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CaseRunner]:
    with CaseRunner(tmp_path_factory.mktemp("differences"), min(os.sched_getaffinity(0))) as runner:
        yield runner


ROWS = [pytest.param(row, id=row.what, marks=[pytest.mark.long] * bool(i % 3)) for i, row in enumerate(DIFFERENCES)]


@pytest.mark.parametrize("row", ROWS)
def test_answers_are_those_of_the_table(row: Difference, runner: CaseRunner) -> None:
    found = {engine: ask(engine, row, runner) for engine in (ORT, REFERENCE, GANGWAY) if engine in row.answers}
    assert GANGWAY in found
    assert {engine: answer for engine, answer in found.items() if not agrees(answer, row.answers[engine])} == {}


@pytest.mark.long
@pytest.mark.parametrize("row", [row for row in DIFFERENCES if TVM in row.answers], ids=lambda row: row.what)
def test_tvm_answers_as_the_table_says(row: Difference) -> None:
    answer = ask(TVM, row)
    assert agrees(answer, row.answers[TVM]), answer


def test_engines_part_in_each_row() -> None:
    for row in DIFFERENCES:
        answers = list(row.answers.values())
        assert not all(agrees(answers[0], other) for other in answers), row.what


def test_what_shows_a_row_exists() -> None:
    shown_by = [row.shown_by for row in DIFFERENCES] + [known.surprises for known in KNOWN]
    paths = {path for path in shown_by if path}
    assert len(paths) > 4
    assert not {path for path in paths if not (ROOT / path).exists()}
