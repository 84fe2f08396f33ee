"""Python models answer as Triton did when `python -m benchmarks.differential --record` kept its answers."""

import tempfile
from collections.abc import Sequence

import pytest

from benchmarks.differential.asked import Case
from benchmarks.differential.compare import ABSENT, Difference, differences, unknown, unused
from benchmarks.differential.kinds.all import all_cases, all_models, models_of
from benchmarks.differential.known.all import KNOWN
from benchmarks.differential.recorded import FILE, read
from benchmarks.differential.servers import answers, gangway

# Models that one server has, so that it starts in some seconds. `make bench` has all of them.
FIRST = {
    *("adds", "gives", "lengths", "raises", "responds", "sees", "streams", "sums", "tokens", "types"),
    *("chain", "chain_raises", "chain_streams", "token_chain"),
}
OTHERS = {
    *("adds", "ends", "habits_returns", "has_operations", "has_platform", "joins", "other", "pub_after", "pub_labels"),
    *("pub_llm", "raises", "sees", "streams", "sums", "chain_other", "chain_sees"),
}
MAX_FILE_BYTES = 100_000


def cases_of(models: set[str]) -> Sequence[Case]:
    """Those that ask these models only."""
    needed = ((case, {model.name for model in models_of([case])}) for case in all_cases())
    return [case for case, names in needed if names and names <= models]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("models", [FIRST, pytest.param(OTHERS, marks=pytest.mark.long)], ids=["first", "others"])
def test_answers_differ_only_as_is_known(models: set[str]) -> None:
    cases, triton = cases_of(models), read()
    with (
        tempfile.TemporaryDirectory() as cache,
        gangway([model for model in all_models() if model.name in models], [f"--cache-dir={cache}"]) as addresses,
    ):
        found = answers(addresses, cases)
    new = unknown([each for case in cases for each in differences(case.name, triton[case.name], found[case.name])])
    assert not new, "\n".join(f"{each.case}: {each.text}" for each in new)


def test_triton_has_been_asked_all_cases() -> None:
    assert list(read()) == [case.name for case in all_cases()], "python -m benchmarks.differential --record"
    assert FILE.stat().st_size < MAX_FILE_BYTES
    assert min(len(cases_of(models)) for models in (FIRST, OTHERS)) > 500


def test_an_unexpected_answer_is_a_difference() -> None:
    right = {"model_name": "m", "outputs": [{"name": "y", "data": [1]}, {"name": "z", "data": [2]}]}
    wrong = {"model_name": "m", "outputs": [{"name": "y", "data": [1]}, {"name": "z", "data": [3]}]}
    failed = {"code": "INTERNAL", "message": "no"}
    assert differences("a", [right], [right]) == []
    assert differences("a", [right], [wrong]) == [Difference("a", "0.outputs.z.data", "[2]", "[3]")]
    assert differences("a", [failed], [right]) == [Difference("a", "0 outcome", "INTERNAL 'no'", repr(right))]
    assert differences("a", [{"seen": 1, "after_ms": [1]}], [{"seen": 1, "after_ms": [2]}]) == []
    assert differences("a", [[]], [[right]]) == [Difference("a", "0.0", repr(ABSENT), repr(right))]


def test_what_does_not_differ_any_more_is_noticed() -> None:
    assert unused([]) == list(KNOWN)
    content_type = Difference("raise: lines, json", "0.content-type", "'text/plain'", "'application/json'")
    assert unknown([content_type]) == []
    assert len(unused([content_type])) == len(KNOWN) - 1
    assert unknown([Difference("types: FP32, grpc", "0.outputs.y.data", "[1]", "[2]")])
