"""Models of one operator, drawn at random, here and in onnxruntime: the answers must be the same.

    python -m benchmarks.fuzz.differential                          # 5000 cases
    python -m benchmarks.fuzz.differential --match Clip,Round --seconds 60
    python -m benchmarks.fuzz.differential --case 1:Clip-13:4       # one of them again, printed

Every operator that has a rule, in each operator set that changed it, with types, shapes, attributes and numbers by
chance: NaN, infinities, zeros of either sign, halves, ends of integers, empty tensors. What onnxruntime does not open
is left out. Differences that are meant are listed in `known.py`; any other makes the exit status 1.
"""

import argparse
import sys
import time
from collections import Counter
from itertools import takewhile

from benchmarks.conformance.runner import NATIVE, ONNXRUNTIME, RELAX
from benchmarks.fuzz.differential.cases import Case, cases_of, draw
from benchmarks.fuzz.differential.judge import LEFT_OUT, REFUSED, Verdict
from benchmarks.fuzz.differential.known import reason_of
from benchmarks.fuzz.differential.run import run
from gangway.executor.launch import available_cores
from testing.report import option_parser, start_report

CASES = 5000


def main() -> int:
    """Run the cases; return 0 if no difference is new."""
    parser = option_parser(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--cases", type=int, default=CASES, metavar="N", help=f"that both sides judge ({CASES})")
    parser.add_argument("--seconds", type=float, default=0.0, metavar="S", help="or so long")
    parser.add_argument("--seed", type=int, default=1, help="equal seeds draw equal cases (1)")
    parser.add_argument("--match", default="", metavar="OPERATORS", help="only these, with commas between them")
    parser.add_argument("--case", metavar="NAME", help="one case, with its model and numbers")
    parser.add_argument("--jobs", type=int, default=len(available_cores()), help="processes at a time")
    options = parser.parse_args()
    if options.case:
        return _again(options.case)
    report = start_report("Operators, here and in onnxruntime")
    verdicts = collect(options.seed, options.cases, options.seconds, options.match, options.jobs)
    counts = Counter(verdict.how for verdict in verdicts)
    judged = len(verdicts) - counts[LEFT_OUT]
    known = [verdict for verdict in verdicts if verdict.difference and reason_of(verdict)]
    new = [verdict for verdict in verdicts if verdict.difference and not reason_of(verdict)]
    report.table(
        "cases",
        [
            {
                "operators": len({v.case.operator for v in verdicts}),
                "judged": judged,
                NATIVE: counts[NATIVE],
                RELAX: counts[RELAX],
                ONNXRUNTIME: counts[ONNXRUNTIME],
                REFUSED: counts[REFUSED],
                "left out": counts[LEFT_OUT],
                "known differences": len(known),
                "new differences": len(new),
            }
        ],
    )
    report.table(
        "known differences", [{"why": why, "cases": n} for why, n in Counter(map(reason_of, known)).most_common()]
    )
    report.table("differences", [{"case": v.case.name, "by": v.how, "difference": v.difference} for v in new])
    report.target("differences that are not listed", len(new), 0)
    return report.finish(options.json)


def collect(seed: int, cases: int, seconds: float, matching: str, jobs: int) -> list[Verdict]:
    """Judge so many cases, those that are left out not counted, or for so many seconds."""
    verdicts: list[Verdict] = []
    judged = 0

    def progress(verdict: Verdict) -> None:
        nonlocal judged
        verdicts.append(verdict)
        judged += verdict.how != LEFT_OUT

    wanted = takewhile(lambda _: seconds or judged < cases, cases_of(seed, matching))
    run(wanted, jobs, progress, time.monotonic() + seconds if seconds else float("inf"))
    return verdicts


def _again(name: str) -> int:
    """Print one case, and judge it."""
    case = Case.named(name)
    draft = draw(case)
    print(case.title, f"rows: {draft.batch}" if draft.batch else "", draft.node, sep="\n")
    for kind in ("inputs", "constants"):
        for tensor, value in getattr(draft, kind).items():
            print(kind, tensor, value.dtype, list(value.shape), value.tolist())
    verdicts: list[Verdict] = []
    run(iter([case]), 1, verdicts.append)
    print(verdicts[0].how, verdicts[0].difference or "the same", verdicts[0].detail)
    return int(bool(verdicts[0].difference) and not reason_of(verdicts[0]))


if __name__ == "__main__":
    sys.exit(main())
