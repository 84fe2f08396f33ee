"""`python -m gangway.compiler PATH`: one compilation in a process of its own, supervised through JSON lines.

Lines on --progress-fd (or with --json on standard output), each one JSON object:
  {"phase": "kernels", "done": 8, "total": 32}    zero or more; phases as in `pipeline.py`
  {"warning": "..."}                              zero or more: damage that was found in the cache
  {"info": "..."}                                 zero or more: what the served model does not do as the file says
  {"key": "...", "folder": "...", "cached": true, "precision_note": ""}  the last line of a success
  {"error": "...", "kind": "model"}                the last line of a failure; kind as the exit code says
With --uncompiled REASON the model is left to onnxruntime for this reason, and not found by jobs without it.

With --serve there is no PATH: jobs are read from standard input, one JSON object a line, and each ends with a last line
as above. TVM stays loaded from one to the next. The process ends with its input, or when it has become too large, which
the last line says: {..., "ends": true}
  {"path": "PATH", "dimensions": {"NAME": SIZE}, "precision": {"name": "fp32", "min_cosine": 0.999}}
It may have "optional", "batch", "whole", "uncompiled", as the flags of these names say.
With "span": {"symbol": "NAME", "first": 1, "last": 64} there is one artifact for all these sizes, in float32.
A line {"look_up": ["PATH", ...]} compiles nothing. There is one line for each that the cache has, and the last line
says how many it has not:
  {"found": "PATH", "folder": "..."}
  {"absent": 1}
With --serve=stand-ins no model is compiled: unless the cache has it, onnxruntime is to serve it meanwhile, by an
artifact that is not found by other jobs. With sizes there is none, but an error. What makes stand-ins is imported when
a look-up has not found all.

SIGTERM ends it, and leaves nothing unfinished in the cache.

Exit codes: 0 compiled, left to onnxruntime, or found in the cache; 2 wrong arguments; 3 kind "model": the file is no
valid ONNX model; 4 kind "unsupported": valid, but neither the compiler nor onnxruntime can serve it; 5 kind "io": files
cannot be read or written, or there is no memory; 6 kind "internal": a bug of the compiler, its traceback is on standard
error. After 5 another attempt may succeed.
"""

import argparse
import importlib
import json
import logging
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gangway.artifact.cache import Cache, add_dimension, usable_cache_dir
from gangway.artifact.format import TargetSpec
from gangway.artifact.instances import SizeSpan
from gangway.artifact.precision import WantedPrecision, add_precision
from gangway.base.extras import COMPILER, missing_packages
from gangway.base.files import words_of
from gangway.base.json_codec import decode
from gangway.compiler.arguments import CompileOptions, find_models
from gangway.compiler.errors import ModelError, UnsupportedModelError
from gangway.compiler.pipeline import CompileResult, compile_model, find_compiled, make_stand_in
from gangway.compiler.precision import compile_in_precision, find_in_precision
from gangway.compiler.progress import Progress
from gangway.compiler.target import TARGETS, UnsupportedTargetError, detect

EXIT_CODES = {"model": 3, "unsupported": 4, "io": 5, "internal": 6}

MOST_KIB = 3 << 20  # of memory, at its peak, of a process that goes on to the next job
COMPILE, STAND_INS = "compile", "stand-ins"
LONGEST_MESSAGE = 2000  # a hostile model can have names of any length

Report = Callable[[dict[str, Any]], None]


