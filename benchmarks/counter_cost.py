"""What hardware counters cost a virtual machine: how long processes that wake together stand still.

On each of two cores a process wakes every 30 ms, both at the same moment as the ranks of a gang do, and works for 5
ms; others keep changing the core's address space. Cache references and misses are counted: of nobody, of the cores, of
these processes. A stand-still is 30 ms or more without a step.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

from benchmarks.report import Report, Row, option_parser, start_report
from gangway.executor.counters import MISSES, REFERENCES, CoreCounters, open_event

PERIOD_S, WORK_S, STILL_S = 0.03, 0.005, 0.03
OTHERS = 3  # further processes on each core
MEMORY_BYTES = 20 << 20  # that each of these reads


def pulse(core: int, start_s: float, end_s: float, result: Connection) -> None:
    """Wake and work until the end; send how often and how long nothing happened (s)."""
    os.sched_setaffinity(0, {core})
    still: list[float] = []
    at_s = start_s
    while at_s < end_s:
        time.sleep(max(at_s - time.monotonic(), 0.0))
        last_s = at_s
        while (now_s := time.monotonic()) < at_s + WORK_S or last_s == at_s:
            if now_s - last_s >= STILL_S:
                still.append(now_s - last_s)
            last_s = now_s
        at_s += PERIOD_S * (1 + int((now_s - at_s) / PERIOD_S))
    result.send((len(still), sum(still)))


def company(core: int) -> None:
    """Read memory for a moment, again and again."""
    os.sched_setaffinity(0, {core})
    memory = bytearray(MEMORY_BYTES)
    while True:
        time.sleep(0.0015)
        memory[:: 97 * 4096].count(1)


@contextmanager
def counted(which: str, cores: Sequence[int], processes: Sequence[int]) -> Iterator[None]:
    """Count cache references and misses of somebody meanwhile."""
    if which == "cores":
        with CoreCounters([REFERENCES, MISSES], cores):
            yield
        return
    threads = processes if which == "processes" else ()
    descriptors = [open_event(event, thread=thread) for thread in threads for event in (REFERENCES, MISSES)]
    try:
        yield
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def measure(which: str, cores: Sequence[int], seconds: float) -> Row:
    """Run all processes for so long; return a row of the table."""
    others = [multiprocessing.Process(target=company, args=(core,), daemon=True) for core in OTHERS * list(cores)]
    start_s = time.monotonic() + 1
    pipes = [multiprocessing.Pipe(duplex=False) for _ in cores]
    pulses = [
        multiprocessing.Process(target=pulse, args=(core, start_s, start_s + seconds, sender), daemon=True)
        for core, (_, sender) in zip(cores, pipes, strict=True)
    ]
    for process in (*others, *pulses):
        process.start()
    try:
        with counted(which, cores, [process.pid or 0 for process in pulses]):
            stills = [receiver.recv() for receiver, _ in pipes]
    finally:
        for process in (*others, *pulses):
            process.kill()
            process.join()
    count, still_s = (max(values) for values in zip(*stills, strict=True))
    return {"counted": which, "stand-stills": count, "of the time, %": 100 * still_s / seconds}


def run(report: Report, seconds: float) -> None:
    """Measure the three ways one after the other."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    rows = [measure(which, cores, seconds) for which in ("nobody", "cores", "processes")]
    report.table(f"stand-stills of {STILL_S * 1e3:.0f} ms and more in {seconds:.0f} s, the worse of two cores", rows)
    report.target("time stood still while cores are counted, %", float(rows[1]["of the time, %"]), 1.0)


def main() -> int:
    """Run from the command line; exit status 1 if the target is missed."""
    parser = option_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each way (default: 20)")
    options = parser.parse_args()
    report = start_report("What counters cost a virtual machine")
    run(report, options.seconds)
    return report.finish(options.json)


if __name__ == "__main__":
    sys.exit(main())
