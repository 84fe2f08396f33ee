"""The same Python models and requests, in Triton and here: each difference must be known, and each known one be there.

    python -m benchmarks.differential                               # both servers, all cases
    python -m benchmarks.differential --record                      # and keep Triton's answers, for the tests
    python -m benchmarks.differential --record --match cache        # of some cases; those of others stay
    python -m benchmarks.differential --recorded --match generate   # some cases, with the answers that were kept

`known` has the differences that are meant, with their reasons; `docs/reference/triton.md` shows them. What differs
and is not there makes the exit status 1, and so does what is there and does not differ.
"""

import argparse
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from math import inf
from statistics import median

from benchmarks.differential.asked import HALF, HALF_STREAM, TRANSPORTS, Case, Departs
from benchmarks.differential.compare import Difference, by_entry, differences, unknown, unused
from benchmarks.differential.connections import Addresses
from benchmarks.differential.departing import AFTER_MS
from benchmarks.differential.kinds.all import all_cases, models_of
from benchmarks.differential.models import Model
from benchmarks.differential.recorded import read, write
from benchmarks.differential.servers import answers, gangway, triton
from benchmarks.differential.wire import Answer
from testing.fetching import FetchError
from testing.report import Cell, Row, option_parser, start_report

MEDIAN_MS = "median ms"
SEEN_WITHIN_MS = 50


def main() -> int:
    """Ask both servers; return 0 if all differences are known, and all known ones are there."""
    parser = option_parser(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--match", default="", metavar="REGEX", help="only cases with such names")
    parser.add_argument("--record", action="store_true", help="keep Triton's answers")
    parser.add_argument("--recorded", action="store_true", help="do not start Triton: take the answers that were kept")
    options = parser.parse_args()
    if options.record and options.recorded:
        parser.error("--record needs Triton")
    cases = [case for case in all_cases() if re.search(options.match, case.name)]
    models = models_of(cases)
    report = start_report("Python models, in Triton and here")
    theirs = read() if options.recorded else _asked_of_triton(cases)
    if options.record:
        known = read() | dict(theirs)
        write({case.name: known[case.name] for case in all_cases() if case.name in known})
    with tempfile.TemporaryDirectory() as cache:
        ours = _answers(cases, lambda models, by: gangway(models, [f"--cache-dir={cache}"], by))
    found = [each for case in cases for each in differences(case.name, theirs[case.name], ours[case.name])]
    new, gone = unknown(found), [] if options.match else unused(found)
    report.table("known differences", [{"what": what, "cases": count} for what, count in by_entry(found).items()])
    report.table("differences that are not known", [_row(each) for each in new])
    report.table("known differences that are not there", [{"what": entry.what} for entry in gone])
    seen = list(_seen(cases, theirs, ours))
    report.table("is_cancelled, by how clients leave", seen)
    asked = sum(len(case.steps) for case in cases)
    differing = len({each.case for each in found})
    summary = {"models": len(models), "cases": len(cases), "requests": asked, "cases that differ": differing}
    report.table("asked", [summary])
    report.target("cases with differences that are not known", len({each.case for each in new}), 0)
    report.target("known differences that are not there", len(gone), 0)
    if seen:
        slowest_ms = max(float(row[f"Gangway, {MEDIAN_MS}"]) for row in seen)
        report.target("ms until is_cancelled(), median of the slowest way to leave", slowest_ms, SEEN_WITHIN_MS)
    return report.finish(options.json)


def _asked_of_triton(cases: Sequence[Case]) -> Mapping[str, list[Answer]]:
    """Return Triton's answers, those that were kept where there is no Triton."""
    try:
        return _answers(cases, triton)
    except FetchError as error:
        print(f"{error}\nThese are the answers that were kept.")
        return read()


def _answers(
    cases: Sequence[Case], serving: Callable[[Sequence[Model], str], AbstractContextManager[Addresses]]
) -> Mapping[str, list[Answer]]:
    """Return the answers of a server that is started for each transport."""
    found: dict[str, list[Answer]] = {}
    for by in TRANSPORTS:
        if own := [case for case in cases if case.transport == by]:
            with serving(models_of(own), by) as addresses:
                found |= answers(addresses, own)
    return found


def _seen(
    cases: Sequence[Case], triton: Mapping[str, list[Answer]], gangway: Mapping[str, list[Answer]]
) -> Iterator[Row]:
    """Yield after how many ms a model sees that nobody waits, by the way in which clients leave."""
    names: dict[str, list[str]] = {}
    for case in cases:
        if isinstance(first := case.steps[0], Departs) and first.way not in (HALF, HALF_STREAM):
            names.setdefault(first.way, []).append(case.name)
    for way, own in names.items():
        row: dict[str, Cell] = {"how": way}
        for server, found in (("Triton", triton), ("Gangway", gangway)):
            after_ms = [each for name in own for each in found[name][0].get(AFTER_MS, ())]
            row[f"{server}, times seen"] = len(after_ms)
            row[f"{server}, {MEDIAN_MS}"] = median(after_ms) if after_ms else inf
            row[f"{server}, most ms"] = max(after_ms, default=inf)
        yield row


def _row(each: Difference) -> Row:
    return {"case": each.case, "place": each.place, "Triton": each.triton, "Gangway": each.gangway}


if __name__ == "__main__":
    sys.exit(main())
