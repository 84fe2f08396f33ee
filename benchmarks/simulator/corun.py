"""How much models disturb each other: one on the first core, another on the second, in turns with the first one alone.

Real workers, no server. The simulator's level of interference per demand (`simulator/scenario.py`) is compared with it.
"""

import select
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

from gangway.artifact.cache import default_cache_dir
from gangway.artifact.reader import read_manifest
from gangway.executor.launch import available_cores
from gangway.measure.model_runner import ModelRunner
from gangway.simulator.measured import one_row, read_measured, shipped_models
from gangway.simulator.scaling import LEVEL_OF_A_FULL_CORE, scale_model
from testing.report import Report, Row, add_repository_option, option_parser, start_report
from testing.repository import compile_model, ensure_zoo

OTHER = "--other"  # this module as the process on the second core: OTHER KEY
SAMPLE_US = 40_000.0
GO, PAUSE = "go", "pause"


def run_other(key: str) -> None:
    """Run a model over and over on the second core between GO and PAUSE on standard input; answer each line."""
    cache = default_cache_dir()
    with ModelRunner(cache, read_manifest(cache / key), available_cores()[1:2], 1) as runner:
        runner.run(1, 1)
        print("ready", flush=True)
        working = False
        while True:
            if not working or select.select([sys.stdin], [], [], 0)[0]:
                line = sys.stdin.readline().strip()
                if not line:
                    return
                working = line == GO
                print("heard", flush=True)
            if working:
                runner.run(1, 1)


class Other:
    """The process on the second core."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._in, self._out = process.stdin, process.stdout
        self._out.readline()

    def tell(self, what: str) -> None:
        """Let it work, or pause; return when it does."""
        self._in.write(what + "\n")
        self._in.flush()
        self._out.readline()


@contextmanager
def other_running(key: str) -> Iterator[Other]:
    """Start the process on the second core; it ends with the block."""
    command = [sys.executable, "-m", "benchmarks.simulator.corun", OTHER, key]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Other(process)
        finally:
            process.kill()


def slowdowns(runners: Mapping[str, ModelRunner], other: Other, rounds: int) -> dict[str, float]:
    """Return by how much longer each model takes beside the other: the best of some medians, in turns."""
    best: dict[tuple[str, str], float] = {}
    for _ in range(rounds):
        for state in (PAUSE, GO):
            other.tell(state)
            for name, runner in runners.items():
                first_us = runner.run(1, 1).total_us
                count = max(1, int(SAMPLE_US / first_us))
                sample_us = statistics.median(runner.run(1, 1).total_us for _ in range(count))
                best[name, state] = min(sample_us, best.get((name, state), float("inf")))
    other.tell(PAUSE)
    return {name: best[name, GO] / best[name, PAUSE] - 1 for name in runners}


def main() -> int:
    """Run the benchmark."""
    if sys.argv[1:2] == [OTHER]:
        run_other(sys.argv[2])
        return 0
    parser = option_parser("models beside each other, one core each")
    add_repository_option(parser)
    parser.add_argument("--models", nargs="+", default=sorted(shipped_models()), help="that the simulator knows")
    parser.add_argument("--rounds", type=int, default=3, help="of alone and beside")
    options = parser.parse_args()
    report = start_report("models beside each other")
    if len(available_cores()) < 2:
        parser.error("it takes two cores")
    measure(options.models, ensure_zoo(options.repository, options.models).resolve(), options.rounds, report)
    return report.finish(options.json)


def measure(names: Sequence[str], repository: Path, rounds: int, report: Report) -> None:
    """Measure every pair; report slowdowns, and the level per demand that fits them best."""
    artifacts = {name: compile_model(repository, name) for name in names}
    models = {name: scale_model(one_row(read_measured(shipped_models()[name])), 1, 0) for name in names}
    alone_us = {name: model.isolated_us for name, model in models.items()}
    demand = {name: sum(model.memory_us) / alone_us[name] for name, model in models.items()}
    slope = {
        name: sum(model.latency_us[layer][0][0] * model.slope[layer][0] for layer in range(model.layers))
        / alone_us[name]
        for name, model in models.items()
    }
    rows: list[Row] = []
    expected, seen = [], []
    with ExitStack() as stack:
        first = available_cores()[:1]
        runners = {
            name: stack.enter_context(ModelRunner(path.parent, read_manifest(path), first, 1))
            for name, path in artifacts.items()
        }
        for beside in names:
            with other_running(artifacts[beside].name) as other:
                found = slowdowns(runners, other, rounds)
            rows.append({"beside": beside, "demand": demand[beside], **{name: found[name] * 100 for name in names}})
            expected += [slope[name] * demand[beside] for name in names]
            seen += [found[name] for name in names]
    report.table("slowdown in percent", rows)
    x, y = np.array(expected), np.array(seen)
    fit: Row = {
        "median slowdown %": float(np.median(y)) * 100,
        "mean slowdown %": float(y.mean()) * 100,
        "level per demand, least squares": float(x @ y / (x @ x)),
        "the simulator's": LEVEL_OF_A_FULL_CORE,
        "correlation": float(np.corrcoef(x, y)[0, 1]),
    }
    report.table("all pairs", [fit])


if __name__ == "__main__":
    sys.exit(main())
