"""Texts and tokens as requests to a model: rows of one padded length are a batch; and what becomes of its answers.

A request has rows of one length, and the scheduler joins requests of one length, so lengths are rounded up to few:
those of `gangway_buckets`, or LENGTHS. Padding is masked, so it does not change an answer.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gangway.artifact.datatypes import DTYPES
from gangway.executor.frames import join_strings
from gangway.protos import grpc_service_pb2 as pb
from gangway.server.models.config import bucket_sizes
from gangway.server.models.embeddings import CLS, IDS, LAST, MASK, MEAN, POSITIONS, SENTENCE, TYPES, EmbeddingSettings
from gangway.server.models.served import ServedModel
from gangway.server.models.tokenizer import Text, Tokens

# Few, since each is compiled, and near each other, since padding is computed, too.
LENGTHS: Final = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
MOST_ROWS: Final = 32  # of a request: more would make others wait for longer
LEAST_NORM: Final = 1e-12  # of a vector that is divided by it

Floats = npt.NDArray[np.float32]


class RowBatch(NamedTuple):
    """Rows of one request to the model. `places`: of the rows among all texts. `lengths`: in tokens, none of texts."""

    places: Sequence[int]
    lengths: Sequence[int]
    header: bytes
    raws: list[memoryview]

    @property
    def request(self) -> tuple[bytes, list[memoryview]]:
        """Header and tensors."""
        return self.header, self.raws


def text_batches(model: ServedModel, settings: EmbeddingSettings, texts: Sequence[Text]) -> Iterator[RowBatch]:
    """Yield the requests of texts that the model itself reads; of a pair the first input gets the first text."""
    inputs = [(tensor.name, tensor.datatype, tensor.shape) for tensor in model.inputs.values()]
    pieces = [text if isinstance(text, tuple) else (text,) for text in texts]
    most = _most_rows(model)
    for at in range(0, len(texts), most):
        rows = pieces[at : at + most]
        shapes = tuple(
            (name, datatype, (len(rows), *[1] * (len(shape) - 1)) if shape else ()) for name, datatype, shape in inputs
        )
        raws = [join_strings([row[place].encode() for row in rows]) for place in range(len(inputs))]
        header = _header(model.name, str(model.version), shapes, settings.output)
        yield RowBatch(range(at, at + len(rows)), (), header, [memoryview(raw) for raw in raws])


def token_batches(model: ServedModel, settings: EmbeddingSettings, rows: Sequence[Tokens]) -> Iterator[RowBatch]:
    """Yield the requests of rows of tokens, none of which is too long."""
    by_length: dict[int, list[int]] = {}
    lengths = _Lengths(model, settings)
    for place, row in enumerate(rows):
        by_length.setdefault(lengths.padded(len(row.ids)), []).append(place)
    most = _most_rows(model)
    for length, places in by_length.items():
        for at in range(0, len(places), most):
            some = places[at : at + most]
            yield _token_batch(model, settings, [rows[place] for place in some], some, length)


def most_tokens(model: ServedModel, settings: EmbeddingSettings) -> int:
    """Return how many tokens a row may have."""
    size = model.inputs[IDS].shape[1]
    return settings.max_tokens if size < 0 else min(size, settings.max_tokens)


class _Lengths:
    """How long rows become for a model."""

    def __init__(self, model: ServedModel, settings: EmbeddingSettings) -> None:
        tensor = model.inputs[IDS]
        self._fixed = tensor.shape[1]
        self._is_exact = MASK not in model.inputs
        symbol = tensor.symbols[1] if tensor.symbols else ""
        self._most = settings.max_tokens
        usual = (*(length for length in LENGTHS if length < self._most), self._most)
        self._buckets = sorted(bucket_sizes(model.config).get(symbol, usual))

    def padded(self, length: int) -> int:
        """Return the length that a row of so many tokens gets."""
        if self._fixed >= 0:
            return self._fixed
        if self._is_exact:
            return length
        return next((size for size in self._buckets if size >= length), length)


def _token_batch(
    model: ServedModel, settings: EmbeddingSettings, rows: Sequence[Tokens], places: Sequence[int], length: int
) -> RowBatch:
    lengths = [len(row.ids) for row in rows]
    shapes, raws = [], []
    for tensor in model.inputs.values():
        values = np.zeros((len(rows), length), DTYPES[tensor.datatype])
        for at, row in enumerate(rows):
            match tensor.name:
                case name if name == IDS:
                    values[at, : lengths[at]] = row.ids
                case name if name == MASK:
                    values[at, : lengths[at]] = 1
                case name if name == TYPES and row.types:
                    values[at, : lengths[at]] = row.types
                case name if name == POSITIONS:
                    values[at] = np.arange(length)
        shapes.append((tensor.name, tensor.datatype, values.shape))
        raws.append(memoryview(values.tobytes()))
    header = _header(model.name, str(model.version), tuple(shapes), settings.output)
    return RowBatch(places, lengths, header, raws)


def _most_rows(model: ServedModel) -> int:
    return max(1, min(MOST_ROWS, model.max_rows)) if model.has_rows else 1


@lru_cache(maxsize=4096)
def _header(name: str, version: str, inputs: tuple[tuple[str, str, tuple[int, ...]], ...], output: str) -> bytes:
    """Return a request without its tensors; equal ones share a plan."""
    message = pb.ModelInferRequest(model_name=name, model_version=version)
    for tensor, datatype, shape in inputs:
        message.inputs.add(name=tensor, datatype=datatype, shape=shape)
    message.outputs.add(name=output)
    return message.SerializeToString(deterministic=True)


def vectors_of(output: npt.NDArray[Any], lengths: Sequence[int], settings: EmbeddingSettings) -> Floats:
    """Return one vector for each row: float32, [rows, size]. `output`: [rows, size], or [rows, length, size]."""
    states: Floats = output.astype(np.float32, copy=False)
    if settings.pooling == SENTENCE:
        return states
    length = states.shape[1]
    counts = np.minimum(np.asarray(lengths or [length] * len(states)), length)  # texts have none, but only CLS
    if settings.pooling in (CLS, LAST):
        ends = np.zeros_like(counts) if settings.pooling == CLS else counts - 1
        chosen: Floats = states[np.arange(len(states)), ends]
        return chosen
    mask = np.arange(length) < counts[:, None]
    if settings.pooling == MEAN:
        summed: Floats = (mask.astype(np.float32)[:, None] @ states)[:, 0]
        summed /= counts[:, None]
        return summed
    largest: Floats = np.where(mask[:, :, None], states, np.float32(-np.inf)).max(axis=1)
    return largest


def finished(vectors: Floats, settings: EmbeddingSettings, dimensions: int | None) -> Floats:
    """Return the vectors cut to their first `dimensions`, and of length 1 where the settings say so."""
    cut = vectors[:, :dimensions]
    if not settings.normalize:
        return cut
    norms = np.sqrt(np.einsum("ij,ij->i", cut, cut, dtype=np.float64))  # squares of large numbers pass float32
    scaled: Floats = (cut / np.maximum(norms, LEAST_NORM)[:, None]).astype(np.float32)
    return scaled
