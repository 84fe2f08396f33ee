"""Clients that each ask again when they have an answer: a process of its own, with as little work as can be.

`python -m benchmarks.embeddings.clients` reads options and texts as JSON from its input, and writes what it has seen.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import uvloop

WARM_S = 0.5  # before it counts


class Seen(NamedTuple):
    """Of the time that counts. `times_ms`: of each request, as it ended; `failed`: with another status than 200."""

    seconds: float
    times_ms: list[float]
    failed: int


def ask(port: int, model: str, texts: Sequence[str], clients: int, seconds: float) -> Seen:
    """Have so many clients ask for so long. Raises CalledProcessError."""
    given = {"port": port, "model": model, "texts": list(texts), "clients": clients, "seconds": seconds}
    command = [sys.executable, "-m", "benchmarks.embeddings.clients"]
    ran = subprocess.run(command, input=json.dumps(given), capture_output=True, text=True, check=True)
    return Seen(*json.loads(ran.stdout))


async def _client(
    port: int, requests: Sequence[bytes], at: int, end_s: float, ended: list[tuple[float, float, int]]
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while (begin_s := time.perf_counter()) < end_s:
        writer.write(requests[at % len(requests)])
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        start = head.index(b"content-length:") + len(b"content-length:")
        await reader.readexactly(int(head[start : head.index(b"\r", start)]))
        now_s = time.perf_counter()
        ended.append((now_s, (now_s - begin_s) * 1e3, int(head[9:12])))
        at += 1
    writer.close()


async def _all(port: int, model: str, texts: Sequence[str], clients: int, seconds: float) -> Seen:
    requests = []
    for text in texts:
        body = json.dumps({"model": model, "input": text, "encoding_format": "base64"}).encode()
        head = (
            b"POST /v1/embeddings HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        )
        requests.append(head % len(body) + body)
    ended: list[tuple[float, float, int]] = []
    begin_s = time.perf_counter() + WARM_S
    step = max(1, len(requests) // clients)
    await asyncio.gather(
        *(_client(port, requests, number * step, begin_s + seconds, ended) for number in range(clients))
    )
    counted = [each for each in ended if begin_s < each[0] < begin_s + seconds]
    return Seen(seconds, [time_ms for _, time_ms, _ in counted], sum(status != 200 for *_, status in counted))


if __name__ == "__main__":
    print(json.dumps(uvloop.run(_all(**json.load(sys.stdin)))))
