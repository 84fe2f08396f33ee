"""Ray's own HTTP proxy in front of a replica that passes calls on to a server: the peer of `on_ray`.

    python pass_on.py http://HOST:PORT PROXY_PORT

It runs in Ray's environment, and ends with its standard input.
"""

# Ray is in an environment of its own.
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import sys

import aiohttp
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import Response


@serve.deployment(max_ongoing_requests=64)
class PassOn:
    """A replica that sends each request to a server as it came, and gives back the answer."""

    def __init__(self, server: str) -> None:
        self.server = server
        self.session: aiohttp.ClientSession | None = None

    async def __call__(self, request: Request) -> Response:
        """Pass one call on."""
        self.session = self.session or aiohttp.ClientSession()
        headers = {name: value for name, value in request.headers.items() if name not in ("host", "content-length")}
        url, body = f"{self.server}{request.url.path}", await request.body()
        async with self.session.request(request.method, url, data=body, headers=headers) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() != "content-length"}
            return Response(await answer.read(), answer.status, kept)


if __name__ == "__main__":
    ray.init(log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[2])})
    serve.run(PassOn.options(ray_actor_options={"num_cpus": 0}).bind(sys.argv[1]))
    print("ready", flush=True)
    sys.stdin.read()
    serve.shutdown()
