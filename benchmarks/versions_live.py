"""Versions of a tuned model in a live server while a generator takes memory bandwidth, by turns with no load.

The server has all cores; generated interference (`measure/interference.py`) runs on all but the first one. A single
client asks for one row after the other. With `gangway` versions follow the level, with `gangway:without=interference`
they do not. The model has to be tuned and profiled before (`gangway tune`, `gangway profile`), and to depend on memory.
"""

import re
import statistics
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from benchmarks.serving.servers import warm_up, write_repository
from gangway.executor.launch import available_cores
from gangway.measure.interference import IDLE, Generators, Load
from gangway.measure.machine import l3_bytes
from testing.live_server import LiveServer, live_server
from testing.load import raw_channel, raw_infer
from testing.reference import Example, example_of
from testing.report import Row, add_repository_option, option_parser, start_report
from testing.repository import ensure_zoo, onnx_file

SCHEDULERS = ("gangway", "gangway:without=interference")
LOADS: tuple[Load, ...] = (IDLE, ("stream", 100))
SETTLE_S = 0.5  # until the level says what the load is: its window is a quarter of a second
COUNTERS = ("gangway_blocks_total", "gangway_version_layers_total")


def counters(server: LiveServer) -> dict[str, float]:
    """Return the level of interference, the sums of COUNTERS, and the requests by version."""
    with urllib.request.urlopen(server.metrics_url) as page:
        lines = page.read().decode().splitlines()
    found: dict[str, float] = {}
    for line in lines:
        if match := re.match(r'(gangway_\w+)(?:{.*?(?:kernel_version="(\d)")?})? (\S+)$', line):
            name = f"version {match[2]}" if match[2] else match[1]
            found[name] = found.get(name, 0.0) + float(match[3])
    return found


def measure(server: LiveServer, example: Example, seconds: float) -> dict[str, float]:
    """Ask for so long; return the median latency, the level at the end, and what was counted meanwhile."""
    times_ms: list[float] = []
    with raw_channel(server.url) as channel:
        infer = raw_infer(channel)
        settled = time.monotonic() + SETTLE_S
        while time.monotonic() < settled:
            infer(example.request, timeout=10)
        before = counters(server)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            begin = time.monotonic()
            infer(example.request, timeout=10)
            times_ms.append(1e3 * (time.monotonic() - begin))
    after = counters(server)
    names = [*COUNTERS, *sorted(name for name in after if name.startswith("version "))]
    counted = {name: after.get(name, 0.0) - before.get(name, 0.0) for name in names}
    level = (before["gangway_interference_level"] + after["gangway_interference_level"]) / 2
    return {"p50 ms": statistics.median(times_ms), "queries": len(times_ms), "level": level, **counted}


def main() -> int:
    """Measure and report; 0 if several versions were used beside the load."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--model", default="mobilenetv2")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load in each round")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    others = available_cores()[1:]
    if not others:
        sys.exit("interference needs a second core")
    report = start_report("versions beside interference")
    ensure_zoo(options.repository, [options.model])
    example = example_of(options.model, onnx_file(options.repository, options.model))
    rounds: dict[tuple[str, Load], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder, Generators(others, l3_bytes()) as generators:
        write_repository(Path(folder), options.repository, {options.model: "3x"})
        for scheduler in SCHEDULERS * options.rounds:
            with live_server(Path(folder), [f"--scheduler={scheduler}"]) as server:
                warm_up(server.url, {options.model: example})
                for load in LOADS:
                    generators.set(*load)
                    rounds.setdefault((scheduler, load), []).append(measure(server, example, options.seconds))
                generators.set(*IDLE)
    rows: list[Row] = []
    used = 0.0
    for (scheduler, (kind, share)), found in rounds.items():
        medians: Row = {name: statistics.median(one.get(name, 0.0) for one in found) for name in found[0]}
        rows.append({"scheduler": scheduler, "load": f"{kind} {share} %" if kind else "none", **medians})
        if scheduler == SCHEDULERS[0] and kind:
            used = sum(1 for name, value in found[0].items() if name.startswith("version ") and value)
    report.table(f"{options.model}, medians of {options.rounds} rounds by turns", rows)
    report.goal("versions used beside the load", used, 2)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
