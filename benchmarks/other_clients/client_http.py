"""Python's HTTP clients, and curl: `python client_http.py FOLDER HTTP_HOST:PORT`, in an environment that has them."""

import asyncio
import gzip
import http.client
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import aiohttp
import httpx  # pyright: ignore[reportMissingImports]
import requests
import urllib3
from client_checks import expect, run_checks

FOLDER, ADDRESS = Path(sys.argv[1]), sys.argv[2]
BASE = f"http://{ADDRESS}"
ECHO = f"{BASE}/v2/models/echo/infer"
CONCURRENT, ROUNDS, TIMEOUT_S = 50, 20, 60
PIECE_BYTES = 100_000
REFUSED_BYTES = 100 << 20
EXPECT = {"Expect": "100-continue"}
CHUNKED = {"Transfer-Encoding": "chunked"}


def file(name: str) -> bytes:
    """Return a file of the folder."""
    return (FOLDER / name).read_bytes()


def headers(kind: str, **more: str) -> dict[str, str]:
    """Return the headers of a request."""
    return {"Inference-Header-Content-Length": file(f"{kind}.json-bytes").decode(), **more}


def check(status: int, body: bytes, kind: str) -> None:
    """Raise AssertionError unless it is the right answer."""
    expect(status == 200 and body == file(f"{kind}.reply"), (status, body[:100]))


def pieces(body: bytes) -> Iterator[bytes]:
    """Yield a body piece by piece."""
    for at in range(0, len(body), PIECE_BYTES):
        yield body[at : at + PIECE_BYTES]


def by_requests(kind: str, rounds: int = 1, chunks: bool = False, **more: str) -> None:
    """Ask by requests, over one connection."""
    with requests.Session() as session:
        for _ in range(rounds):
            body = file(f"{kind}.body")
            sent = pieces(body) if chunks else body
            answer = session.post(ECHO, data=sent, headers=headers(kind, **more), timeout=TIMEOUT_S)
            check(answer.status_code, answer.content, kind)


def by_urllib3() -> None:
    """Ask by urllib3, many at a time over some connections."""
    with urllib3.PoolManager(maxsize=8) as pool, ThreadPoolExecutor(CONCURRENT) as threads:
        body, own = file("small.body"), headers("small")
        for answer in threads.map(lambda _: pool.request("POST", ECHO, body=body, headers=own), range(CONCURRENT)):
            check(answer.status, answer.data, "small")


def by_httpx(kind: str, **more: Any) -> None:
    """Ask by httpx."""
    with httpx.Client(timeout=TIMEOUT_S, **more) as client:
        answer = client.post(ECHO, content=file(f"{kind}.body"), headers=headers(kind))
        check(answer.status_code, answer.content, kind)


async def _by_aiohttp() -> None:
    async with aiohttp.ClientSession() as session:

        async def ask(
            kind: str, body: bytes, expects: bool = False, more: Mapping[str, str] = MappingProxyType({})
        ) -> None:
            async with session.post(ECHO, data=body, headers=headers(kind, **more), expect100=expects) as answer:
                check(answer.status, await answer.read(), kind)

        await asyncio.gather(*(ask("small", file("small.body")) for _ in range(CONCURRENT)))
        await ask("large", file("large.body"), expects=True)
        await ask("small", gzip.compress(file("small.body")), more={"Content-Encoding": "gzip"})


def by_aiohttp() -> None:
    """Ask by aiohttp: many at a time, waiting for 100 Continue, compressed."""
    asyncio.run(_by_aiohttp())


def by_curl(*flags: str, kind: str = "small", **more: str) -> None:
    """Ask by curl."""
    given = [word for header in headers(kind, **more).items() for word in ("-H", ": ".join(header))]
    sent = ["--data-binary", f"@{FOLDER}/{kind}.body"]
    check(200, _curl(*flags, *given, *sent, ECHO), kind)


def _curl(*flags: str) -> bytes:
    done = subprocess.run(["curl", "-sS", "--max-time", str(TIMEOUT_S), *flags], check=False, capture_output=True)
    expect(done.returncode == 0, done.stderr)
    return done.stdout


def wrong_port() -> None:
    """Who speaks HTTP/2 at once is told that this port does not."""
    told = _curl("-i", "--http2-prior-knowledge", f"{BASE}/v2/health/live")
    expect(b" 505" in told and b"HTTP/1.1" in told, told)


def refused() -> None:
    """Who sends a body of which nothing is wanted, all before it reads, reads why."""
    connection = http.client.HTTPConnection(ADDRESS, timeout=TIMEOUT_S)
    connection.request("POST", "/nobody", bytes(REFUSED_BYTES), {"Connection": "close"})
    expect(connection.getresponse().status == 404, "404")
    connection.close()


CHECKS = (
    ("requests: small", lambda: by_requests("small", ROUNDS)),
    ("requests: 16 MB", lambda: by_requests("large")),
    ("requests: chunks", lambda: by_requests("large", chunks=True)),
    ("requests: Connection: close", lambda: by_requests("large", Connection="close")),
    ("urllib3: many at a time", by_urllib3),
    ("httpx: small", lambda: by_httpx("small")),
    ("httpx: 16 MB", lambda: by_httpx("large")),
    ("httpx: HTTP/2 allowed", lambda: by_httpx("small", http2=True)),
    ("aiohttp", by_aiohttp),
    ("curl", by_curl),
    ("curl, HTTP/1.0", lambda: by_curl("-0")),
    ("curl, upgrade to HTTP/2 offered", lambda: by_curl("--http2", kind="large")),
    ("curl, chunks", lambda: by_curl(kind="large", **CHUNKED)),
    ("curl, expect", lambda: by_curl(kind="large", **EXPECT)),
    ("curl, HTTP/2 at once", wrong_port),
    ("100 MB that are refused", refused),
)

if __name__ == "__main__":
    sys.exit(run_checks(CHECKS))
