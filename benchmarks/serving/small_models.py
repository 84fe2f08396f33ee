"""Small models beside long ones, all with the zoo's target of 3x: who is in time, and what the long ones lose by it.

By turns, one server is asked for the long models alone, and for them and the small one. Both runs of a round have the
same arrivals of the long ones. Targets are the server's own; latency counts from the scheduled arrival.
"""

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from gangway.clients.connection import ServerConnection
from gangway.clients.open_loop import drive
from gangway.clients.perf.prepare import configured_targets, measure_isolated, prepare_requests
from gangway.workload.arrivals import Arrivals, poisson_for
from gangway.workload.mix import Mix, MixModel, capacity_per_s
from gangway.workload.outcomes import OutcomeRow as Outcome
from gangway.workload.outcomes import summarise
from testing.live_server import live_server
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import ensure_profiles, ensure_zoo

ON_TIME = 0.95
LOSS_AT_MOST = 0.03  # of the long ones' queries in time
TIMEOUT_S = 30.0


def merged(long: Arrivals, small: Arrivals, models: int) -> Arrivals:
    """Return both; models of the second are numbered after the first ones, of which there are so many."""
    times_us = np.concatenate([long.times_us, small.times_us])
    numbers = np.concatenate([long.models, small.models + models])
    order = np.argsort(times_us, kind="stable")
    return Arrivals(times_us[order], numbers[order])


def ask(
    url: str, requests: Mapping[str, bytes], arrivals: Arrivals, targets_us: Sequence[float | None]
) -> list[Outcome]:
    """Return how the requests of each model ended, of those that were asked."""
    outcomes = drive(url, requests, arrivals, TIMEOUT_S).outcomes
    return [row for row in summarise(outcomes, {"target": targets_us}).models if row.queries]


def share(outcome: Outcome) -> float:
    """Return which share was in time; of a model without a target none."""
    return outcome.satisfied["target"] or 0.0


def _row(what: str, number: int, outcome: Outcome) -> Row:
    return {
        "round": number,
        "asked": what,
        "model": outcome.name,
        "queries": outcome.queries,
        "in time": share(outcome),
        "p50 ms": (outcome.p50_us or 0.0) / 1e3,
        "p99 ms": (outcome.p99_us or 0.0) / 1e3,
    }


def measure(report: Report, url: str, names: Sequence[str], options: argparse.Namespace) -> None:
    """Ask for the long models alone and with the small one, the last of `names`, by turns; note goals."""
    with ServerConnection(url, TIMEOUT_S) as connection:
        requests = prepare_requests(connection, names, "random", 0)
        targets = configured_targets(connection, requests)
    isolated_us = measure_isolated(url, requests, TIMEOUT_S)
    targets_us = [qos.resolve_us(isolated_us[name]) if qos else None for name, qos in targets.items()]
    pairs = zip(names, targets_us, strict=True)
    report.table(
        "targets",
        [{"model": name, "isolated ms": isolated_us[name] / 1e3, "target ms": (us or 0.0) / 1e3} for name, us in pairs],
    )
    mix = Mix("long", tuple(MixModel(name, 1 / isolated_us[name]) for name in names[:-1])).resolve()
    small = Mix("small", (MixModel(names[-1], 1.0),)).resolve()
    rate_per_s = options.share * capacity_per_s(mix, isolated_us)
    rows: list[Row] = []
    in_time, lost = [], []
    for number in range(1, options.rounds + 1):
        long = poisson_for(mix, rate_per_s, options.seconds, number)
        both = merged(long, poisson_for(small, options.rate, options.seconds, number), len(mix.models))
        alone, (*beside, mine) = (ask(url, requests, arrivals, targets_us) for arrivals in (long, both))
        rows += [_row("alone", number, each) for each in alone] + [
            _row("beside", number, each) for each in (*beside, mine)
        ]
        in_time.append(share(mine))
        lost.append(min(map(share, alone)) - min(map(share, beside)))
    report.table("who is in time", rows)
    report.goal(f"{names[-1]} in time, median of the rounds", median(in_time), ON_TIME)
    report.target("share in time that the worst of the long ones loses, median", median(lost), LOSS_AT_MOST)


def main() -> int:
    """Run the benchmark; return 1 when a goal is missed."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--small", default="mlp", help="model of microseconds")
    parser.add_argument("--rate", type=float, default=70.0, help="of the small model, queries a second")
    parser.add_argument("--long", default="resnet50,bert_base", help="models that share the load equally")
    parser.add_argument("--share", type=float, default=0.45, help="of capacity, that the long ones are asked for")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run")
    parser.add_argument("--rounds", type=int, default=3, help="each has its seed")
    options = parser.parse_args()
    names = [*options.long.split(","), options.small]
    ensure_zoo(options.repository, names)
    ensure_profiles(options.repository, names)
    report = start_report("Small models beside long ones: who is in time")
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            Path(folder, name).symlink_to((options.repository / name).resolve())
        with live_server(Path(folder)) as server:
            measure(report, server.url, names, options)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
