"""OpenAI's `/v1/embeddings`, and `/v1/rerank` as Jina and Cohere have it.

Texts become tokens in a thread, unless they are short; tokens become batches, which the scheduler joins with those of
other clients. Errors have OpenAI's shape.
"""

import base64
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import orjson

from gangway.artifact.datatypes import DTYPES
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import RequestError
from gangway.server.models.embeddings import (
    BASE64,
    EMBED,
    FLOAT,
    IDS,
    MAX_INPUTS,
    RERANK,
    SIGMOID,
    EmbeddingSettings,
)
from gangway.server.models.served import Models, ServedModel
from gangway.server.models.tokenizer import MAX_TEXT_CHARACTERS, Text, Tokens
from gangway.server.serving.call import Begin
from gangway.server.serving.embeddings.batches import (
    Floats,
    RowBatch,
    finished,
    most_tokens,
    text_batches,
    token_batches,
    vectors_of,
)
from gangway.server.serving.embeddings.run import Parts
from gangway.server.serving.http.call import HttpCall
from gangway.server.serving.http.infer import split_response
from gangway.server.serving.http.json_text import NumberText, dump, dump_numbers, kind_of, parse_object, shown
from gangway.server.serving.http.replies import STATUSES, HttpError, Reply
from gangway.server.serving.pending import Offload

MAX_NUMBERS_BYTES: Final = 1 << 20  # of token ids as JSON
QUICK_CHARACTERS: Final = 256  # become tokens on the loop
PIECE_CHARACTERS: Final = 64 * 1024  # become tokens in one turn of a thread: some 80 ms
CHARACTERS_OF_TOKEN: Final = 128  # on average, at most: of what is longer the rest is not looked at
LEAST_CHARACTERS: Final = 16 * 1024  # of a text that become tokens, however few a model reads
QUICK_BODY_BYTES: Final = 16 * 1024  # of JSON
QUICK_DOCUMENTS: Final = 32  # are ordered, and written, on the loop
QUICK_NUMBERS: Final = 16 * 1024  # are pooled, or written, on the loop
INVALID, NOT_FOUND, SERVER = "invalid_request_error", "not_found_error", "server_error"


class ApiError(Exception):
    """A request is refused in OpenAI's words. `param`: the member that is wrong; `code`: for programs."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message, self.param, self.status, self.code = message, param, status, code

    @property
    def reply(self) -> Reply:
        """The answer."""
        kind = NOT_FOUND if self.status == 404 else SERVER if self.status >= 500 else INVALID
        content = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return Reply(self.status, (dump({"error": content}),))


def refusal_of(error: RequestError | HttpError) -> Reply:
    """Return the answer to a request that the server refuses or fails, in OpenAI's shape."""
    if isinstance(error, HttpError):
        told = ApiError(str(error), status=error.reply.status).reply
        return Reply(told.status, told.parts, allow=error.reply.allow, closes=error.reply.closes)
    status = STATUSES.get(error.code, 500)
    return ApiError(error.message, status=status, code=error.code.name.lower()).reply


@dataclass(frozen=True)
class EmbeddingRequest:
    """A body of `/v1/embeddings`: `texts`, or rows of token `ids`. `dimensions`: the first ones are wanted."""

    model: str
    texts: Sequence[str]
    ids: Sequence[Sequence[int]]
    is_base64: bool
    dimensions: int | None
    truncates: bool


@dataclass(frozen=True)
class RerankRequest:
    """A body of `/v1/rerank`. `most`: results that are wanted."""

    model: str
    query: str
    documents: Sequence[str]
    most: int | None
    with_documents: bool
    truncates: bool


def read_embeddings(text: bytes | memoryview) -> EmbeddingRequest:
    """Understand a body of `/v1/embeddings`. Raises ApiError, RequestError."""
    content = parse_object(text)
    encoding = content.get("encoding_format") or FLOAT
    if encoding not in (FLOAT, BASE64):
        raise ApiError(f"'encoding_format' is '{FLOAT}' or '{BASE64}', got {shown(encoding)}", "encoding_format")
    texts, ids = _inputs(content.get("input"))
    return EmbeddingRequest(
        _name(content), texts, ids, encoding == BASE64, _count(content, "dimensions"), _flag(content, "truncate", False)
    )


