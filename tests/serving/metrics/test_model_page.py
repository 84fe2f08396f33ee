"""The page of a model in a real browser: what it shows, what its form sends, and how answers and errors are shown."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
import pytest
from PIL import Image

from gangway.clients.inputs import Normalisation, TensorMetadata, image_tensor
from testing.live_server import LiveServer
from tests.helpers.browser import CHROMIUM, Browser, browser
from tests.helpers.http_requests import ask_http
from tests.helpers.python_models import config_of, write
from tests.helpers.served import Served, serving
from tests.helpers.text_models import TextModel

pytestmark = [pytest.mark.long, pytest.mark.skipif(not CHROMIUM.exists(), reason="Chromium is not installed")]

EVIL = 'up<b>&"er'
ANSWER = """
    def execute(self, requests):
        return [self.answer(request) for request in requests]
"""
PIXELS = """
input { name: "pixels" data_type: TYPE_FP32 dims: [3, -1, -1] }
input { name: "more" data_type: TYPE_INT64 dims: [1] optional: true }
output { name: "scores" data_type: TYPE_FP32 dims: [3] label_filename: "labels.txt" }
output { name: "sum" data_type: TYPE_FP64 dims: [1] }
output { name: "more_too" data_type: TYPE_INT64 dims: [1] }
"""
MODELS = {
    EVIL: (
        config_of("<i>text:STRING:1", "OUT:STRING:1", batch=4),
        ANSWER
        + """
    def answer(self, request):
        text = pb_utils.get_input_tensor_by_name(request, "<i>text").as_numpy()
        if text[0, 0] == b"fail":
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("<b>no</b>"))
        marked = [b"<script>document.title='bad'</script>" + each.upper() for each in text.ravel()]
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", np.array(marked, object).reshape(text.shape))])
""",
    ),
    "repeat": (
        config_of("text:STRING:1 count:INT32:1", "OUT:STRING:1", more="model_transaction_policy { decoupled: true }"),
        """
    def execute(self, requests):
        for request in requests:
            text, count = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("text", "count"))
            sender = request.get_response_sender()
            for _ in range(count[0]):
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("OUT", text)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
""",
    ),
    "sums": (
        config_of("x:INT32:1", "y:INT32:1", more="sequence_batching { max_sequence_idle_microseconds: 5000000 }"),
        ANSWER
        + """
    def answer(self, request):
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", request.inputs()[0].as_numpy())])
""",
    ),
    "halves": (
        config_of("x:FP16:3 b:BF16:2", "y:FP16:3 c:BF16:2"),
        ANSWER
        + """
    def answer(self, request):
        x, b = (pb_utils.get_input_tensor_by_name(request, name) for name in ("x", "b"))
        passed = pb_utils.Tensor.from_dlpack("c", b.to_dlpack())
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x.as_numpy() * 2), passed])
""",
    ),
    "classes": (
        config_of("", "", 4, PIXELS),
        ANSWER
        + """
    def answer(self, request):
        pixels = pb_utils.get_input_tensor_by_name(request, "pixels").as_numpy()
        more = pb_utils.get_input_tensor_by_name(request, "more")
        more = np.full((len(pixels), 1), 7) if more is None else more.as_numpy()
        weighted = (pixels * np.arange(1, pixels.size + 1).reshape(pixels.shape) / pixels.size).sum(dtype=float)
        return pb_utils.InferenceResponse([
            pb_utils.Tensor("scores", np.array([[1, 3, 2]] * len(pixels), np.float32)),
            pb_utils.Tensor("sum", np.full((len(pixels), 1), weighted)), pb_utils.Tensor("more_too", more)])
