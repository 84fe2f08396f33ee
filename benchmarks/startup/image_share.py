"""What a hardened container costs in latency: the same load on a server in it and outside of it, by turns.

The container has no privilege, a read-only root and Docker's 64 MB of /dev/shm; the other server is started by root.
Both have the models of a mix with targets of three times isolated, and the same compiled models and profiles.
"""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean, median

from google.protobuf import text_format

from benchmarks.serving.servers import QOS_PARAMETER, warm_up
from gangway.clients.open_loop import RAW, drive
from gangway.protos import model_config_pb2 as mc
from gangway.workload.arrivals import poisson_for
from gangway.workload.mix import Mix, capacity_per_s, read_mix
from gangway.workload.outcomes import summarise
from gangway.workload.qos import Qos
from testing.image.build import Images, build
from testing.image.container import container
from testing.image.docker import Docker, docker
from testing.isolated import Reference
from testing.live_server import live_server
from testing.reference import Example, example_of
from testing.report import Row, option_parser, start_report
from testing.repository import GANGWAY, ensure_zoo, onnx_file

TARGET = 3.0
POINTS_AT_MOST = 2.0  # percent of the requests
CALL_TIMEOUT_S = 30
USER = 1000  # of the images
PROFILE_SECONDS = 6
OUTSIDE, CONTAINER = "outside", "container"  # also the names of their caches


def main() -> int:
    """Run the benchmark; status 0 if the container is within its bound, else 1."""
    parser = option_parser(__doc__ or "")
    parser.add_argument("--mix", default="light")
    parser.add_argument("--share", type=float, default=0.35, help="of capacity, as in benchmarks.serving (.35)")
    parser.add_argument("--seeds", type=int, default=3, help="pairs of runs, each with a seed of its own (3)")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a run (20)")
    options = parser.parse_args()
    report = start_report(f"Container and not: {options.mix} at {options.share} of capacity")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder.chmod(0o755)
        names = read_mix(options.mix).names
        models = ensure_zoo(folder / "models", names)
        examples = {name: example_of(name, onnx_file(models, name)) for name in names}
        isolated_us = Reference(models, examples).isolated_us(names)
        mix = read_mix(options.mix).with_qos(Qos(multiple=TARGET)).resolve(isolated_us)
        rate_per_s = options.share * capacity_per_s(mix, isolated_us)
        for name in names:
            _set_target(models / name / "config.pbtxt", TARGET * isolated_us[name] / 1e3)
            command = [*GANGWAY, "profile", f"--cache-dir={folder}/{OUTSIDE}", f"--seconds={PROFILE_SECONDS}"]
            subprocess.run([*command, str(models / name)], check=True, stdout=subprocess.DEVNULL)
        shutil.copytree(folder / OUTSIDE, folder / CONTAINER)
        for path in (folder / CONTAINER, *(folder / CONTAINER).rglob("*")):
            shutil.chown(path, USER, USER)
        daemon = stack.enter_context(docker())
        images = build(daemon)
        shares: dict[str, list[Mapping[str, float]]] = {OUTSIDE: [], CONTAINER: []}
        for seed in range(options.seeds):
            for where, found in shares.items():
                with _server(where, daemon, images, models, folder) as url:
                    warm_up(url, examples)
                    found.append(_in_time(url, mix, examples, isolated_us, rate_per_s, options.seconds, seed))
        rows: list[Row] = [
            {"seed": seed, "server": where, **{name: 100 * share for name, share in found[seed].items()}}
            for seed in range(options.seeds)
            for where, found in shares.items()
        ]
        report.table(f"in time, %, {rate_per_s:.1f} requests a second", rows)
        means = {where: [100 * mean(one.values()) for one in found] for where, found in shares.items()}
        less = median(a - b for a, b in zip(means[OUTSIDE], means[CONTAINER], strict=True))
        report.target("container: fewer in time, points, median of the seeds", less, POINTS_AT_MOST)
    return report.finish(options.json)


def _set_target(config: Path, target_ms: float) -> None:
    parsed = text_format.Parse(config.read_text(), mc.ModelConfig())
    parsed.parameters[QOS_PARAMETER].string_value = f"{target_ms:.3f}"
    config.write_text(text_format.MessageToString(parsed))


@contextmanager
def _server(where: str, daemon: Docker, images: Images, models: Path, folder: Path) -> Iterator[str]:
    """Serve with a cache of its own; yield the address."""
    if where == OUTSIDE:
        with live_server(models, [f"--cache-dir={folder}/{OUTSIDE}"]) as server:
            yield server.url
        return
    command = ("serve", "--model-repository=/models", "--cache-dir=/cache", "--no-profile")
    with container(daemon, images.full, models, f"{folder}/{CONTAINER}", command=command) as server:
        server.wait_until_ready()
        yield server.url


def _in_time(
    url: str,
    mix: Mix,
    examples: Mapping[str, Example],
    isolated_us: Mapping[str, float],
    rate_per_s: float,
    seconds: float,
    seed: int,
) -> dict[str, float]:
    """Return the share of each model's requests that were answered within the target."""
    requests = {name: examples[name].request for name in mix.names}
    arrivals = poisson_for(mix, rate_per_s, seconds, seed)
    run = drive(url, requests, arrivals, CALL_TIMEOUT_S, client=RAW)
    isolated = [isolated_us[name] for name in mix.names]
    summary = summarise(run.outcomes, {"3x": [TARGET * one for one in isolated]}, isolated, seconds)
    return {row.name: row.satisfied["3x"] or 0.0 for row in summary.models}


if __name__ == "__main__":
    sys.exit(main())
