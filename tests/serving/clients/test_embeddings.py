"""`/v1/embeddings` and `/v1/rerank`: the openai client and plain requests, held against onnxruntime."""

import base64
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from shutil import rmtree
from threading import Event
from typing import Any

import numpy as np
import openai
import pytest
from tritonclient.utils import InferenceServerException

from testing.waiting import until
from tests.helpers.http_requests import HttpAnswer, ask_http
from tests.helpers.openapi_examples import check_examples, described
from tests.helpers.python_models import config_of, parameter, write
from tests.helpers.served import Served, serving
from tests.helpers.text_models import MAX_TOKENS, SIZE, TextModel, save_reader, tokenizer
from tests.helpers.ways import Array

TEXTS = ["The cat sits.", "dogs run", "a", "the dog runs 42 times, does it? " * 2, "cats"]
EXACT = 1e-5
COUNTS = """
    def execute(self, requests):
        answers = []
        for request in requests:
            texts = pb_utils.get_input_tensor_by_name(request, "text").as_numpy().reshape(-1)
            sizes = [np.nan if text == b"nan" else len(text) for text in texts]
            values = np.array([[size, text.count(b"a")] for size, text in zip(sizes, texts)], np.float32)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("vector", values)]))
        return answers
"""
OVERLAP = """
    def execute(self, requests):
        answers = []
        for request in requests:
            given = [pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in ("asked", "text")]
            pairs = np.hstack(given)
            scores = [[np.inf if b"inf" in pair else len(set(pair[0]) & set(pair[1]))] for pair in pairs]
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("score", np.array(scores, np.float32))]))
        return answers
"""
JOINS = "max_batch_size: 4 dynamic_batching { preferred_batch_size: [4] max_queue_delay_microseconds: 20000000 }"
EMBEDS = parameter("gangway_embeddings", "task=embed; normalize=false")
TOKENS = ("input_ids", "attention_mask", "token_type_ids")
STEP = (
    'platform: "ensemble" max_batch_size: 4 input { name: "words" data_type: TYPE_STRING dims: [ 1 ] }'
    ' output { name: "found" data_type: TYPE_FP32 dims: [ 2 ] } ensemble_scheduling { step { model_name: "counts"'
    ' model_version: -1 input_map { key: "text" value: "words" } output_map { key: "vector" value: "found" } } } '
)


@dataclass(frozen=True)
class Texts(Served):
    """A server of models of texts, and their references."""

    @cached_property
    def openai(self) -> openai.OpenAI:
        """A client, which sends a request once."""
        return openai.OpenAI(base_url=f"http://{self.server.http_url}/v1", api_key="none", max_retries=0, timeout=20)

    def post(self, path: str, body: Any) -> HttpAnswer:
        return ask_http(self.server.http_url, "POST", path, body)

    def rows(self, model: str, given: Any, **more: Any) -> Array:
        """The vectors of an answer, which keeps the order of the texts."""
        answer = self.openai.embeddings.create(model=model, input=given, **more)
        assert [item.index for item in answer.data] == list(range(len(answer.data)))
        return np.array([item.embedding for item in answer.data], np.float32)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("texts")


@pytest.fixture(scope="module")
def encoder(repository: Path) -> TextModel:
    model = TextModel(repository, "encoder", scores=False)
    (model.folder / "config.json").write_text(json.dumps({"matryoshka_dimensions": [8, 4]}))
    return model


@pytest.fixture(scope="module")
def scorer(repository: Path) -> TextModel:
    return TextModel(repository, "scorer", scores=True)


@pytest.fixture(scope="module")
def first(repository: Path) -> TextModel:
    """One of which the first token counts, whose vectors have any length, and that waits for batches of four."""
    model = TextModel(repository, "first", scores=False, config=JOINS)
    model.with_pooling("cls_token")
    return model


@pytest.fixture(scope="module")
def rows(repository: Path) -> Array:
    """What a model that makes tokens itself has for each of them."""
    return save_reader(repository, "reader", EMBEDS)


@pytest.fixture(scope="module")
def access_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "access.log"


