"""What servers on Ray cost: a small call by each way, Ray's own use of the machine, and a restart.

One server of one core, `simple`, one client that calls again when it has its answer, each way by turns: the server that
Ray keeps, the same through `gangway route`, and through Ray's proxy with a replica that passes calls on.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import tritonclient.http as triton

from benchmarks.many_machines.route import median_ms
from testing.fetch.ray import PYTHON, missing_ray, with_ray
from testing.live_router import live_router
from testing.live_server import free_port, is_ready
from testing.on_ray import OnRay, on_ray
from testing.processes import core_times, cpu_ns, descendants_of
from testing.report import Row, option_parser, start_report
from testing.repository import GANGWAY

ROUNDS = 10
IDLE_S = 10.0
PASS_ON = Path(__file__).with_name("pass_on.py")


def main() -> int:
    """Run the benchmark; status 1 where there is no Ray."""
    parser = option_parser("a small call to a server that Ray keeps, directly, routed, and through Ray's proxy")
    parser.add_argument("--calls", type=int, default=100, help="in each of the rounds, by each way")
    options = parser.parse_args()
    if missing_ray():
        print(missing_ray(), file=sys.stderr)
        return 1
    report = start_report("servers on Ray")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        subprocess.run([*GANGWAY, "zoo", str(folder / "models"), "simple"], check=True, stdout=subprocess.DEVNULL)
        kept = stack.enter_context(on_ray(folder / "models", folder / "ray.log"))
        (http_url,) = kept.http_urls
        with triton.InferenceServerClient(http_url) as client:
            client.load_model("simple")
        router = stack.enter_context(live_router(folder, kept.flags))
        proxy_url = stack.enter_context(_pass_on(f"http://{http_url}"))
        inputs = [triton.InferInput(name, [1, 16], "INT32") for name in ("INPUT0", "INPUT1")]
        for tensor in inputs:
            tensor.set_data_from_numpy(np.ones((1, 16), np.int32))
        ways: dict[str, Callable[[], object]] = {}
        for way, url in (("server", http_url), ("gangway route", router.http_url), ("Ray's proxy", proxy_url)):
            client = stack.enter_context(triton.InferenceServerClient(url))
            ways[way] = partial(client.infer, "simple", inputs)
        medians_ms: dict[str, list[float]] = {way: [] for way in ways}
        for _ in range(ROUNDS):
            for way, call in ways.items():
                medians_ms[way].append(median_ms(call, options.calls))
        direct_ms = statistics.median(medians_ms["server"])
        rows: list[Row] = [
            {
                "way": way,
                "p50, ms": statistics.median(found),
                "times direct": statistics.median(found) / direct_ms,
                "CPU of all a call, ms": _cpu_per_call_ms(ways[way], options.calls),
            }
            for way, found in medians_ms.items()
        ]
        report.table("calls over HTTP", rows)
        report.table("Ray itself", [{"CPU while idle, cores": _idle_cores(kept), "restart, s": _restart_s(kept)}])
    return report.finish(options.json)


@contextmanager
def _pass_on(server: str) -> Iterator[str]:
    """Yield where Ray's proxy answers for a server."""
    port = free_port()
    command = [str(PYTHON), str(PASS_ON), server, str(port)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=with_ray(), stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        while (line := process.stdout.readline()) and line != b"ready\n":
            pass
        yield f"127.0.0.1:{port}"
        assert process.stdin is not None
        process.stdin.close()


def _cpu_per_call_ms(call: Callable[[], object], count: int) -> float:
    before = core_times()
    for _ in range(count * ROUNDS):
        call()
    after = core_times()
    used_s = (after.busy_s - after.stolen_s) - (before.busy_s - before.stolen_s)
    return used_s * 1e3 / (count * ROUNDS)


def _idle_cores(kept: OnRay) -> float:
    """Return how many cores Ray's own processes use while nobody calls."""
    servers = {pid for server in kept.servers() for pid in (server, *descendants_of(server))}
    own = [pid for pid in descendants_of(kept.process.pid) if pid not in servers]
    begin_ns = sum(map(cpu_ns, own))
    time.sleep(IDLE_S)
    return (sum(map(cpu_ns, own)) - begin_ns) / 1e9 / IDLE_S


def _restart_s(kept: OnRay) -> float:
    """Kill a server, and return how long it takes Ray to have it back."""
    (server,) = kept.servers()
    for pid in (*descendants_of(server), server):
        os.kill(pid, signal.SIGKILL)
    begin = time.monotonic()
    while not is_ready(kept.urls[0]):
        time.sleep(0.05)
    return time.monotonic() - begin


if __name__ == "__main__":
    sys.exit(main())
