"""`python -m gangway.compiler.tuning PATH`: makes artifacts with other versions of a model's layers, as ordered.

It writes JSON lines to --answers-fd and reads orders, JSON lines too, from standard input until that ends:
  {"phase": "kernels", "done": 8, "total": 32}     zero or more, at any time
  {"key": ..., "kernels": [...], "layers": [...]}  once, when the artifact of static choices is in the cache: its key,
                                                   name, operator, uses and candidates of each distinct kernel, and the
                                                   number of each layer's kernel
  order  {"folder": F, "versions": [[0, 1], ...]}  of each kernel, the numbers of the candidates that the artifact F has
  {"folder": F}                                    F is there
  {"error": "..."}                                 the end of all; exit code 1

Kernels are kept between orders, so none is compiled twice.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gangway.artifact.cache import Cache, add_dimension
from gangway.artifact.format import Engine, Manifest
from gangway.compiler.arguments import CompileOptions, find_models
from gangway.compiler.errors import ModelError
from gangway.compiler.key import require_compiler
from gangway.compiler.pipeline import CompileResult, compile_static
from gangway.compiler.target import UnsupportedTargetError, detect

Report = Callable[[dict[str, Any]], None]


def main(argv: Sequence[str]) -> int:
    """Carry out orders until standard input ends; return the exit code."""
    options = _parser().parse_args(argv)

    def report(message: dict[str, Any]) -> None:
        os.write(options.answers_fd, json.dumps(message).encode() + b"\n")

    try:
        _serve_orders(options, report)
    except (ModelError, UnsupportedTargetError, OSError, ValueError) as error:
        with suppress(BrokenPipeError):  # the process that gave orders has ended
            report({"error": str(error)})
        return 1
    return 0


def _serve_orders(options: argparse.Namespace, report: Report) -> None:
    name, path = find_models(options.path)[-1]
    target, dimensions = detect(), dict(options.dimension)

    def progress(phase: str, done: int, total: int) -> None:
        report({"phase": phase, "done": done, "total": total})

    compiled = compile_static(path, name, Cache(options.cache_dir), target, progress, CompileOptions(dimensions))
    require_compiler("other kernels are to be compiled")
    if compiled.manifest.engine is not Engine.NATIVE:
        raise ModelError(f"{name} is left to onnxruntime: {compiled.manifest.fallback_reason}")
    _answer_orders(path, dimensions, compiled, options.trials, options.scratch, report)


def _answer_orders(
    path: Path, dimensions: Mapping[str, int], compiled: CompileResult, trials: int, scratch: Path, report: Report
) -> None:
    from gangway.compiler.job import steps_of  # noqa: PLC0415 - imports TVM: a second
    from gangway.compiler.variants import KernelStore, candidate, explore, write_variant  # noqa: PLC0415

    manifest: Manifest = compiled.manifest
    steps = steps_of(path, dimensions, manifest)
    space = explore(steps, manifest.target, trials)
    kernels = [
        {
            "name": kernel.name,
            "operator": kernel.operator,
            "uses": kernel.uses,
            "candidates": [asdict(candidate(plan)) for plan in kernel.plans],
        }
        for kernel in space.kernels
    ]
    report({"key": manifest.key, "kernels": kernels, "layers": space.layers})
    store = KernelStore(scratch, manifest.target)
    for line in sys.stdin:
        order = json.loads(line)
        chosen = [
            tuple(kernel.plans[number] for number in numbers)
            for kernel, numbers in zip(space.kernels, order["versions"], strict=True)
        ]
        store.build(
            (plan for plans in chosen for plan in plans),
            lambda done, total: report({"phase": "kernels", "done": done, "total": total}),
        )
        versions = [chosen[number] for number in space.layers]
        write_variant(compiled.folder, manifest, steps, versions, store, Path(order["folder"]))
        report({"folder": order["folder"]})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gangway.compiler.tuning", description=__doc__)
    parser.add_argument("path", type=Path, metavar="PATH", help="an .onnx file, or a model directory (newest version)")
    parser.add_argument("--cache-dir", type=Path, required=True, metavar="DIR", help="where artifacts are kept")
    add_dimension(parser)
    parser.add_argument("--trials", type=int, required=True, metavar="N", help="candidates of a kernel at most")
    parser.add_argument("--scratch", type=Path, required=True, metavar="DIR", help="for kernels; the caller removes it")
    parser.add_argument("--answers-fd", type=int, required=True, metavar="N", help="file descriptor for JSON lines")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
