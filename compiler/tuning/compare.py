"""`python -m gangway.compiler.tuning.compare PATH`: TVM's own search beside our templates, for the longest kernels.

It writes JSON lines to --answers-fd, one per kernel of --kernels (numbers as in `gangway.compiler.tuning`) that can be
searched for: {"kernel": 3, "flops": N, "template_us": A, "searched_us": B}; or, at the end, {"error": "..."}.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gangway.compiler.errors import ModelError
from gangway.compiler.importer import read_graph
from gangway.compiler.job import lower_graph
from gangway.compiler.jobs import find_models
from gangway.compiler.target import detect
from gangway.compiler.tuning.metaschedule import compare, searchable
from gangway.compiler.tuning.space import explore


def main(argv: Sequence[str]) -> int:
    """Compare one kernel after the other; return the exit code."""
    options = _parser().parse_args(argv)

    def report(message: dict[str, Any]) -> None:
        os.write(options.answers_fd, json.dumps(message).encode() + b"\n")

    try:
        target = detect()
        steps, _ = lower_graph(read_graph(find_models(options.path)[-1][1]), target.lanes)
        kernels = explore(steps, target, 1).kernels
        for number in map(int, options.kernels.split(",")):
            spec = kernels[number].plans[0].spec
            if searchable(spec):
                template_us, searched_us = compare(spec, target, options.trials)  # type: ignore[arg-type]
                times = {"template_us": template_us, "searched_us": searched_us}
                report({"kernel": number, "flops": spec.flops, **times})
    except (ModelError, RuntimeError, OSError) as error:
        report({"error": str(error)})
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gangway.compiler.tuning.compare", description=__doc__)
    parser.add_argument("path", type=Path, metavar="PATH", help="an .onnx file, or a model directory (newest version)")
    parser.add_argument("--kernels", required=True, metavar="LIST", help="numbers of kernels, like 3,5")
    parser.add_argument("--trials", type=int, required=True, metavar="N", help="trials of each search")
    parser.add_argument("--answers-fd", type=int, required=True, metavar="N", help="file descriptor for JSON lines")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