@pytest.fixture(scope="module")
def short(repository: Path) -> TextModel:
    """One whose inputs have a fixed length, less than its tokenizer's bound."""
    sizes = [f'input {{ name: "{name}" data_type: TYPE_INT64 dims: [ 24 ] }}' for name in TOKENS]
    output = f'output {{ name: "last_hidden_state" data_type: TYPE_FP32 dims: [ 24, {SIZE} ] }}'
    return TextModel(repository, "short", scores=False, config=f"max_batch_size: 4 {' '.join(sizes)} {output}")


@pytest.fixture(scope="module")
def served(
    repository: Path,
    encoder: TextModel,
    scorer: TextModel,
    first: TextModel,
    short: TextModel,
    rows: Array,
    access_log: Path,
    model_cache: Path,
) -> Iterator[Texts]:
    write(repository, "counts", COUNTS, config_of("text:STRING:1", "vector:FP32:2", 4, EMBEDS))
    scores = parameter("gangway_embeddings", "task=rerank; activation=none")
    write(repository, "overlap", OVERLAP, config_of("asked:STRING:1 text:STRING:1", "score:FP32:1", 4, scores))
    (repository / "step").mkdir()
    (repository / "step" / "config.pbtxt").write_text(STEP + EMBEDS)
    (repository / "step" / "1").mkdir()
    flags = ["--model-control-mode=explicit", "--load-model=*", "--max-shapes=0", f"--access-log={access_log}"]
    flags.append(f"--cache-dir={model_cache}")
    with serving(repository, *flags, kind=Texts) as served, served.openai:
        yield served


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/embeddings", {"model": "encoder", "input": TEXTS[0]}, 200),
        ("/v1/embeddings", {"model": "encoder", "input": list(TEXTS) * 20}, 200),  # several requests to the model
        ("/v1/rerank", {"model": "scorer", "query": TEXTS[0], "documents": TEXTS}, 200),
        ("/v1/rerank", {"model": "overlap", "query": TEXTS[0], "documents": TEXTS}, 200),  # by a Python model
        ("/v1/models/counts:predict", {"instances": [["tea"], ["time"]]}, 200),
        ("/v1/embeddings", {"model": "scorer", "input": TEXTS[0]}, 400),
        ("/v1/embeddings", {"model": "nobody", "input": TEXTS[0]}, 404),
    ],
)
def test_the_access_log_has_model_and_times(
    served: Texts, access_log: Path, path: str, body: dict[str, Any], status: int
) -> None:
    before = len(access_log.read_text().splitlines()) if access_log.exists() else 0
    answer = served.post(path, body)
    assert answer.status == status

    def lines() -> list[dict[str, str]]:
        read = access_log.read_text().splitlines()[before:] if access_log.exists() else []
        found = (dict(member.split("=", 1) for member in line.split()[2:]) for line in read)
        return [line for line in found if line.get("path") == path]

    until(lines)
    (line,) = lines()
    model = body.get("model", "counts")
    assert (line["model"], line["status"]) == (model, str(status))
    assert line["bytes_out"] == str(len(answer.body))
    if status == 200:
        queue_us, compute_us, total_us = (int(line[name]) for name in ("queue_us", "compute_us", "total_us"))
        assert line["version"] == "1" and compute_us > 0
        assert 0 <= queue_us + compute_us <= total_us
    else:
        assert "queue_us" not in line


def test_texts_become_vectors_in_both_formats(served: Texts, encoder: TextModel) -> None:
    expected = np.array([encoder.vector(text) for text in TEXTS])
    assert np.abs(served.rows("encoder", TEXTS) - expected).max() < EXACT
    assert np.abs(served.rows("encoder", TEXTS, encoding_format="float") - expected).max() < EXACT
    answer = served.post("/v1/embeddings", {"model": "encoder", "input": TEXTS[0], "encoding_format": "base64"})
    found = np.frombuffer(base64.b64decode(answer.content["data"][0]["embedding"]), "<f4")
    assert np.abs(found - expected[0]).max() < EXACT
    count = len(encoder.states(TEXTS[0]))
    assert answer.content["usage"] == {"prompt_tokens": count, "total_tokens": count}


def test_token_ids_are_what_the_model_gets(served: Texts, encoder: TextModel) -> None:
    rows = [[2, 40, 3], [2, 7, 8, 9, 10, 3]]  # which begin as each text does
    expected = np.array([encoder.vector(row) for row in rows])
    assert np.abs(served.rows("encoder", rows) - expected).max() < EXACT
    assert np.abs(served.rows("encoder", rows[1]) - expected[1]).max() < EXACT
    many = [row * 5 for row in rows] * 400  # more than a JSON parser gets as they are
    expected = np.array([encoder.vector(row) for row in many[:2]])
    assert np.abs(served.rows("encoder", many)[-2:] - expected).max() < EXACT


