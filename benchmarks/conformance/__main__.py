"""Conformance by somebody else's tests: ONNX's own node tests through compiler and executor, onnxruntime beside it.

For each operator: how many of its tests are compiled from templates ("native"), with layers of TVM's Relax, left to
onnxruntime, or refused; and which of the answers are wrong.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.conformance.cases import NEWEST_OPSET, Case, collect
from benchmarks.conformance.docs import write_docs
from benchmarks.conformance.runner import NATIVE, ONNXRUNTIME, RELAX, Outcome, run_all
from gangway.base.console import ProgressBars
from gangway.executor.launch import available_cores
from testing.report import CONSOLE, Report, Row, option_parser, start_report

LEAST_COMPILED = 0.85


def main() -> int:
    """Run the tests and print the report; the exit status says whether all targets were met."""
    parser = option_parser(__doc__ or "")
    parser.add_argument("--jobs", type=int, default=len(available_cores()), help="processes at a time")
    parser.add_argument("--match", default="", help="only tests whose names contain this")
    parser.add_argument("--later", action="store_true", help=f"also tests of opsets after {NEWEST_OPSET}")
    parser.add_argument("--write-docs", action="store_true", help="write docs/reference/operators.md from this run")
    parser.add_argument("--poison", action="store_true", help="answer each query twice, in memory full of a pattern")
    options = parser.parse_args()
    report = start_report("ONNX's node tests")
    cases = [case for case in collect() if options.match in case.name]
    excluded = Counter(case.excluded for case in cases if case.excluded)
    later = f"opset > {NEWEST_OPSET}"
    chosen = [case for case in cases if not case.excluded or (options.later and case.excluded == later)]
    with ProgressBars(CONSOLE) as bar:
        task = bar.add_task("tests", total=len(chosen))
        outcomes = run_all(chosen, options.jobs, lambda done: bar.update(task, completed=done), options.poison)
    print_report(report, chosen, outcomes, excluded)
    if options.write_docs:
        docs = Path(__file__).parents[2] / "docs" / "reference" / "operators.md"
        write_docs(docs, list(zip(chosen, outcomes, strict=True)))
    return report.finish(options.json)


def print_report(report: Report, cases: Sequence[Case], outcomes: Sequence[Outcome], excluded: Counter[str]) -> None:
    """Print all tables and note the targets."""
    report.table("tests out of scope", [{"why": why, "tests": n} for why, n in excluded.most_common()])
    report.table("operators", operator_rows(cases, outcomes))
    ours = [outcome for outcome in outcomes if not outcome.passed and (outcome.is_compiled or not outcome.peer_error)]
    report.table("wrong, or failed where onnxruntime passes", [_failure(outcome) for outcome in ours])
    rest = [outcome for outcome in outcomes if not outcome.is_compiled]
    reasons = Counter(_line((outcome.reason or outcome.error).split(" (first at ")[0], 130) for outcome in rest)
    report.table("why not compiled", [{"reason": reason, "tests": n} for reason, n in reasons.most_common()])
    scope = [(case, outcome) for case, outcome in zip(cases, outcomes, strict=True) if not case.excluded]
    for title, part in (("total", scope), ("total with later opsets", list(zip(cases, outcomes, strict=True)))):
        report.table(title, [total_row([outcome for _, outcome in part])])
    inside = [outcome for _, outcome in scope]
    share = sum(outcome.is_compiled and outcome.passed for outcome in inside) / max(1, len(inside))
    report.target("tests that are not compiled or wrong, share", 1 - share, 1 - LEAST_COMPILED)
    report.target("compiled, but wrong", sum(o.is_compiled and not o.passed for o in outcomes), 0)
    report.target("onnxruntime passes, we do not", sum(not o.passed and not o.peer_error for o in outcomes), 0)


def operator_rows(cases: Sequence[Case], outcomes: Sequence[Outcome]) -> list[Row]:
    """Return one row per operator, the least compiled first."""
    by_operator: dict[str, list[Outcome]] = defaultdict(list)
    for case, outcome in zip(cases, outcomes, strict=True):
        by_operator[case.operator].append(outcome)
    rows = [{"operator": operator, **total_row(found)} for operator, found in sorted(by_operator.items())]
    return sorted(rows, key=lambda row: int(row[NATIVE]) + int(row[RELAX]) - int(row["tests"]))


def total_row(outcomes: Sequence[Outcome]) -> dict[str, int | str]:
    """Return how many tests pass in which way, and how many do not."""
    passed = Counter(outcome.how for outcome in outcomes if outcome.passed)
    failed = sum(not outcome.passed for outcome in outcomes)
    share = f"{100 * (passed[NATIVE] + passed[RELAX]) / max(1, len(outcomes)):.1f} %"
    counts = {how: passed[how] for how in (NATIVE, RELAX, ONNXRUNTIME)}
    return {"tests": len(outcomes), **counts, "failed": failed, "native + Relax": share}


def _failure(outcome: Outcome) -> Row:
    return {
        "test": outcome.name,
        "by": outcome.how,
        "error": _line(outcome.error, 60),
        "why not compiled": _line(outcome.reason, 60),
        "onnxruntime": _line(outcome.peer_error, 20) or "passes",
    }


def _line(text: str, length: int) -> str:
    return " ".join(text.split())[:length]


if __name__ == "__main__":
    sys.exit(main())
