"""The peer: `/v1/embeddings` by FastAPI, tokenizers and one session of onnxruntime, as such apps are usually written.

`plain`: each request runs by itself, in a thread of the app's pool. `joined`: one thread runs all that wait together,
padded to the longest.
"""

import argparse
import asyncio
import base64
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import orjson
import uvicorn  # pyright: ignore[reportMissingImports] - of the extra `bench`
from fastapi import FastAPI, Response  # pyright: ignore[reportMissingImports]
from pydantic import BaseModel
from tokenizers import Tokenizer

MOST_TEXTS = 32  # of a batch


class Body(BaseModel):
    """What a client sends."""

    model: str
    input: str | list[str]
    encoding_format: str = "float"


class Encoder:
    """Texts to vectors, by a folder as sentence-transformers writes it, with mean pooling."""

    def __init__(self, folder: Path, threads: int) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(
            str(folder / "1" / "model.onnx"), options, providers=["CPUExecutionProvider"]
        )
        self._names = [each.name for each in self._session.get_inputs()]
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.enable_padding()
        self._tokenizer.enable_truncation(256)

    def vectors(self, texts: Sequence[str]) -> tuple[Any, list[int]]:
        """Return a vector for each text, and how many tokens it has."""
        encoded = self._tokenizer.encode_batch_fast(list(texts))
        mask = np.array([each.attention_mask for each in encoded], np.int64)
        feeds = {
            "input_ids": np.array([each.ids for each in encoded], np.int64),
            "attention_mask": mask,
            "token_type_ids": np.zeros_like(mask),
        }
        states: Any = self._session.run(None, {name: feeds[name] for name in self._names})[0]
        weights = mask.astype(np.float32)[:, :, None]
        mean = (states * weights).sum(axis=1) / weights.sum(axis=1)
        return mean / np.linalg.norm(mean, axis=1, keepdims=True), mask.sum(axis=1).tolist()


def answer(body: Body, vectors: Any, counts: Sequence[int]) -> Response:
    """Return OpenAI's answer."""
    data = []
    for index, vector in enumerate(vectors):
        text = base64.b64encode(vector.tobytes()).decode() if body.encoding_format == "base64" else vector.tolist()
        data.append({"object": "embedding", "index": index, "embedding": text})
    usage = {"prompt_tokens": sum(counts), "total_tokens": sum(counts)}
    content = {"object": "list", "data": data, "model": body.model, "usage": usage}
    return Response(orjson.dumps(content), media_type="application/json")


def texts_of(body: Body) -> list[str]:
    """Return the texts of a request."""
    return [body.input] if isinstance(body.input, str) else body.input


def plain(encoder: Encoder) -> FastAPI:
    """Return the app without batches."""
    app = FastAPI()

    @app.post("/v1/embeddings")
    def embeddings(body: Body) -> Response:
        return answer(body, *encoder.vectors(texts_of(body)))

    return app


def joined(encoder: Encoder) -> FastAPI:
    """Return the app whose only thread computes all that waits together."""
    app = FastAPI()
    waiting: asyncio.Queue[tuple[list[str], asyncio.Future[Any]]] = asyncio.Queue()
    thread = ThreadPoolExecutor(1)
    tasks: list[asyncio.Task[None]] = []

    async def compute() -> None:
        loop = asyncio.get_running_loop()
        while True:
            some = [await waiting.get()]
            while not waiting.empty() and sum(len(texts) for texts, _ in some) < MOST_TEXTS:
                some.append(waiting.get_nowait())
            texts = [text for each, _ in some for text in each]
            vectors, counts = await loop.run_in_executor(thread, encoder.vectors, texts)
            at = 0
            for each, found in some:
                found.set_result((vectors[at : at + len(each)], counts[at : at + len(each)]))
                at += len(each)

    @app.post("/v1/embeddings")
    async def embeddings(body: Body) -> Response:
        if not tasks:
            tasks.append(asyncio.create_task(compute()))
        found: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        waiting.put_nowait((texts_of(body), found))
        return answer(body, *await found)

    return app


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("plain", "joined"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    encoder = Encoder(options.folder, options.threads)
    app = plain(encoder) if options.kind == "plain" else joined(encoder)
    uvicorn.run(app, port=options.port, log_level="warning", http="httptools", loop="uvloop")


if __name__ == "__main__":
    main()