def test_dimensions_are_cut_and_scaled_of_a_model_that_is_trained_for_it(served: Texts, encoder: TextModel) -> None:
    found = served.rows("encoder", TEXTS[1], dimensions=3)[0]
    cut = encoder.vector(TEXTS[1])[:3]
    assert np.abs(found - cut / np.linalg.norm(cut)).max() < EXACT
    with pytest.raises(openai.BadRequestError, match=f"embeddings have {SIZE}; fewer are for .*matryoshka=true"):
        served.rows("first", TEXTS[1], dimensions=3)
    assert served.rows("first", TEXTS[1:2] * 4, dimensions=SIZE).shape == (4, SIZE)


def test_members_that_nobody_reads_do_no_harm(served: Texts, encoder: TextModel) -> None:
    more = {"user": "somebody", "priority": {"a": [1]}, "encoding_format": None, "dimensions": None}
    answer = served.post("/v1/embeddings", {**TEXT, **more})
    assert np.abs(np.array(answer.content["data"][0]["embedding"]) - encoder.vector("cat")).max() < EXACT


@pytest.mark.long
def test_a_key_is_wanted_if_the_server_says_so(tmp_path: Path, encoder: TextModel) -> None:
    (tmp_path / "encoder").symlink_to(encoder.folder)
    restriction = "--http-restricted-api=inference:authorization=Bearer secret"
    with serving(tmp_path, "--max-shapes=0", restriction, kind=Texts) as restricted, restricted.openai:
        with pytest.raises(openai.PermissionDeniedError, match="expecting header 'authorization'"):
            restricted.rows("encoder", "cat")
        known = restricted.openai.with_options(api_key="secret")
        assert len(known.embeddings.create(model="encoder", input="cat").data[0].embedding) == SIZE


def test_a_base_without_v1_is_told(served: Texts) -> None:
    with pytest.raises(openai.NotFoundError, match="ends with /v1"):
        served.openai.with_options(base_url=f"http://{served.server.http_url}").embeddings.create(
            model="encoder", input="cat"
        )


def test_many_texts_become_tokens_in_pieces(served: Texts, encoder: TextModel) -> None:
    texts = [f"the cat sits {'runs ' * (number % 7)}" for number in range(2048)]
    found = served.rows("encoder", [*texts[:-1], "a cat " * 15_000], extra_body={"truncate": True})
    for number in (0, 1, 6, 1000, 2046):
        assert np.abs(found[number] - encoder.vector(texts[number])).max() < EXACT
    assert np.abs(found[-1] - served.rows("encoder", "a cat " * 1000, extra_body={"truncate": True})).max() < EXACT


def test_pooling_is_that_of_the_files_beside_a_model(served: Texts, first: TextModel) -> None:
    texts = ["a", "dogs run", "cats", "the cat"]
    expected = np.array([first.states(text)[0] for text in texts])
    assert np.abs(served.rows("first", texts) - expected).max() < 10 * EXACT
    assert "pooling=cls; normalize=false" in served.parameter("first", "gangway_embeddings")


def test_long_texts_are_cut_if_a_client_wants_it(served: Texts, encoder: TextModel) -> None:
    text = "cat " * (2 * MAX_TOKENS)
    expected = encoder.vector("cat " * (MAX_TOKENS - 2))
    assert np.abs(served.rows("encoder", text, extra_body={"truncate": True}) - expected).max() < EXACT
    cut = served.rows("encoder", [2, *[5] * (2 * MAX_TOKENS)], extra_body={"truncate": True})
    assert np.abs(cut - encoder.vector([2, *[5] * (MAX_TOKENS - 1)])).max() < EXACT


def test_texts_are_cut_to_the_length_of_the_model(served: Texts, short: TextModel) -> None:
    ids = tokenizer().encode("cat " * 40).ids
    found = served.rows("short", ["cat " * 40, "cat"], extra_body={"truncate": True})
    assert np.abs(found[0] - short.vector([*ids[:23], ids[-1]])).max() < EXACT
    assert np.abs(found[1] - short.vector("cat")).max() < EXACT


