"""Batching: splits beside fat gangs and onnxruntime, odd sizes, steps of load, saturation beside Triton, light load.

Every part takes a minute or two for each of its models; docs/explanation/batching.md says what each measures and how.
"""

import os
import sys
from collections.abc import Callable, Mapping

from benchmarks.batching.estimator import run_estimator
from benchmarks.batching.latency import ODD_MODELS, PAPERS_MODELS, run_odd, run_split
from benchmarks.batching.poisson import run_poisson
from benchmarks.batching.saturation import MODELS as LOADED_MODELS
from benchmarks.batching.saturation import configuration_of, run_saturation
from benchmarks.batching.setup import MAX_ROWS, Setting
from benchmarks.batching.step import STEP_MODELS, run_step
from gangway.server.system import keep_freed_memory
from testing.fetch.triton import fetch
from testing.fetching import FetchError
from testing.report import Report, add_repository_option, option_parser, start_report

PARTS: Mapping[str, Callable[[Report, Setting], None]] = {
    "prepare": lambda _, setting: prepare(setting),
    "split": run_split,
    "odd": run_odd,
    "step": run_step,
    "saturation": run_saturation,
    "poisson": run_poisson,
    "estimator": run_estimator,
}


def prepare(setting: Setting) -> None:
    """Write, compile and profile all models, and fetch Triton: so that the other parts find everything."""
    setting.models_or(sorted({*PAPERS_MODELS, *ODD_MODELS, *STEP_MODELS, *LOADED_MODELS}))
    fetch()


def main() -> int:
    """Run the parts; return 1 when a target is missed, 2 when there is no Triton to be had."""
    parser = option_parser(__doc__ or "")
    add_repository_option(parser)
    add = parser.add_argument
    add("--parts", type=_names, default=",".join(PARTS), metavar="P[,P]", help="which parts")
    add("--models", type=_names, default="", metavar="M[,M]", help="models; empty: those of each part")
    add("--seconds", type=float, default=60, metavar="N", help="of measuring, for each model of a part")
    add("--batches", type=_numbers, default="1,2,4,8,16,32,64", metavar="B[,B]", help="of the part split")
    add("--triton", type=_names, default="1x2:8,2x1:8", metavar="C[,C]", help="instances x threads : rows of a batch")
    add("--regions", action="store_true", help="saturation: inputs in shared memory instead of in messages")
    add("--profile-seconds", type=float, default=None, metavar="N", help="for a model that has no profile yet")
    add("--max-cores", type=int, default=2, metavar="N", help="use so many cores")
    options = parser.parse_args()
    keep_freed_memory()  # else a client's page faults are 20 of 350 ms for a message of 38 MB
    try:
        parts = {name: PARTS[name] for name in options.parts}
        for text in options.triton:
            configuration_of(text)
    except (KeyError, ValueError) as error:
        parser.error(f"unknown: {error}; parts are {', '.join(PARTS)}")
    if not set(options.batches) <= set(range(1, MAX_ROWS + 1)):
        parser.error(f"batches have 1 to {MAX_ROWS} rows")
    cores = sorted(os.sched_getaffinity(0))[: options.max_cores]
    setting = Setting(
        repository=options.repository,
        models=options.models,
        seconds=options.seconds,
        cores=cores,
        triton=options.triton,
        regions=options.regions,
        batches=options.batches,
        profile_seconds=options.profile_seconds,
    )
    report = start_report("Batching")
    try:
        for run in parts.values():
            run(report, setting)
    except FetchError as error:
        print(f"batching: {error}", file=sys.stderr)
        return 2
    return report.finish(options.json)


def _names(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


if __name__ == "__main__":
    sys.exit(main())