""",
    ),
}


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def encoder(repository: Path) -> TextModel:
    return TextModel(repository, "encoder", scores=False)


@pytest.fixture(scope="module")
def scorer(repository: Path) -> TextModel:
    return TextModel(repository, "scorer", scores=True)


@pytest.fixture(scope="module")
def served(repository: Path, encoder: TextModel, scorer: TextModel) -> Iterator[Served]:
    for name, (config, code) in MODELS.items():
        write(repository, name, code, config)
    (repository / "classes" / "labels.txt").write_text("cat\na <b>dog</b>\nbird: small\n")
    with serving(repository, "--model-control-mode=explicit", "--load-model=*", "--max-shapes=0") as found:
        yield found


@pytest.fixture
def page(chromium: Browser) -> Iterator[Browser]:
    """The browser, which has nothing to complain of when the test is over, and has asked nobody but the server."""
    chromium.faults.clear()
    chromium.asked.clear()
    yield chromium
    assert chromium.faults == []
    assert len({urlsplit(address).netloc for address in chromium.asked if address.startswith("http")}) == 1


def visit(page: Browser, server: LiveServer, model: str) -> None:
    page.open("about:blank")
    page.open(f"http://{server.http_url}/models/{quote(model, safe='')}")
    page.until(f"location.protocol === 'http:' && content.name === {json.dumps(model)}")


def send(page: Browser) -> str:
    """What the page shows for an answer."""
    page.value("$('send').click()")
    return str(page.until("!$('send').disabled && $('answer').textContent"))


def rows(page: Browser, place: str = "answer") -> dict[str, str]:
    """The last cell of each row of the answer, by the first."""
    cells = f"[...document.querySelectorAll('#{place} tr')].map(row => [...row.children].map(cell => cell.textContent))"
    return {first: last for first, *_, last in page.value(cells)}


def fill(page: Browser, place: int, what: str, value: str) -> None:
    """Write into a control of an input."""
    control = f"fields[{place}].{what}"
    changed = "new Event('input', {bubbles: true})"
    page.value(f"{control}.value = {json.dumps(value)}; {control}.dispatchEvent({changed})")


def test_it_sends_what_it_shows(page: Browser, gangway_server: LiveServer) -> None:
    visit(page, gangway_server, "simple")
    assert page.value("$('summary').textContent").startswith("version 1, batches of up to 8")
    fill(page, 0, "shape", "[2, 16]")
    assert "32 values" in page.value("fields[0].element.textContent")
    fill(page, 0, "values", str([[9] * 16, [-9] * 16]))
    fill(page, 1, "shape", "2x16")
    fill(page, 1, "values", "1 " * 32)
    send(page)
    assert rows(page)["OUTPUT0"] == ", ".join(["10"] * 16 + ["-8"] * 16)


def test_it_says_what_the_server_says(page: Browser, gangway_server: LiveServer) -> None:
    visit(page, gangway_server, "simple")
    fill(page, 0, "values", "1, 2, 3")
    shown = send(page)
    page.faults.clear()  # the browser notes the status itself
    body = {"inputs": [{"name": "INPUT0", "datatype": "INT32", "shape": [1, 16], "data": [1, 2, 3]}]}
    answer = ask_http(gangway_server.http_url, "POST", "/v2/models/simple/infer", body)
    assert shown == f"{answer.status}: {answer.content['error']}"


@pytest.mark.parametrize(
    ("model", "values", "said"),
    [
        (EVIL, {0: 'it\'s $5 "x" é'}, "S $5"),
        ("repeat", {0: "x'y", 1: "2"}, '"OUT":"x\'y"'),
        ("sums", {0: "41"}, "41"),
        ("halves", {0: "0.5 -2 8"}, "16."),
        ("classes", {}, "7"),
    ],
)
def test_snippets_send_what_the_form_has(
    page: Browser, served: Served, model: str, values: dict[int, str], said: str
) -> None:
    visit(page, served.server, model)
    for place, text in values.items():
        fill(page, place, "values", text)
    curl, python = (page.value(f"$('{kind}')?.textContent") for kind in ("curl", "python"))
    assert bool(curl) == (model not in ("halves", "classes"))  # no JSON, or too many values
    if curl:
        assert said in printed_by(["bash", "-c", curl])
    assert said in printed_by([sys.executable, "-c", python])


@pytest.mark.parametrize(
    ("place", "what", "text", "told"),
    [
        (1, "values", f"{'1 ' * 15}x", 'INPUT1: value 16 is "x", and INT32 is a whole number from -2147483648'),
        (0, "values", f"1.5{' 1' * 15}", 'INPUT0: value 1 is "1.5", and INT32 is a whole number'),
        (0, "values", f"2147483648{' 1' * 15}", 'INPUT0: value 1 is "2147483648", and INT32 is a whole number'),
        (0, "shape", "one, 16", 'INPUT0: its shape has "one"'),
        (None, "parameters", "[1]", "parameters: expected a JSON object"),
    ],
)
def test_a_bad_value_is_named_before_anything_is_sent(
    page: Browser, gangway_server: LiveServer, place: int | None, what: str, text: str, told: str
) -> None:
    visit(page, gangway_server, "simple")
    if place is None:
        page.value(f"$('{what}').value = {json.dumps(text)}; $('{what}').dispatchEvent(new Event('input'))")
    else:
        fill(page, place, what, text)
    assert send(page).startswith(told)
    assert told in page.value("$('snippets').textContent") or place is None
    assert not [address for address in page.asked if address.endswith("/infer")]


def test_a_text_is_embedded(page: Browser, served: Served, encoder: TextModel) -> None:
    visit(page, served.server, "encoder")
    text = "the cat's dog"
    page.value(f"$('text').value = {json.dumps(text)}; $('text').dispatchEvent(new Event('input', {{bubbles: true}}))")
    page.value("$('send_text').click()")
    page.until("!$('send_text').disabled && $('text_answer').textContent")
    shown = rows(page, "text_answer")
    vector = encoder.vector(text)
    assert (shown["dimension"], shown["tokens"]) == (str(len(vector)), str(len(encoder.states(text))))
    first = [float(value) for value in shown["first values"].partition(", and")[0].split(", ")]
    assert first == pytest.approx(vector[: len(first)], abs=1e-3)
    assert "answered after" in page.value("$('texts').textContent")
    curl, python = (page.value(f"$('text_{kind}').textContent") for kind in ("curl", "python"))
    embedded = json.loads(printed_by(["bash", "-c", curl]))["data"][0]["embedding"]
    assert embedded == pytest.approx(vector, abs=1e-5)
    assert printed_by([sys.executable, "-c", python]).startswith(f"{len(vector)} [{embedded[0]:.3f}"[:-1])
    page.value("$('text').value = ''; $('send_text').click()")
    page.until("$('text_answer').textContent.includes(\"400: 'input' has an empty text\")")
    page.faults.clear()


def test_documents_are_reranked(page: Browser, served: Served, scorer: TextModel) -> None:
    visit(page, served.server, "scorer")
    documents = ["cats", "the dog runs 42 times", "a"]
    page.value(f"$('query').value = 'the cat'; $('documents').value = {json.dumps(chr(10).join(documents))}")
    page.value("$('query').dispatchEvent(new Event('input', {bubbles: true})); $('send_text').click()")
    page.until("!$('send_text').disabled && $('text_answer').textContent")
    scores = {each: scorer.score("the cat", each) for each in documents}
    best = sorted(documents, key=lambda each: -scores[each])
    found = {document: float(score) for score, document in rows(page, "text_answer").items() if score != "score"}
    assert list(found) == best
    assert found == pytest.approx(scores, abs=1e-3)
    for command in (["bash", "-c"], [sys.executable, "-c"]):
        kind = "curl" if command[0] == "bash" else "python"
        assert best[0] in printed_by([*command, page.value(f"$('text_{kind}').textContent")])


def test_an_unknown_model_is_404_with_those_that_there_are(page: Browser, gangway_server: LiveServer) -> None:
    assert ask_http(gangway_server.http_url, "GET", "/models/nobody").status == 404
    page.open("about:blank")
    page.open(f"http://{gangway_server.http_url}/models/nobody")
    page.until("location.protocol === 'http:' && $('names')?.textContent.includes('simple')")
    page.faults.clear()  # the browser notes the status itself
    page.value("[...document.querySelectorAll('#names a')].find(link => link.textContent === 'simple').click()")
    page.until("document.title === 'simple, Gangway' && content?.version")
    page.faults.clear()


def printed_by(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def test_all_pages_fit_a_telephone_and_have_both_schemes(page: Browser, gangway_server: LiveServer) -> None:
    for path, shown in (("models/simple", "content?.name"), ("", "latest && $('models').querySelector('a')?.href")):
        page.open("about:blank")
        page.open(f"http://{gangway_server.http_url}/{path}")
        page.until(f"location.protocol === 'http:' && document.readyState === 'complete' && {shown}")
        papers = []
        for scheme in ("light", "dark"):
            page.look(390, scheme)
            papers.append(page.value("getComputedStyle(document.body).backgroundColor"))
            assert page.value("document.scrollingElement.scrollWidth") <= 390
        assert len(set(papers)) == 2
    page.look(1100, "light")
    page.value("[...document.querySelectorAll('a')].find(link => link.href.endsWith('/models/mlp')).click()")
    page.until("document.title === 'mlp, Gangway' && content.version")


def test_what_users_have_written_is_text(page: Browser, served: Served) -> None:
    visit(page, served.server, EVIL)
    fill(page, 0, "values", "<i>hello</i>")
    send(page)
    assert rows(page)["OUT"] == "<script>document.title='bad'</script><I>HELLO</I>"
    fill(page, 0, "values", "fail")
    assert "<b>no</b>" in send(page)
    page.faults.clear()
    assert page.value("document.title") == f"{EVIL}, Gangway"
    assert page.value("document.querySelectorAll('b, i, main script').length") == 0


def test_a_restricted_route_is_said_and_may_be_unlocked(page: Browser, tmp_path: Path) -> None:
    write(tmp_path, "plain")
    with serving(tmp_path, "--http-restricted-api=inference:try-key=secret") as restricted:
        visit(page, restricted.server, "plain")
        assert send(page) == "403: This API is restricted, expecting header 'try-key'"
        page.faults.clear()
        page.value("$('name').value = 'try-key'; $('value').value = 'secret'; $('key').requestSubmit()")
        page.until("$('key').style.display === 'none'")
        send(page)
        assert rows(page)["y"] == page.value(
            "fields[0].input.example.values.map(each => +(each + 1).toPrecision(6)).join(', ')"
        )


def test_states_and_versions_are_shown_as_they_change(page: Browser, served: Served) -> None:
    states = "[...document.querySelectorAll('#versions td')].map(cell => cell.textContent)"
    visit(page, served.server, "sums")
    assert page.value(states) == ["1", "READY", ""]
    page.value("location.hash = '#1'")
    page.until("$('python').textContent.includes('model_version')")
    served.client.unload_model("sums")
    page.value("load()")
    page.until(f"{states}[1] === 'UNAVAILABLE'")
    assert page.value(states) == ["1", "UNAVAILABLE", "unloaded"]
    assert page.value("$('ready').hidden && $('problem').textContent")
    served.client.load_model("sums")
    page.until("!$('ready').hidden && !$('problem').textContent")
    page.open(f"http://{served.server.http_url}/models/nobody")
    page.until("$('problem').textContent.includes(\"unknown model: 'nobody'\")")
    page.faults.clear()


def test_many_answers_come_as_events(page: Browser, served: Served) -> None:
    visit(page, served.server, "repeat")
    fill(page, 0, "values", "a\nb")
    fill(page, 1, "values", "3")
    shown = send(page)
    assert [json.loads(line.removeprefix("data: "))["OUT"] for line in shown.split("\n") if line] == ["a\nb"] * 3


def test_datatypes_without_json(page: Browser, served: Served) -> None:
    visit(page, served.server, "halves")
    fill(page, 0, "values", "0.5 -2 65504")
    fill(page, 1, "values", "1.5 -0.00390625")
    send(page)
    assert rows(page)["y"] == "1, -4, Infinity"
    assert rows(page)["c"] == "1.5, -0.00390625"


def test_classes_optional_inputs_and_long_numbers(page: Browser, served: Served) -> None:
    visit(page, served.server, "classes")
    assert "repeated to make 150528" in page.value("fields[0].element.textContent")
    send(page)
    found = rows(page)
    assert [found[f"{value}.000000"] for value in (3, 2, 1)] == ["a <b>dog</b>", "bird: small", "cat"]
    assert found["more_too"] == "7"
    page.value("fields[1].used.click()")
    fill(page, 1, "values", str(2**63 - 1))
    send(page)
    assert rows(page)["more_too"] == str(2**63 - 1)


@pytest.mark.parametrize(("height", "tolerance"), [(60, 1e-4), (48, 0.02)], ids=["as it is", "resized"])
def test_a_picture_becomes_what_the_client_makes_of_it(
    page: Browser, served: Served, tmp_path: Path, height: int, tolerance: float
) -> None:
    gradient = np.linspace(0, 255, 60 * 90).reshape(60, 90)
    pixels = np.stack([gradient, 255 - gradient, gradient.T.reshape(60, 90)], axis=2).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "picture.png")
    visit(page, served.server, "classes")
    fill(page, 0, "shape", f"1, 3, {height}, 90")
    page.value("fields[0].file.id = 'picture'")
    page.choose_file("#picture", tmp_path / "picture.png")
    send(page)
    metadata = TensorMetadata(name="pixels", datatype="FP32", shape=[-1, 3, height, 90])
    (made,) = image_tensor([metadata], tmp_path / "picture.png", 1, Normalisation()).values()
    expected: Any = (made * np.arange(1, made.size + 1).reshape(made.shape) / made.size).sum(dtype=float)
    assert float(rows(page)["sum"]) == pytest.approx(expected, rel=tolerance)