def read_rerank(text: bytes | memoryview) -> RerankRequest:
    """Understand a body of `/v1/rerank`. Raises ApiError, RequestError."""
    content = parse_object(text)
    query, documents = content.get("query"), content.get("documents")
    if not isinstance(query, str):
        raise ApiError(f"expected a string as 'query', got {kind_of(query)}", "query")
    if not isinstance(documents, list) or not 0 < len(documents) <= MAX_INPUTS:
        raise ApiError(f"expected an array of 1 to {MAX_INPUTS} documents as 'documents'", "documents")
    texts: list[Any] = [each.get("text") if isinstance(each, dict) else each for each in documents]
    if wrong := [each for each in texts if not isinstance(each, str)]:
        raise ApiError(
            f"expected strings, or objects with a 'text', as 'documents', got {kind_of(wrong[0])}", "documents"
        )
    _check_lengths([query], "query")
    _check_lengths(texts, "documents")
    return RerankRequest(
        _name(content),
        query,
        texts,
        _count(content, "top_n"),
        _flag(content, "return_documents", True),
        _flag(content, "truncate", False),
    )


def _name(content: Mapping[str, Any]) -> str:
    name = content.get("model")
    if not isinstance(name, str) or not name:
        raise ApiError(f"expected a model's name as 'model', got {kind_of(name)}", "model")
    return name


def _count(content: Mapping[str, Any], name: str) -> int | None:
    value = content.get(name)
    if value is not None and (type(value) is not int or value < 1):
        raise ApiError(f"expected a number from 1 as '{name}', got {shown(value)}", name)
    return value


def _flag(content: Mapping[str, Any], name: str, default: bool) -> bool:
    value = content.get(name)
    if value is not None and not isinstance(value, bool):
        raise ApiError(f"expected a boolean as '{name}', got {kind_of(value)}", name)
    return default if value is None else value


def _inputs(given: Any) -> tuple[list[str], list[list[int]]]:
    """Return the texts, or else the rows of token ids, that a client may write in four ways."""
    if isinstance(given, NumberText):
        given = _numbers_of(given)
    rows: Any = [given] if isinstance(given, str) else given
    if not isinstance(rows, list) or not rows:
        raise ApiError(f"expected a text, token ids, or an array of either as 'input', got {shown(given)}", "input")
    if len(rows) > MAX_INPUTS and not isinstance(rows[0], int):
        raise ApiError(f"'input' has {len(rows)} items, at most {MAX_INPUTS} can be", "input")
    if all(isinstance(row, str) for row in rows):
        _check_lengths(rows, "input")
        return rows, []
    if isinstance(rows[0], int):
        rows = [rows]
    rows = [_numbers_of(row) if isinstance(row, NumberText) else row for row in rows]
    for row in rows:
        if not isinstance(row, list) or not row or not all(type(each) is int and 0 <= each < 2**31 for each in row):
            raise ApiError(f"expected texts, or arrays of token ids, in 'input', got {shown(row)}", "input")
    return [], rows


def _numbers_of(array: NumberText) -> Any:
    if array.end - array.begin > MAX_NUMBERS_BYTES:
        raise ApiError(f"more than {MAX_NUMBERS_BYTES} bytes of token ids", "input")
    try:
        return orjson.loads(array.text[array.begin : array.end])
    except ValueError:
        raise ApiError("'input' has an array that is no JSON of token ids", "input") from None


def _check_lengths(texts: Sequence[str], name: str) -> None:
    for text in texts:
        if not text:
            raise ApiError(f"'{name}' has an empty text", name)
        if len(text) > MAX_TEXT_CHARACTERS:
            raise ApiError(f"'{name}' has a text of more than {MAX_TEXT_CHARACTERS} characters", name)


