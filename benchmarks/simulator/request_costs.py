"""What a request costs beside its layers where front end, scheduler, client and workers share two cores.

Models with requests of different sizes are asked at irregular times, less than one at a time on average. `way`: latency
without queue and computation. `beside`: processor time of all but the workers. `start`: by how much the computation
takes longer than in the profile, since caches are cold and the gang's cores are still busy with the request. Lines over
the bytes of inputs and outputs are fitted to way and processor time. The simulator's SHARED_CORES are made of them.
"""

import sys

import numpy as np

from benchmarks.simulator.live_run import Meter
from gangway.artifact.reader import read_manifest
from gangway.clients.connection import ServerConnection
from gangway.clients.open_loop import drive
from gangway.clients.perf.measure import server_counters
from gangway.clients.perf.prepare import prepare_requests
from gangway.workload.arrivals import poisson
from gangway.workload.mix import Mix, MixModel
from testing.live_server import live_server
from testing.report import Row, add_repository_option, option_parser, start_report
from testing.repository import compile_model, ensure_profiles, ensure_zoo, find_profile

MODELS = ("mobilenetv2", "googlenet", "resnet50", "tiny_yolov2")
CORES = 2


def main() -> int:
    """Measure all models; return 0."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    parser.add_argument("--models", nargs="+", default=MODELS, help="what is asked (%(default)s)")
    parser.add_argument("--seconds", type=float, default=12.0, help="for each model (%(default)s)")
    parser.add_argument("--load", type=float, default=0.3, help="of what one after the other makes (%(default)s)")
    options = parser.parse_args()
    report = start_report("what a request costs beside its layers")
    ensure_zoo(options.repository, options.models)
    ensure_profiles(options.repository, options.models)
    rows: list[Row] = []
    points = []
    with live_server(options.repository) as server, ServerConnection(server.url, 10) as connection:
        requests = prepare_requests(connection, options.models, "random", 0)
        for name in options.models:
            artifact = compile_model(options.repository, name)
            manifest, profile = read_manifest(artifact), find_profile(artifact)
            assert profile is not None, "ensure_profiles has made it"
            alone_us = profile.isolated_us[profile.cores.index(CORES)][0]
            rate_per_s = options.load * 1e6 / alone_us
            mix = Mix(name, (MixModel(name, 1.0),))
            arrivals = poisson(mix, rate_per_s, round(rate_per_s * options.seconds), seed=1)
            before, meter = server_counters(connection, [name]), Meter(server.pids())
            run = drive(server.url, {name: requests[name]}, arrivals)
            beside_us = (meter.serving_s() + run.cpu_s) * 1e6 / len(arrivals)
            others = meter.others()
            seen = server_counters(connection, [name])[name].since(before[name])
            way_us = float(run.outcomes.latency_us.mean()) - seen.mean_queue_us - seen.mean_compute_us
            size_mb = sum(tensor.row_bytes for tensor in (*manifest.inputs, *manifest.outputs)) / 1e6
            points.append((size_mb, way_us, beside_us))
            rows.append(
                {
                    "model": name,
                    "MB": size_mb,
                    "way us": way_us,
                    "beside us": beside_us,
                    "compute us": seen.mean_compute_us,
                    "start us": seen.mean_compute_us - alone_us,
                    "others": others,
                }
            )
    report.table(f"requests at irregular times, {options.load:.0%} of what one after the other makes", rows)
    sizes_mb, *costs = np.array(points).T
    fitted = []
    for name, cost_us in zip(("way", "beside"), costs, strict=True):
        per_mb, fixed = np.polyfit(sizes_mb, cost_us, 1).tolist()
        fitted.append({"line": name, "fixed us": fixed, "us per MB": per_mb})
    report.table("least squares", fitted)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
