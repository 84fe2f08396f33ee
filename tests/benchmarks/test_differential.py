"""Models of one operator against onnxruntime: a minute of them, their names, and what happens if one ends a process."""

import os
from itertools import islice

import numpy as np
import pytest

from benchmarks.conformance.docs import differences
from benchmarks.fuzz.differential import run as differential_run
from benchmarks.fuzz.differential.__main__ import collect
from benchmarks.fuzz.differential.cases import Case, cases_of, draw
from benchmarks.fuzz.differential.judge import LEFT_OUT, Verdict
from benchmarks.fuzz.differential.known import reason_of
from benchmarks.fuzz.differential.run import CRASHED, run
from tests.benchmarks.test_conformance import PAGE

SLICE_S = 60
SEED = 47


@pytest.mark.long
def test_a_minute_of_cases_differs_nowhere() -> None:
    verdicts = collect(SEED, 0, SLICE_S, "", 1)
    assert {v.case.name: v.difference for v in verdicts if v.difference and not reason_of(v)} == {}
    assert sum(verdict.how != LEFT_OUT for verdict in verdicts) > 50


def test_a_name_draws_the_same_model() -> None:
    for case in islice(cases_of(3, "Clip,Resize,MatMulNBits,If"), 24):
        one, other = draw(case), draw(Case.named(case.name))
        assert one.model() == other.model()
        for name, value in one.inputs.items():
            np.testing.assert_array_equal(value, other.inputs[name])


def test_a_crash_is_the_failure_of_one_case(monkeypatch: pytest.MonkeyPatch) -> None:
    def judged(case: Case, *_: object) -> Verdict:
        return os._exit(3) if case.number == 1 else Verdict(case, "native")

    monkeypatch.setattr(differential_run, "judge", judged)
    cases = [Case(1, "", "Abs", 13, number) for number in range(3)]
    verdicts: list[Verdict] = []
    run(iter(cases), 1, verdicts.append)
    assert [verdict.how for verdict in verdicts] == ["native", CRASHED, "native"]
    assert "ended with 3" in verdicts[1].difference


def test_the_page_lists_the_differences() -> None:
    assert differences() in PAGE.read_text()