class TextApi:
    """Answers what clients of OpenAI, Jina and Cohere send. `work`: threads for what takes long."""

    def __init__(self, begin: Begin, models: Callable[[], Models], work: Offload) -> None:
        self._begin, self._models, self._work = begin, models, work

    async def embeddings(self, call: HttpCall) -> Reply:
        """Answer `POST /v1/embeddings`. Raises ApiError, RequestError."""
        request: EmbeddingRequest = await self._aside(len(call.body) > QUICK_BODY_BYTES, read_embeddings, call.body)
        call.drop()
        model, settings = self._model(call, request.model, EMBED)
        _check_dimensions(request.dimensions, model.outputs[settings.output].shape[-1], settings)
        batches, tokens = await self._batches(model, settings, request.texts, request.ids, request.truncates, "input")
        responses = await Parts(self._begin, call, call.arrival_ns).responses([batch.request for batch in batches])
        is_large = sum(map(len, responses)) // 4 > QUICK_NUMBERS
        reply: Reply = await self._aside(is_large, _embeddings_reply, request, settings, batches, responses, tokens)
        return reply

    async def rerank(self, call: HttpCall) -> Reply:
        """Answer `POST /v1/rerank`. Raises ApiError, RequestError."""
        request: RerankRequest = await self._aside(len(call.body) > QUICK_BODY_BYTES, read_rerank, call.body)
        call.drop()
        model, settings = self._model(call, request.model, RERANK)
        pairs = [(request.query, document) for document in request.documents]
        batches, tokens = await self._batches(model, settings, pairs, (), request.truncates, "documents")
        responses = await Parts(self._begin, call, call.arrival_ns).responses([batch.request for batch in batches])
        reply: Reply = await self._aside(
            len(pairs) > QUICK_DOCUMENTS, _rerank_reply, request, settings, batches, responses, tokens
        )
        return reply

    def _found(self, name: str) -> ServedModel:
        try:
            return self._models().find(name, "")
        except RequestError as error:
            if STATUSES.get(error.code) != 404:
                raise
            raise ApiError(error.message, "model", 404, "model_not_found") from None

    def _model(self, call: HttpCall, name: str, task: str) -> tuple[ServedModel, EmbeddingSettings]:
        if call.access is not None:
            call.access.model = name
        model = self._found(name)
        settings = model.embeddings
        if settings is None or settings.task != task:
            what = "embeddings" if task == EMBED else "scores"
            raise ApiError(
                f"model '{name}' gives no {what}: see the parameter gangway_embeddings", "model", 400, "wrong_task"
            )
        return model, settings

    async def _batches(
        self,
        model: ServedModel,
        settings: EmbeddingSettings,
        texts: Sequence[Text],
        ids: Sequence[Sequence[int]],
        truncates: bool,
        param: str,
    ) -> tuple[list[RowBatch], int]:
        """Return the requests to the model, and how many tokens they have; 0 if the model makes them itself."""
        characters = sum(len(text) if isinstance(text, str) else len(text[0]) + len(text[1]) for text in texts)
        is_large = characters > QUICK_CHARACTERS or sum(map(len, ids)) > QUICK_CHARACTERS
        is_large = is_large or (model.tokenizer is not None and not model.tokenizer.is_loaded)
        if texts and model.tokenizer is None:
            if len(model.inputs) != (2 if isinstance(texts[0], tuple) else 1) or not model.takes_texts:
                raise ApiError(f"model '{model.name}' has no tokenizer: send token ids", param)
            return await self._aside(is_large, lambda: list(text_batches(model, settings, texts))), 0
        if IDS not in model.inputs:
            raise ApiError(f"model '{model.name}' reads texts, not token ids", param)
        bound = _Bound(model.name, most_tokens(model, settings), truncates, param)
        if texts:
            assert model.tokenizer is not None, "checked"
            rows = []
            for some in bound.pieces(texts):  # one by one, so that texts of other clients have their turn
                rows += bound.checked(await self._aside(is_large, model.tokenizer.encode, some, bound.cut))
        else:
            await self._aside(is_large, _refuse_foreign, model, ids, param)
            rows = bound.checked([Tokens(row[: bound.cut]) for row in ids])
        batches = await self._aside(is_large, lambda: list(token_batches(model, settings, rows)))
        return batches, sum(len(row.ids) for row in rows)

    async def _aside(self, is_large: bool, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call it, in a thread if it would hold the loop for too long."""
        return await self._work.run(function, *arguments) if is_large else function(*arguments)


@dataclass(frozen=True)
class _Bound:
    """What a model reads of a text: `most` tokens. `param`: the member of the request that has the texts."""

    model: str
    most: int
    truncates: bool
    param: str

    @property
    def cut(self) -> int | None:
        """The number of tokens that longer texts are cut to; None: they are refused."""
        return self.most if self.truncates else None

    def pieces(self, texts: Sequence[Text]) -> Iterator[Sequence[Text]]:
        """Yield some texts at a time, of no more characters than the model can make use of. Raises ApiError."""
        most_characters = max(LEAST_CHARACTERS, CHARACTERS_OF_TOKEN * self.most)
        piece: list[Text] = []
        characters = 0
        for text in texts:
            parts: tuple[str, ...] = text if isinstance(text, tuple) else (text,)
            longest = max(map(len, parts))
            if longest > most_characters:
                if not self.truncates:
                    raise self._too_long(f"{longest} characters")
                parts = tuple([part[:most_characters] for part in parts])
            size = sum(map(len, parts))
            if piece and characters + size > PIECE_CHARACTERS:
                yield piece
                piece, characters = [], 0
            piece.append((parts[0], parts[1]) if len(parts) == 2 else parts[0])
            characters += size
        yield piece

    def checked(self, rows: list[Tokens]) -> list[Tokens]:
        """Return rows that the model reads. Raises ApiError."""
        if (longest := max(len(row.ids) for row in rows)) > self.most:
            raise self._too_long(str(longest))
        return rows

    def _too_long(self, has: str) -> ApiError:
        return ApiError(
            f"model '{self.model}' reads at most {self.most} tokens, a text has {has}; \"truncate\": true cuts it",
            self.param,
            code="context_length_exceeded",
        )


def _refuse_foreign(model: ServedModel, ids: Sequence[Sequence[int]], param: str) -> None:
    """Raise ApiError for ids of another tokenizer, which would give vectors of no meaning.

    Clients send such ones by default, as LangChain's for OpenAI does. Ids that are right begin as each text does.
    """
    vocabulary = model.tokenizer.vocabulary() if model.tokenizer is not None else None
    if vocabulary is None:
        return
    largest = max(map(max, ids))
    if largest >= vocabulary.size:
        why = f"{largest} is beyond its vocabulary of {vocabulary.size}"
    elif vocabulary.begin is not None and any(row[0] != vocabulary.begin for row in ids):
        why = f"its own begin with {vocabulary.begin}"
    else:
        return
    raise ApiError(
        f"token ids are not of the tokenizer of model '{model.name}': {why}. Send texts; LangChain's OpenAIEmbeddings"
        " does so with check_embedding_ctx_length=False",
        param,
        code="foreign_tokens",
    )


def _output_of(response: bytes) -> npt.NDArray[Any]:
    """Return the only output of a response, with its rows in front."""
    header, _, raws = split_response(response)
    tensor = pb.ModelInferResponse.FromString(header).outputs[0]
    return np.frombuffer(raws[0], DTYPES[tensor.datatype]).reshape(tensor.shape)


def _vectors(settings: EmbeddingSettings, batches: Sequence[RowBatch], responses: Sequence[bytes]) -> Floats:
    """Return the vectors of all rows, in the order of the texts. Raises ApiError if one has no finite values."""
    found = [
        vectors_of(_output_of(response), batch.lengths, settings)
        for batch, response in zip(batches, responses, strict=True)
    ]
    if len(found) == 1 and list(batches[0].places) == list(range(len(found[0]))):
        vectors = found[0]
    else:
        vectors = np.empty((sum(map(len, found)), *found[0].shape[1:]), np.float32)
        for batch, some in zip(batches, found, strict=True):
            vectors[list(batch.places)] = some
    are_finite = np.isfinite(vectors).all(axis=tuple(range(1, vectors.ndim)))
    if not are_finite.all():  # JSON has no word for them, and scores have no order
        raise ApiError(
            f"the model's answer for text {int(np.argmin(are_finite))} has values that are not finite",
            None,
            500,
            "not_finite",
        )
    return vectors


def _embeddings_reply(
    request: EmbeddingRequest,
    settings: EmbeddingSettings,
    batches: Sequence[RowBatch],
    responses: Sequence[bytes],
    tokens: int,
) -> Reply:
    vectors = _vectors(settings, batches, responses)
    _check_dimensions(request.dimensions, vectors.shape[1], settings)
    rows = np.ascontiguousarray(finished(vectors, settings, request.dimensions))
    write: Callable[[Any], bytes] = _base64 if request.is_base64 else dump_numbers
    items = [
        b'{"object":"embedding","index":%d,"embedding":%b}' % (index, write(row)) for index, row in enumerate(rows)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    end = dump({"model": request.model, "usage": usage})
    return Reply(200, (b'{"object":"list","data":[' + b",".join(items) + b"]," + end[1:],))


def _check_dimensions(wanted: int | None, size: int, settings: EmbeddingSettings) -> None:
    """Raise ApiError unless embeddings of so many values may have the wanted ones. `size` -1: nobody knows yet."""
    if wanted is None or size < 0 or wanted == size or (wanted < size and settings.matryoshka):
        return
    fewer = "; fewer are for models that are trained for it, of which gangway_embeddings says matryoshka=true"
    raise ApiError(
        f"'dimensions' is {wanted}, the model's embeddings have {size}{fewer * (wanted < size)}", "dimensions"
    )


def _base64(row: Floats) -> bytes:
    return b'"' + base64.b64encode(row.tobytes()) + b'"'  # little-endian, as OpenAI has it


def _rerank_reply(
    request: RerankRequest,
    settings: EmbeddingSettings,
    batches: Sequence[RowBatch],
    responses: Sequence[bytes],
    tokens: int,
) -> Reply:
    scores = [float(score) for score in _vectors(settings, batches, responses).reshape(-1)]
    if settings.activation == SIGMOID:
        scores = [_sigmoid(score) for score in scores]
    ordered = sorted(range(len(scores)), key=lambda index: -scores[index])
    results = []
    for index in ordered[: request.most]:
        result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
        if request.with_documents:
            result["document"] = {"text": request.documents[index]}
        results.append(result)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return Reply(200, (dump({"model": request.model, "results": results, "usage": usage}),))


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value)) if value >= 0 else 1 - 1 / (1 + math.exp(value))
