"""What both protocols answer is what they answered when the corpus was recorded (`python -m tests.wire.record`)."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.waiting import until
from tests.wire.corpus import PROTOCOLS, Case, difference, load, path_of
from tests.wire.differences import DELIBERATE
from tests.wire.served import FLAGS, Played, playing, write_repository

MAX_FILE_BYTES = 500_000


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_repository(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", params=FLAGS)
def played(request: pytest.FixtureRequest, repository: Path, model_cache: Path) -> Iterator[Played]:
    with playing(repository, request.param, model_cache) as running:
        pids = running.server.pids()
        yield running
        assert running.server.pids() == pids, "no process has been replaced"
        until(lambda: running.server.busy_slots() == 0)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_answers_are_as_recorded(played: Played, request: pytest.FixtureRequest, protocol: str) -> None:
    server = request.node.callspec.params["played"]
    found = {case.name: _difference(played, protocol, case) for case in load(protocol) if case.server == server}
    wrong = {name: text for name, text in found.items() if text}
    deliberate = {name for kind, place, name in DELIBERATE if (kind, place) == (protocol, server)}
    assert not (wrong.keys() - deliberate), "\n".join(text for name, text in wrong.items() if name not in deliberate)
    assert not (deliberate - wrong.keys()), "these are as recorded"


def _difference(played: Played, protocol: str, case: Case) -> str:
    return difference(case, played.answer(protocol, case))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_corpus_is_small_and_names_are_clear(protocol: str) -> None:
    assert path_of(protocol).stat().st_size < MAX_FILE_BYTES
    names = [(case.server, case.name) for case in load(protocol)]
    assert len(set(names)) == len(names) > 200


def test_what_differs_deliberately_is_a_case() -> None:
    cases = {(protocol, case.server, case.name) for protocol in PROTOCOLS for case in load(protocol)}
    assert DELIBERATE.keys() <= cases
    assert all(DELIBERATE.values()), "each has a reason"