def main(argv: Sequence[str]) -> int:
    """Run one compilation; return the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    if (options.path is None) == (options.serve is None):
        parser.error("--serve takes no PATH" if options.serve else "a PATH is needed")
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what is unfinished is removed
    report = _reporter(1 if options.json else options.progress_fd)
    logger = logging.getLogger("gangway")
    logger.setLevel(logging.INFO)
    logger.addHandler(_Records(report))
    try:
        cache = Cache(usable_cache_dir(options.cache_dir))
        target = detect(options.target)
        if options.serve:
            return _serve(cache, target, report, options.serve == STAND_INS)
        name, path = _entered(options.path)
        wanted = WantedPrecision(options.precision, options.min_cosine)
        chosen = CompileOptions(
            dict(options.dimension), options.optional, options.batch, options.whole, options.uncompiled
        )
        compiled = compile_in_precision(path, name, cache, target, _progress(report), wanted, chosen)
    except Exception as error:  # every failure is reported to the supervisor
        return _failure(error, report)
    report(_made(compiled))
    if not options.json:
        print(f"{name}: {'found' if compiled.cached else 'compiled'} {compiled.folder.resolve()}")
        if compiled.manifest.fallback_reason:
            print(f"{name}: for onnxruntime, because it cannot be compiled: {compiled.manifest.fallback_reason}")
    return 0


def _entered(model: Path) -> tuple[str, Path]:
    """Return name and file of a model, in whose folder this process works from now on. Raises ModelError, OSError.

    A name that the file gives, and that a library does not look for beside the file, means nothing else there.
    """
    name, path = find_models(model)[-1]
    path = path.absolute()
    os.chdir(path.parent)
    return name, path


def _look_up(paths: Sequence[Path], cache: Cache, target: TargetSpec, report: Report) -> int:
    """Report what the cache has; return how many it has not.

    What is wrong with a model is said by the job that is to compile it.
    """
    absent = 0
    for path in paths:
        with suppress(ModelError, OSError):
            if compiled := find_compiled(path, cache, target):
                report({"found": str(path), "folder": str(compiled.folder.resolve())})
            else:
                absent += 1
    return absent


def _serve(cache: Cache, target: TargetSpec, report: Report, makes_stand_ins: bool) -> int:
    """Compile what standard input asks for, until its end."""
    for line in sys.stdin.buffer:
        job = json.loads(line)
        if "look_up" in job:
            absent = _look_up([Path(path) for path in job["look_up"]], cache, target, report)
            report({"absent": absent})
            if absent and makes_stand_ins and not missing_packages(COMPILER):
                importlib.import_module("gangway.compiler.stand_in")
            continue
        last: dict[str, Any]
        try:
            dimensions = job["dimensions"]
            name, path = _entered(Path(job["path"]))
            wanted = decode(WantedPrecision, json.dumps(job["precision"]), "precision")
            if makes_stand_ins:
                found = find_in_precision(path, name, cache, target, wanted, dimensions)
                if not found and dimensions:
                    raise UnsupportedModelError("it is not compiled for these sizes")
                progress = _progress(report, lowers_at="kernels")  # what comes before is quick, and waited for
                compiled = found or make_stand_in(path, name, cache, target, progress, job.get("batch", False))
            elif "span" in job:
                span = CompileOptions(dimensions, span=decode(SizeSpan, json.dumps(job["span"]), "span"))
                compiled = compile_model(path, name, cache, target, _progress(report), span)
            else:
                ways = (job.get("optional", ()), job.get("batch", False), job.get("whole", False))
                chosen = CompileOptions(dimensions, *ways, job.get("uncompiled") or None)
                compiled = compile_in_precision(path, name, cache, target, _progress(report), wanted, chosen)
        except Exception as error:
            last = _described(error)
        else:
            last = _made(compiled)
        ends = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > MOST_KIB
        ends = ends or (makes_stand_ins and "gangway.compiler.job" in sys.modules)  # its priority is the lowest
        report({**last, "ends": True} if ends else last)
        if ends:
            break
    return 0


def _made(compiled: CompileResult) -> dict[str, Any]:
    """The last line of a success."""
    return {
        "key": compiled.manifest.key,
        "folder": str(compiled.folder.resolve()),
        "cached": compiled.cached,
        "precision_note": compiled.manifest.precision_note,
    }


class _Records(logging.Handler):
    """Makes log records reports."""

    def __init__(self, report: Report) -> None:
        super().__init__(logging.INFO)
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        kind = "warning" if record.levelno >= logging.WARNING else "info"
        self._report({kind: record.getMessage()[:LONGEST_MESSAGE]})


def _failure(error: Exception, report: Report) -> int:
    described = _described(error)
    report(described)
    print(f"gangway.compiler: {described['error']}", file=sys.stderr)
    return EXIT_CODES[described["kind"]]


def _described(error: Exception) -> dict[str, str]:
    """The last line of a failure."""
    match error:
        case UnsupportedModelError() | UnsupportedTargetError():
            kind = "unsupported"
        case ModelError():
            kind = "model"
        case OSError() | MemoryError():
            kind = "io"
        case _:
            kind = "internal"
            traceback.print_exc()
    message = words_of(error) or "out of memory"
    if kind == "internal":
        message = f"internal error of the compiler: {error!r}"
    return {"error": message[:LONGEST_MESSAGE], "kind": kind}


def _reporter(descriptor: int | None) -> Report:
    def report(message: dict[str, Any]) -> None:
        if descriptor is not None:
            os.write(descriptor, json.dumps(message).encode() + b"\n")

    return report


def _progress(report: Report, lowers_at: str = "import") -> Progress:
    """Report every step. A lookup in the cache runs at normal priority, what comes after it at the lowest."""

    def progress(phase: str, done: int, total: int) -> None:
        if phase == lowers_at:
            _lower_priority()
        report({"phase": phase, "done": done, "total": total})

    return progress


def _lower_priority() -> None:
    """Use no core that others want: a compilation must not slow down a server's workers."""
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "TVM_NUM_THREADS"):
        os.environ[variable] = "1"  # read when numpy and TVM are imported, which is later
    with suppress(OSError):  # if memory runs out, the kernel kills this process, not a server
        Path("/proc/self/oom_score_adj").write_text("1000")
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:  # some containers forbid it
        os.nice(19)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gangway.compiler",
        description="Compile one ONNX model into the cache, at the lowest priority. Made to be started by a server.",
        epilog=__doc__.partition("\n\n")[2] if __doc__ else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "path", type=Path, nargs="?", metavar="PATH", help="an .onnx file, or a model directory (newest version)"
    )
    parser.add_argument("--serve", choices=(COMPILE, STAND_INS), help="read jobs of a kind from standard input")
    parser.add_argument("--cache-dir", default="", metavar="DIR", help="where compiled models are kept")
    add_dimension(parser)
    parser.add_argument("--optional", action="append", default=[], metavar="INPUT", help="requests may leave it out")
    parser.add_argument("--batch", action="store_true", help="refuse a model whose first dimension cannot be a batch")
    parser.add_argument("--whole", action="store_true", help="leave it to onnxruntime")
    parser.add_argument("--uncompiled", metavar="REASON", help="leave it to onnxruntime for now, and say this why")
    add_precision(parser)
    parser.add_argument("--target", metavar="NAME", help=f"{', '.join(TARGETS)}; default: the best this machine runs")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--progress-fd", type=int, metavar="N", help="write JSON lines to this file descriptor")
    output.add_argument("--json", action="store_true", help="write JSON lines to standard output")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
