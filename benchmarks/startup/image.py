"""The container images: their sizes, how long a container takes to be ready and to stop, and calls lost by a stop."""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from gangway.zoo import write_model
from testing.image.build import Images, build
from testing.image.container import Container, container, volume
from testing.image.docker import Docker, docker
from testing.load import Load, LoadProcess
from testing.reference import example_of
from testing.report import Report, option_parser, start_report

MODEL = "simple"
ROUNDS = 5
CLIENTS = 8
LOAD_SECONDS = 1.0
FULL_MB, SERVE_MB = 600.0, 240.0
COLD_READY_S, WARM_READY_S, STOP_S = 6.0, 2.0, 10.0
AFTER_STOP = "UNAVAILABLE"  # what a call gets that was sent after the stop


def ready_after_s(stopped: Container) -> float:
    """Start a container again; return seconds until its model is ready."""
    begin = time.monotonic()
    stopped.docker.run("start", stopped.name)
    stopped.wait_until_ready()
    return time.monotonic() - begin


def cold_ready_s(daemon: Docker, image: str, models: Path) -> float:
    """Return seconds until a new container has compiled the model and is ready."""
    with volume(daemon) as cache:
        begin = time.monotonic()
        with container(daemon, image, models, cache) as new:
            new.wait_until_ready()
            return time.monotonic() - begin


def stop_under_load(running: Container, models: Path) -> tuple[float, int, int]:
    """Stop a container while clients call it; return seconds, calls answered, and calls lost that had been sent."""
    example = example_of(MODEL, models / MODEL / "1" / "model.onnx")
    with LoadProcess(Load(running.url, example.request, example.outputs, CLIENTS)) as load:
        time.sleep(LOAD_SECONDS)
        begin_ns = time.monotonic_ns()
        running.docker.run("stop", running.name)
        seconds = (time.monotonic_ns() - begin_ns) / 1e9
        outcomes = load.stop().outcomes
    failed = [one for one in outcomes if one.result != "right"]
    lost = [one for one in failed if one.begin_ns < begin_ns or one.result != AFTER_STOP]
    return seconds, len(outcomes) - len(failed), len(lost)


def run(report: Report, daemon: Docker, images: Images) -> None:
    """Measure both images with the smallest model."""
    sizes = {name: daemon.size_bytes(name) / 1e6 for name in (images.full, images.serve)}
    with _models() as models, volume(daemon) as cache:
        cold_s = median(cold_ready_s(daemon, images.full, models) for _ in range(ROUNDS))
        with container(daemon, images.full, models, cache) as full:
            full.wait_until_ready()
            stops = []
            warm_s = []
            for _ in range(ROUNDS):
                stops.append(stop_under_load(full, models))
                warm_s.append(ready_after_s(full))
        with container(daemon, images.serve, models, cache) as serve:
            serve.wait_until_ready()
            serve.docker.run("stop", serve.name)
            serve_s = ready_after_s(serve)
    answered, lost = sum(stop[1] for stop in stops), sum(stop[2] for stop in stops)
    row = {"stop s": median(stop[0] for stop in stops), "answered": answered, "lost": lost}
    report.table(f"{ROUNDS} stops under load, {CLIENTS} clients of {MODEL}", [row])
    report.target("full image, MB", sizes[images.full], FULL_MB)
    report.target("serve image, MB", sizes[images.serve], SERVE_MB)
    report.target("full image: ready, cold, s", cold_s, COLD_READY_S)
    report.target("full image: ready, warm, s", median(warm_s), WARM_READY_S)
    report.target("serve image: ready, warm, s", serve_s, WARM_READY_S)
    report.target("longest stop under load, s", max(stop[0] for stop in stops), STOP_S)
    report.target("calls lost that had been sent", float(lost), 0.0)


@contextmanager
def _models() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)  # the container's user reads it
        write_model(folder, MODEL)
        yield folder


def main() -> int:
    """Run the benchmark; return 1 when a target is missed."""
    options = option_parser(__doc__ or "").parse_args()
    report = start_report("Container images")
    with docker() as daemon:
        run(report, daemon, build(daemon))
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
