"""The page of the whole server in a real browser: what stands at its head, and the models that answer no requests."""

from collections.abc import Iterator
from typing import Any

import pytest
import tritonclient.http as triton_http

from gangway.zoo import write_model
from tests.helpers.browser import CHROMIUM, Browser, browser
from tests.helpers.ensemble_configs import config_of, write
from tests.helpers.served import Served, serving

pytestmark = [pytest.mark.long, pytest.mark.skipif(not CHROMIUM.exists(), reason="Chromium is not installed")]

WIDTHS = (1200, 390)
FAILED = ("<b>evil", "broken", "long_" * 16, "no_versions")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    repository = tmp_path_factory.mktemp("models")
    write_model(repository, "simple")
    for name in FAILED[:3]:
        missing = "missing_" * 5
        write(repository, name, config_of("x:FP32:4", "y:FP32:4", [(missing, "x=x", "y=y")]))
    (repository / "no_versions").mkdir()
    more = "--strict-readiness=false"
    with serving(repository, "--model-control-mode=explicit", "--load-model=*", "--max-shapes=0", more) as found:
        yield found


@pytest.mark.parametrize("width", WIDTHS)
def test_each_model_that_answers_no_requests_has_a_row_with_its_reason(
    page: Browser, served: Served, width: int
) -> None:
    page.look(width, "light")
    page.open(f"http://{served.server.http_url}/")
    page.until("document.querySelectorAll('#unavailable tr').length === 4")
    cells = "[...document.querySelectorAll('#unavailable tr')].map(row => [...row.cells].map(cell => cell.textContent))"
    with triton_http.InferenceServerClient(served.server.http_url) as client:
        index = client.get_model_repository_index()
    entries = [each for each in index if each["name"] in FAILED]
    expected = [[each["name"], each.get("version", ""), "unavailable", each["reason"]] for each in entries]
    assert sorted(page.value(cells)) == sorted(expected)
    colour = "getComputedStyle(document.querySelector('#unavailable td:{}')).color"
    bad = "(() => { const e = document.createElement('i'); e.className = 'late'; document.body.append(e);"
    bad += " const found = getComputedStyle(e).color; e.remove(); return found; })()"
    assert page.value(colour.format("last-child")) == page.value(bad)
    assert page.value("document.documentElement.scrollWidth") <= width


def head(page: Browser, state: dict[str, Any]) -> str:
    changed = ", ".join(f"{key}: {value}" for key, value in state.items())
    return str(page.value(f"show({{...latest, {changed}}}), $('summary').textContent"))


def test_what_is_queued_is_part_of_what_is_in_flight(page: Browser, served: Served) -> None:
    page.open(f"http://{served.server.http_url}/")
    page.until("latest !== null")
    assert head(page, {"requests_in_flight": 0, "queue": 0}).endswith("0 requests in flight")
    assert head(page, {"requests_in_flight": 3, "queue": 1}).endswith("3 requests in flight, 1 of them queued")
    assert head(page, {"requests_in_flight": 0, "queue": 1}).endswith("1 request in flight, 1 of them queued")