@pytest.mark.parametrize("name", ["counts", "step"])
def test_models_and_ensembles_that_read_texts(served: Texts, name: str) -> None:
    texts = ["a cat", "dog", "banana", "", "x"][:3] + ["aé"] * 3
    assert served.rows(name, texts).tolist() == [[len(text.encode()), text.count("a")] for text in texts]


def test_a_model_that_makes_tokens_itself(served: Texts, rows: Array) -> None:
    expected = [rows[tokenizer().encode(text).ids].mean(axis=0) for text in TEXTS]
    assert np.abs(served.rows("reader", TEXTS) - expected).max() < EXACT


def test_documents_are_ordered_by_their_scores(served: Texts, scorer: TextModel) -> None:
    query, documents = "the cat", [*TEXTS, {"text": "runs"}]
    texts = [each if isinstance(each, str) else each["text"] for each in documents]
    scores = [scorer.score(query, text) for text in texts]
    body = {"model": "scorer", "query": query, "documents": documents}
    answer = served.post("/v1/rerank", body).content
    order = [result["index"] for result in answer["results"]]
    found = [result["relevance_score"] for result in answer["results"]]
    assert sorted(order) == list(range(len(texts))) and found == sorted(found, reverse=True)
    assert np.allclose(found, [scores[index] for index in order], atol=EXACT)
    assert [result["document"]["text"] for result in answer["results"]] == [texts[index] for index in order]
    few = served.post("/v1/rerank", {**body, "top_n": 2, "return_documents": False}).content
    assert few["results"] == [{"index": order[at], "relevance_score": found[at]} for at in range(2)]


def test_a_model_that_reads_pairs_itself_scores_them(served: Texts) -> None:
    body = {"model": "overlap", "query": "abc", "documents": ["x", "abx", "cab", "bx", "a", "c x a"]}
    results = served.post("/v1/rerank", body).content["results"]
    assert [(each["index"], each["relevance_score"]) for each in results] == [
        (2, 3),
        (1, 2),
        (5, 2),
        (3, 1),
        (4, 1),
        (0, 0),
    ]


@pytest.mark.parametrize(
    ("path", "body", "place"),
    [
        ("embeddings", {"model": "counts", "input": ["a", "b", "nan"]}, 2),
        ("embeddings", {"model": "counts", "input": "nan", "encoding_format": "base64"}, 0),
        ("rerank", {"model": "overlap", "query": "abc", "documents": ["a", "inf", "b"]}, 1),
    ],
)
def test_what_is_not_finite_is_no_answer(served: Texts, path: str, body: Any, place: int) -> None:
    answer = served.post(f"/v1/{path}", body)
    assert answer.status == 500 and answer.content["error"]["code"] == "not_finite"
    assert f"text {place} " in answer.content["error"]["message"]


