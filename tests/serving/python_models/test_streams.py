"""Any number of responses over each protocol: errors among them, the last one, clients that go, many and large ones."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import Any

import grpc
import pytest

from testing.waiting import until
from tests.helpers.served import Served, serving
from tests.helpers.stream_models import (
    DECOUPLED,
    NOT_ONE,
    RELAY,
    SCRIPT,
    SCRIPTS,
    Response,
    Script,
    generated,
    streamed,
    text_request,
    write_text_model,
)

pytestmark = pytest.mark.long
EMPTY_FINAL = {"triton_enable_empty_final_response": True}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:

    repository = tmp_path_factory.mktemp("repository")
    write_text_model(repository, "script", SCRIPT, more=DECOUPLED)
    write_text_model(repository, "relay", RELAY)
    with serving(repository, cwd=repository.parent) as served:
        yield served


def matches(found: str, wanted: str) -> bool:
    """Whether a word is the wanted one; of an error that is raised only the end is known."""
    return found == wanted or (wanted.startswith("!ValueError") and found.startswith("!") and wanted[1:] in found)


def assert_words(found: list[str], wanted: Any) -> None:
    assert len(found) == len(wanted), found
    assert all(map(matches, found, wanted)), found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.text or "nothing")
@pytest.mark.parametrize("empty_final", [False, True], ids=["", "empty final response"])
def test_over_a_stream_of_grpc(served: Served, script: Script, empty_final: bool) -> None:
    parameters = EMPTY_FINAL if empty_final else {}
    found = streamed(served.server.url, text_request("script", script.text, **parameters))
    ends = [""] if empty_final and not script.is_marked else []
    assert_words([each.word for each in found], [*script.responses, *ends])
    last = len(found) - 1
    says_so = script.is_marked or empty_final
    assert [each.is_final for each in found] == [says_so and index == last for index in range(len(found))]


def test_the_errors_of_responses_say_whose_they_are(served: Served) -> None:
    from tests.helpers.raw_stream import RawStream

    with RawStream(served.server.url) as stream:
        stream.send(text_request("script", "!e", identity="7"))
        response = stream.receive().infer_response
    assert (response.id, response.model_name, response.outputs) == ("7", "script", [])


def test_requests_of_a_stream_do_not_end_by_the_errors_of_others(served: Served) -> None:
    requests = [text_request("script", text, identity=str(index)) for index, text in enumerate(("!e a", "b !f", "c"))]
    found = streamed(served.server.url, *requests)
    assert sorted(each.word for each in found) == ["!e", "!f", "a", "b", "c"]


def test_an_error_in_the_middle_ends_a_stream_that_wants_it(served: Served) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        streamed(served.server.url, text_request("script", "a !e b"), triton_grpc_error="true")
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, "e")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.text or "nothing")
def test_over_generate(served: Served, script: Script) -> None:
    answer = generated(served.server.http_url, "script", script.text, "generate")
    if len(script.responses) != 1:
        assert (answer.status, answer.content) == (400, {"error": NOT_ONE})
    elif script.responses[0].startswith("!"):
        assert answer.status == 500
        assert_words([f"!{answer.content['error']}"], script.responses)
    else:
        content = {"model_name": "script", "model_version": "1", "y": script.responses[0]}
        assert (answer.status, answer.content) == (200, content)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.text or "nothing")
@pytest.mark.parametrize("members", [{}, EMPTY_FINAL, {"parameters": EMPTY_FINAL}], ids=["", "member", "parameter"])
def test_over_generate_stream(served: Served, script: Script, members: Any) -> None:
    answer = generated(served.server.http_url, "script", script.text, **members)
    begins_ill = bool(script.responses) and script.responses[0].startswith("!")
    assert answer.status == (500 if begins_ill else 200)
    assert answer.is_stream == (not begins_ill or len(script.responses) > 1 or not script.is_marked)
    words = answer.words if answer.is_stream else [f"!{answer.content['error']}"]
    assert_words(words, script.responses)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.text or "nothing")
def test_over_another_model(served: Served, script: Script) -> None:
    (found,) = streamed(served.server.url, text_request("relay", f"script {script.text}"))
    wanted = " ".join(script.responses)
    if "ValueError" in wanted:
        assert found.word.startswith(wanted.partition("!")[0] + "!")
        assert found.word.endswith("ValueError: raised")
    else:
        assert found == Response(wanted, True)


@pytest.mark.parametrize("script", ["a *40000 b *2000000 c $d", "*2000000 a *40000 b"])
def test_large_responses_stay_in_their_order(served: Served, script: str) -> None:
    wanted = [f"{'x' * int(word[1:])}" if word.startswith("*") else word.lstrip("$") for word in script.split()]
    assert [each.word for each in streamed(served.server.url, text_request("script", script))] == wanted
    assert generated(served.server.http_url, "script", script).words == wanted
    (relayed,) = streamed(served.server.url, text_request("relay", f"script {script}"))
    assert relayed.word.split() == wanted


def test_thousands_of_events(served: Served) -> None:
    script = " ".join(map(str, range(3000)))
    assert generated(served.server.http_url, "script", script).words == script.split()


class EventConnection:
    """A connection whose bytes are looked at as they come."""

    def __init__(self, http_url: str) -> None:
        host, _, port = http_url.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), 20)

    def ask(self, text: str, version: str = "1.1") -> None:
        body = json.dumps({"x": text}).encode()
        head = (
            f"POST /v2/models/script/generate_stream HTTP/{version}\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        self.socket.sendall(head.encode() + body)

    def until(self, end: bytes) -> bytes:
        found = b""
        while not found.endswith(end):
            part = self.socket.recv(1 << 16)
            assert part, found
            found += part
        return found


@pytest.fixture
def events(served: Served) -> Iterator[EventConnection]:
    connection = EventConnection(served.server.http_url)
    yield connection
    connection.socket.close()


def test_events_come_while_the_model_goes_on(events: EventConnection) -> None:
    events.ask("a ~1 b")
    begun = time.monotonic()
    assert b'"y":"a"' in events.until(b"\n\n\r\n")
    assert time.monotonic() - begun < 0.9
    assert b'"y":"b"' in events.until(b"0\r\n\r\n")


def test_a_connection_is_kept_after_a_stream(served: Served) -> None:
    with closing(HTTPConnection(served.server.http_url, timeout=20)) as connection:
        for path, status in (("generate_stream", 200), ("generate_stream", 200), ("generate", 400)):
            connection.request("POST", f"/v2/models/script/{path}", json.dumps({"x": "a b"}))
            own = connection.sock
            response = connection.getresponse()
            response.read()
            assert (response.status, connection.sock) == (status, own)


def test_http_1_0_has_no_chunks(events: EventConnection) -> None:
    events.ask("a b", "1.0")
    head, _, body = b"".join(iter(lambda: events.socket.recv(1 << 16), b"")).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert b"chunked" not in head
    assert body.count(b"data: ") == body.count(b"\n\n") == 2


@pytest.mark.parametrize("leaves", ["at once", "after it has closed its sending side"])
def test_a_client_that_goes_cancels_the_request(served: Served, events: EventConnection, leaves: str) -> None:
    noticed = served.log().count("noticed that it is cancelled")
    events.ask("a " + "~0.05 " * 100)
    events.until(b"\n\n\r\n")
    if leaves != "at once":
        events.socket.shutdown(socket.SHUT_WR)
        time.sleep(0.1)
    events.socket.close()
    until(lambda: served.log().count("noticed that it is cancelled") > noticed)
    until(lambda: served.server.busy_slots() == 0)


def test_a_client_that_only_closes_its_sending_side_gets_all(events: EventConnection) -> None:
    events.ask("a ~1.2 b")
    events.socket.shutdown(socket.SHUT_WR)
    answer = b"".join(iter(lambda: events.socket.recv(1 << 16), b""))
    assert answer.count(b"data: ") == 2
    assert answer.endswith(b"0\r\n\r\n")


def test_generate_cancels_what_is_left_after_a_second_response(served: Served) -> None:
    noticed = served.log().count("noticed that it is cancelled")
    answer = generated(served.server.http_url, "script", "a b " + "~0.05 " * 100, "generate")
    assert answer.content == {"error": NOT_ONE}
    until(lambda: served.log().count("noticed that it is cancelled") > noticed)


def test_each_request_counts_once(served: Served) -> None:
    before = served.client.get_inference_statistics("script").model_stats[0].inference_stats
    generated(served.server.http_url, "script", "a !e b")
    generated(served.server.http_url, "script", "a raise")

    def counted() -> tuple[int, int]:
        after = served.client.get_inference_statistics("script").model_stats[0].inference_stats
        return after.success.count - before.success.count, after.fail.count - before.fail.count

    until(lambda: counted() == (1, 1))
