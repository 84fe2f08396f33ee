"""`gangway capacity` beside a server: the highest rate that it predicts, and the one that `gangway perf` finds.

Models are profiled on this machine. Each mix has targets of so many times their latency alone. The client runs on the
same cores. `others`: the share of the cores that other processes used during the search. Where it is not near zero
nothing can be compared.
"""

import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.serving.servers import Served, serving
from gangway.workload.mix import Mix, capacity_per_s, parse_mix
from testing.processes import core_times
from testing.report import Row, add_repository_option, option_parser, start_report
from testing.repository import GANGWAY, compile_model, ensure_profiles, ensure_zoo, find_profile

CORES = 2
GOAL = 95
AT_MOST_APART = 0.15
SHARE = 0.5  # of what one request after the other makes: the load that is asked about
MIXES = ("resnet50=1,mobilenetv2=6", "googlenet=1,efficientnet_b0=2", "mobilenetv2=2,tiny_yolov2=1,resnet50=1")


def predicted_per_s(mix: Mix, rate_per_s: float, targets_ms: Mapping[str, float | str | None]) -> float:
    """Return the highest rate of all requests that `gangway capacity` says. Raises CalledProcessError."""
    loads = [f"{name}={share * rate_per_s}@{targets_ms[name]}"
             for name, share in zip(mix.names, mix.shares, strict=True)]  # fmt: skip
    command = [*GANGWAY, "capacity", *loads, f"--cores={CORES}", f"--goal={GOAL}", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)  # status 1: the load is not carried
    return float(json.loads(done.stdout)["highest"]) * rate_per_s


def measured_per_s(url: str, mix: Mix, rate_per_s: float, seconds: float, votes: int) -> float:
    """Return the highest rate that `gangway perf` finds, from a first one on. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [*GANGWAY, "perf", url, f"--mix={mix.name}", "--qos=config", "--search", "--each"]
        command += [f"--goal={GOAL / 100}", f"--rate={rate_per_s}", f"--seconds={seconds}", f"--votes={votes}"]
        subprocess.run([*command, f"--json={result}"], stdout=subprocess.DEVNULL, check=True)
        (found,) = json.loads(result.read_text())["found"].values()
    return float(found["rate_per_s"])


def main() -> int:
    """Measure all mixes; return 0 if each prediction is near enough."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--mixes", nargs="+", default=MIXES, metavar="MODEL=WEIGHT,...", help="what is measured")
    parser.add_argument("--multiple", type=float, default=5.0, help="targets, times the latency alone")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each run of the search")
    parser.add_argument("--votes", type=int, default=2, help="runs that decide on a rate")
    options = parser.parse_args()
    report = start_report("capacity: predicted and measured highest rates")
    rows: list[Row] = []
    for text in options.mixes:
        weights = parse_mix(text)
        mix = Mix(text, weights.models)
        ensure_zoo(options.repository, mix.names)
        ensure_profiles(options.repository, mix.names)
        alone_us = {name: _alone_us(options.repository, name) for name in mix.names}
        targets_ms = {name: round(options.multiple * alone_us[name] / 1e3, 3) for name in mix.names}
        predicted = predicted_per_s(mix, SHARE * capacity_per_s(mix, alone_us), targets_ms)
        with serving("gangway", options.repository, targets_ms) as server:
            begin, begin_s, used_s = core_times(), time.monotonic(), _used_s(server)
            measured = measured_per_s(server.url, mix, predicted, options.seconds, options.votes)
            cores_s = CORES * (time.monotonic() - begin_s)
            others = (core_times().busy_s - begin.busy_s - _used_s(server) + used_s) / cores_s
        ratio = predicted / measured if measured else math.inf
        rows.append(
            {"mix": text, "predicted, per s": predicted, "measured": measured, "ratio": ratio, "others": others}
        )
        report.target(f"{text}: apart", abs(ratio - 1), AT_MOST_APART)
    report.table(f"{GOAL} % of each model's requests within {options.multiple:g} times alone", rows)
    return report.finish(options.json)


def _used_s(server: Served) -> float:
    """Return the processor time of a server, of this process and of those that it has waited for."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return server.cpu_s() + sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _alone_us(repository: Path, model: str) -> float:
    """Return a model's latency on all cores, as profiled."""
    profile = find_profile(compile_model(repository, model))
    assert profile is not None, "ensure_profiles has made it"
    return profile.isolated_us[profile.cores.index(CORES)][0]


if __name__ == "__main__":
    sys.exit(main())