TOKEN_VECTORS = ("text:STRING:1", "states:FP32:-1,4")
REFUSED: dict[str, tuple[str, ...]] = {  # inputs, outputs, settings, some words
    "mean over padding": (*TOKEN_VECTORS, "task=embed", "pooling is cls"),
    "last of padding": (*TOKEN_VECTORS, "pooling=last", "pooling is cls"),
    "two texts to embed": ("one:STRING:1 two:STRING:1", "vector:FP32:2", "task=embed", "one input"),
    "so many rows": ("input_ids:INT64:2,16 attention_mask:INT64:2,16", "vector:FP32:2,4", "task=embed", "2 rows"),
    "one text to rerank": ("text:STRING:1", "score:FP32:1", "task=rerank", "two inputs"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_settings_that_would_answer_wrongly_are_refused(served: Texts, name: str) -> None:
    inputs, outputs, settings, words = REFUSED[name]
    write(
        served.repository,
        "refused",
        COUNTS,
        config_of(inputs, outputs, 4 * ("INT64" not in inputs), parameter("gangway_embeddings", settings)),
    )
    with pytest.raises(InferenceServerException, match=words):
        served.client.load_model("refused")
    rmtree(served.repository / "refused")


def test_a_broken_tokenizer_is_logged_when_its_model_is_loaded(served: Texts) -> None:
    TextModel(served.repository, "torn", scores=False)
    file = served.repository / "torn" / "tokenizer.json"
    file.write_bytes(file.read_bytes()[:1000])
    served.client.load_model("torn")
    until(lambda: f"{file}: the tokenizer cannot be read" in served.log(), served.log)
    answer = served.post("/v1/embeddings", {"model": "torn", "input": "cat"})
    assert answer.status == 500 and "the tokenizer cannot be read" in answer.content["error"]["message"]
    served.client.unload_model("torn")
    rmtree(served.repository / "torn")


def test_texts_of_several_clients_become_one_batch(served: Texts, first: TextModel) -> None:
    texts = ["a", "dogs run", "cats", "the cat"]  # of several lengths, which are padded to one
    before = served.statistics("first")
    with ThreadPoolExecutor(4) as clients:
        answers = list(
            clients.map(lambda text: served.post("/v1/embeddings", {"model": "first", "input": text}), texts)
        )
    for answer, text in zip(answers, texts, strict=True):
        assert np.allclose(answer.content["data"][0]["embedding"], first.states(text)[0], atol=10 * EXACT)
    after = served.statistics("first")
    assert after.inference_count - before.inference_count == len(texts)
    assert after.execution_count - before.execution_count == 1


def test_models_are_listed(served: Texts) -> None:
    names = sorted(path.name for path in served.repository.iterdir())
    listed = ask_http(served.server.http_url, "GET", "/v1/models").content
    assert listed["object"] == "list" and listed["models"] == [model["id"] for model in listed["data"]] == names
    assert [model.id for model in served.openai.models.list()] == names
    assert served.openai.models.retrieve("encoder").id == "encoder"
    with pytest.raises(openai.NotFoundError):
        served.openai.models.retrieve("nobody")


TEXT = {"model": "encoder", "input": "cat"}
MANY = b"1," * 50_000  # token ids, which stay text for a while
PAIR = {"model": "scorer", "query": "cat", "documents": ["dog"]}
WRONG: dict[str, tuple[str, Any, int, str | None, str]] = {  # path, body, status, `param`, some words
    "no JSON": ("embeddings", b"{", 400, None, "JSON"),
    "no object": ("embeddings", [1], 400, None, "object"),
    "no model": ("embeddings", {"input": "cat"}, 400, "model", "name"),
    "unknown model": ("embeddings", {**TEXT, "model": "nobody"}, 404, "model", "nobody"),
    "other task": ("embeddings", {**TEXT, "model": "scorer"}, 400, "model", "gangway_embeddings"),
    "no input": ("embeddings", {"model": "encoder"}, 400, "input", "input"),
    "no texts": ("embeddings", {**TEXT, "input": []}, 400, "input", "input"),
    "empty text": ("embeddings", {**TEXT, "input": ["cat", ""]}, 400, "input", "empty"),
    "mixed": ("embeddings", {**TEXT, "input": ["cat", 3]}, 400, "input", "token ids"),
    "no ids": ("embeddings", {**TEXT, "input": [[]]}, 400, "input", "token ids"),
    "negative id": ("embeddings", {**TEXT, "input": [-1]}, 400, "input", "token ids"),
    "nested ids": ("embeddings", {**TEXT, "input": [[[1]]]}, 400, "input", "token ids"),
    "comma before an id": ("embeddings", b'{"model": "encoder", "input": [%b,1]}' % MANY, 400, "input", "JSON"),
    "comma behind an id": ("embeddings", b'{"model": "encoder", "input": [[%b]]}' % MANY, 400, "input", "JSON"),
    "id as none writes it": ("embeddings", b'{"model": "encoder", "input": [%b01]}' % MANY, 400, "input", "JSON"),
    "NaN as an id": ("embeddings", b'{"model": "encoder", "input": [[%bNaN]]}' % MANY, 400, "input", "JSON"),
    "ids beyond the vocabulary": (
        "embeddings",
        {**TEXT, "input": [[2, 5], [2, 100_000]]},
        400,
        "input",
        "100000 is beyond its vocabulary",
    ),
    "ids of another tokenizer": (
        "embeddings",
        {**TEXT, "input": [[2, 5], [5, 6]]},
        400,
        "input",
        "check_embedding_ctx_length=False",
    ),
    "half ids": ("embeddings", {**TEXT, "input": [1.5]}, 400, "input", "input"),
    "too many": ("embeddings", {**TEXT, "input": ["cat"] * 2049}, 400, "input", "2048"),
    "too long": ("embeddings", {**TEXT, "input": "cat " * MAX_TOKENS}, 400, "input", "truncate"),
    "far too long": ("embeddings", {**TEXT, "input": ["cat", "a " * 2**19]}, 400, "input", "1048576 characters"),
    "far too long a query": ("rerank", {**PAIR, "query": "a " * 10_000}, 400, "documents", "20000 characters"),
    "format": ("embeddings", {**TEXT, "encoding_format": "hex"}, 400, "encoding_format", "base64"),
    "dimensions": ("embeddings", {**TEXT, "dimensions": SIZE + 1}, 400, "dimensions", str(SIZE)),
    "no dimensions": ("embeddings", {**TEXT, "dimensions": 0}, 400, "dimensions", "from 1"),
    "no flag": ("embeddings", {**TEXT, "truncate": "yes"}, 400, "truncate", "boolean"),
    "ids of texts": ("embeddings", {"model": "counts", "input": [1]}, 400, "input", "texts"),
    "no query": ("rerank", {**PAIR, "query": 3}, 400, "query", "query"),
    "no documents": ("rerank", {**PAIR, "documents": []}, 400, "documents", "documents"),
    "wrong document": ("rerank", {**PAIR, "documents": [{"body": "x"}]}, 400, "documents", "text"),
    "top_n": ("rerank", {**PAIR, "top_n": -1}, 400, "top_n", "from 1"),
    "rerank by an encoder": ("rerank", {**PAIR, "model": "encoder"}, 400, "model", "gangway_embeddings"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_told_as_openai_does(served: Texts, name: str) -> None:
    path, body, status, param, words = WRONG[name]
    answer = served.post(f"/v1/{path}", body)
    assert answer.status == status, answer.body
    error = answer.content["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param and words in error["message"]


def test_a_client_that_goes_is_forgotten(served: Texts) -> None:
    body = json.dumps({"model": "encoder", "input": [f"cat {number}" for number in range(2000)]}).encode()
    host, _, port = served.server.http_url.rpartition(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        until(served.server.busy_slots)
    served.await_rest()


def test_answers_survive_a_killed_worker(served: Texts, encoder: TextModel) -> None:
    expected, found, is_over = [encoder.vector(text) for text in TEXTS], [], Event()

    def ask_on() -> None:
        while not is_over.is_set():
            found.append(served.rows("encoder", TEXTS))

    with ThreadPoolExecutor(1) as client:
        asked = client.submit(ask_on)
        until(served.server.busy_slots)
        served.kill("worker")
        before = len(found)
        until(lambda: len(found) > before + 10 or asked.done())
        is_over.set()
        asked.result()
    assert np.abs(np.array(found) - expected).max() < EXACT


def test_what_is_refused_under_load_is_told_as_openai_does(served: Texts, encoder: TextModel) -> None:
    config = {"max_batch_size": 4, "parameters": {"max_queue_size": {"string_value": "1"}}}
    served.client.load_model("encoder", config=json.dumps(config))
    with pytest.raises(openai.InternalServerError, match="maximum queue size") as refused:
        served.rows("encoder", ["cat"] * 64)
    served.await_rest()  # the batches that had begun are cancelled
    assert refused.value.status_code == 503 and refused.value.body["type"] == "server_error"  # type: ignore[index]
    served.client.load_model("encoder")
    assert np.abs(served.rows("encoder", "cat") - encoder.vector("cat")).max() < EXACT


def test_a_model_comes_and_goes(served: Texts, encoder: TextModel) -> None:
    served.client.unload_model("encoder")
    until(lambda: served.post("/v1/embeddings", TEXT).status == 404)  # before that: 503
    served.client.load_model("encoder")
    assert np.abs(served.rows("encoder", "cat") - encoder.vector("cat")).max() < EXACT


def test_texts_are_in_the_description(served: Texts) -> None:
    content = described(served.server.http_url)
    paths = ["/v1/embeddings", "/v1/rerank"]
    assert check_examples(served.server.http_url, content, paths) == paths
    request = content["paths"]["/v1/embeddings"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert set(request["properties"]["model"]["enum"]) == {"counts", "encoder", "first", "reader", "short", "step"}
