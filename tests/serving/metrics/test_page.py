"""The page: it asks nobody but its server, has what its script looks for, and its script reads what a state has."""

import re
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from testing.live_server import LiveServer
from tests.helpers.http_requests import ask_http
from tests.helpers.steady_calls import simple_inputs


class Page(HTMLParser):
    """Elements and script of the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.script = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] == "script":
            self.script += data

    def policy(self) -> dict[str, list[str]]:
        (text,) = [
            attrs["content"] for tag, attrs in self.elements if attrs.get("http-equiv") == "Content-Security-Policy"
        ]
        assert text
        rules = [rule.split() for rule in text.split(";")]
        return {name: sources for name, *sources in rules}


@pytest.fixture(scope="module")
def page(gangway_server: LiveServer) -> Page:
    answer = ask_http(gangway_server.http_url, "GET", "/")
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.body.startswith(b"<!DOCTYPE html>")
    return Page(answer.body.decode())


@pytest.fixture(scope="module")
def state(gangway_server: LiveServer) -> Any:
    with triton.InferenceServerClient(gangway_server.url) as client:
        client.infer("simple", simple_inputs())
    return ask_http(gangway_server.http_url, "GET", "/v2/gangway/state").content


def test_nothing_comes_from_elsewhere(page: Page) -> None:
    addresses = [attrs[name] for _, attrs in page.elements for name in ("src", "href", "action") if name in attrs]
    assert [address for address in addresses if ":" in address or address.startswith("/")] == ["data:,"]
    assert page.policy()["default-src"] == ["'none'"]
    assert page.policy()["connect-src"] == ["'self'"]
    assert not re.search(r"https?:|//[a-z]+\.|url\(|@import", page.script + str(page.elements))


def test_what_users_have_named_is_never_markup(page: Page) -> None:
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval|new Function", page.script)


def test_the_script_finds_its_elements(page: Page) -> None:
    wanted = set(re.findall(r'\$\("(\w+)"\)', page.script))
    there = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(there) == len(set(there))
    assert {"models", "lanes", "jobs", "detail"} <= wanted <= set(there)
    assert re.search(r'fetch\("v2/gangway/events"', page.script)


def test_the_script_reads_what_there_is(page: Page, state: Any) -> None:
    named = {
        "state": state,
        "timeline": state["timeline"],
        "core": state["cores"][0],
        "model": state["models"][0],
    }
    for name, content in named.items():
        read = set(re.findall(rf"(?<!\.)\b{name}\.(\w+)", page.script))
        assert read, name
        assert read <= content.keys(), name


def test_gangs_and_decisions_have_what_the_script_reads(page: Page, gangway_server: LiveServer) -> None:
    tensor = triton.InferInput("input", [1, 3, 224, 224], "FP32")
    tensor.set_data_from_numpy(np.zeros((1, 3, 224, 224), np.float32))
    gangs: list[Any] = []
    decisions: list[Any] = []
    with triton.InferenceServerClient(gangway_server.url) as client:
        for _ in range(50):
            calls = [client.async_infer("resnet50", [tensor], callback=lambda *_: None) for _ in range(20)]
            found = ask_http(gangway_server.http_url, "GET", "/v2/gangway/state").content
            for call in calls:
                call.cancel()
            gangs = [core["gang"] for core in found["cores"] if core["gang"]]
            decisions = found["decisions"]
            if gangs and decisions:
                break
    read = set(re.findall(r"\bgang\.(\w+)", page.script))
    assert read
    assert read <= gangs[0].keys()
    read = set(re.findall(r"\bdecision\.(\w+)", page.script))
    assert read
    assert read <= decisions[0].keys()
