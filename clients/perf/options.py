"""The options of `gangway perf`."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

from gangway.clients.connection import add_tls_options

DESCRIPTION = (
    "Send requests for several models to a KServe v2 or Triton server over gRPC, at times that do not depend on its"
    " answers, and say how many were answered in time. Latency counts from the scheduled arrival."
)
EPILOG = """exit status: 0 measured, 1 the server refused, 2 wrong argument or file, 3 no server or no answer in time

examples:
  gangway perf --mix resnet50=3,googlenet=1 --rate 20 --qos 3x,4x,5x
  gangway perf 10.0.0.7:8001 --mix light --search --each --qos 3x --json light.json --png light.png
  gangway perf --mix own.toml --trace arrivals.csv"""


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line; wrong arguments exit with 2. docs/reference/perf.md explains the options at length."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.search and (options.trace or options.scenario != "poisson"):
        parser.error("--search draws Poisson arrivals: it goes with neither --trace nor --scenario")
    if options.trace and (options.rate or options.scenario != "poisson"):
        parser.error("--trace says when requests leave: it goes with neither --rate nor --scenario")
    if not (options.search or options.trace or options.rate):
        parser.error("how much load? --rate, --search or --trace")
    return options


def _parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        "gangway perf", description=DESCRIPTION, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    result.add_argument("target", nargs="?", metavar="HOST:PORT", help="server, another way to say --url")
    result.add_argument(
        "-u", "--url", default="127.0.0.1:8001", metavar="HOST:PORT", help="server (default: %(default)s)"
    )
    result.add_argument(
        "--mix", required=True, help="light, medium, heavy or mix; a .toml or .json file; or MODEL=WEIGHT,..."
    )
    _add_load(result)
    _add_search(result)
    result.add_argument(
        "--qos",
        help="targets of all models: 3x (times isolated), 15 (ms), several (3x,4x), or config (the server's)",
    )
    result.add_argument(
        "--isolated",
        metavar="MODEL=MS,...",
        help="isolated latencies, or an earlier result.json (default: measured)",
    )
    result.add_argument("--input-data", default="random", help="random, zero, or a folder with MODEL/INPUT.npy")
    result.add_argument(
        "--timeout-ms", type=_positive, default=30_000, metavar="MS", help="of every request (default: %(default)g)"
    )
    result.add_argument("--json", type=Path, metavar="FILE", help="write everything measured")
    result.add_argument("--png", type=Path, metavar="FILE", help="draw latencies and, of a search, shares in time")
    add_tls_options(result)
    return result


def _add_load(result: argparse.ArgumentParser) -> None:
    load = result.add_argument_group("load")
    load.add_argument("--rate", type=_positive, metavar="R", help="queries per second; of a search, where it begins")
    load.add_argument("--trace", type=Path, metavar="FILE", help="arrivals from a CSV file: time_us, model")
    load.add_argument(
        "--scenario", choices=("poisson", "mlperf-server"), default="poisson", help="who draws the arrivals"
    )
    load.add_argument(
        "--seconds", type=_positive, default=10.0, metavar="S", help="length of a run (default: %(default)g)"
    )
    load.add_argument("--queries", type=_count, metavar="N", help="length of a run in queries, instead")
    load.add_argument(
        "--warmup", type=_not_negative, default=1.0, metavar="S", help="sent first, not counted (default: %(default)g)"
    )
    load.add_argument("--seed", type=int, default=0, help="of arrivals and inputs (default: %(default)s)")


def _add_search(result: argparse.ArgumentParser) -> None:
    search = result.add_argument_group("search")
    search.add_argument("--search", action="store_true", help="find the highest rate that reaches the goal")
    search.add_argument("--goal", type=_share, default=0.95, help="share of queries in time (default: %(default)g)")
    search.add_argument("--each", action="store_true", help="of each model's queries, not of all")
    search.add_argument("--step", type=_step, default=1.05, help="ratio of neighbouring rates (default: %(default)g)")
    search.add_argument(
        "--votes",
        type=_count,
        default=2,
        help="runs, each with a seed, that decide on a rate (default: %(default)s)",
    )


def _positive(text: str) -> float:
    value = _number(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got '{text}'")
    return value


def _not_negative(text: str) -> float:
    value = _number(text)
    if not value >= 0:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got '{text}'")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected a share above 0 and up to 1, got '{text}'")
    return value


def _step(text: str) -> float:
    value = _number(text)
    if not 1 < value <= 2:
        raise argparse.ArgumentTypeError(f"expected a ratio above 1 and up to 2, got '{text}'")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got '{text}'")
    return int(text)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"expected a number, got '{text}'")
    return value
