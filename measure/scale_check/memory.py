"""Memory: how much 1 to N cores read at once, and what reading another NUMA node's memory costs."""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Final

from gangway.executor import _probes
from gangway.measure.machine import l3_bytes, touched
from gangway.measure.scale_check.section import Chart, Curve, Finding, Row, Section

LEAST_BYTES: Final = 16 << 20  # of each core: more than its own caches hold
MOST_BYTES: Final = 1 << 30  # of all cores together, which a host's cache of 300 MiB does not hold
OVER_CACHE: Final = 4  # times what the last-level cache holds
REPEATS: Final = 3  # the best counts: what else the machine does only takes bandwidth
LEAST_SHARE: Final = 0.7  # of what a core has on a machine of two, below which the simulator's assumption misleads
LEAST_REMOTE: Final = 0.5  # of local bandwidth


def check_memory(cores: Sequence[int], nodes: Sequence[Sequence[int]], seconds: float) -> Section:
    """Measure for about so long. `nodes`: the cores of each NUMA node. One that stands there twice counts once."""
    distinct = list(dict.fromkeys(cores))
    counts = widths(len(distinct))
    numbers = range(len(nodes))
    pairs = [(at, of) for at in numbers for of in numbers] if len(nodes) > 1 else []
    each_s = seconds / (REPEATS * (len(counts) + 2 * len(pairs)))
    rates = {count: _best(distinct[:count], distinct[:count], each_s) for count in counts}
    rows: list[Row] = [
        {
            "cores": count,
            "GB/s": rate / 1e3,
            "GB/s per core": rate / 1e3 / count,
            "of one core alone": rate / count / rates[1],
        }
        for count, rate in rates.items()
    ]
    most = counts[-1]
    share = rates[most] / most / (rates[2] / 2) if most > 1 else 1.0
    figures = {
        "one_core_gb_per_s": rates[1] / 1e3,
        "all_cores_gb_per_s": rates[most] / 1e3,
        "memory_share": share,
    }
    findings = [
        Finding(
            f"{most} cores read {rates[most] / 1e3:.1f} GB/s, {share:.0%} per core of what each of two has: "
            f"`gangway simulate --memory-share {min(share, 1.0):.2f}` models that",
            share >= LEAST_SHARE,
        )
    ]
    remote, worst = _remote(nodes, pairs, each_s)
    if remote:
        figures["worst_remote_share"] = worst
        findings.append(Finding(f"another node's memory gives {worst:.0%} of the own one's", worst >= LEAST_REMOTE))
    else:
        findings.append(Finding("one NUMA node: all memory is as near"))
    columns = dict.fromkeys(key for row in (*rows, *remote) for key in row)
    points = tuple((float(count), rate / 1e3) for count, rate in rates.items())
    ideal = tuple((float(count), count * rates[1] / 1e3) for count in counts)
    return Section(
        "memory",
        "Memory bandwidth",
        tuple({column: row.get(column, "") for column in columns} for row in (*rows, *remote)),
        tuple(findings),
        figures,
        "Layers that read more than they compute (fully connected ones, attention over long texts) take as long on all "
        "cores as on those that fill the memory's channels. Requests slow each other down, and the simulator, which "
        "gives each core what it has on a machine of two, is too hopeful.",
        "See that every memory channel is populated. Pass the share above to `gangway simulate`. Use `--precision "
        "bf16` or int8 models, which read half or a quarter. Across nodes: keep `--numa-nodes all`, the default, with "
        "which no gang crosses nodes, or run a server on each node.",
        Chart("cores", "GB/s", (Curve("measured", points), Curve("as many times one core", ideal, predicted=True))),
    )


def widths(most: int) -> list[int]:
    """Return the numbers of cores that are measured: all up to 8, then powers of two and what is half between."""
    found = {count for count in range(1, most + 1) if count <= 8 or count & (count - 1) == 0}
    found |= {3 << power for power in range(2, most.bit_length()) if 3 << power <= most}
    return sorted({*found, most})


def read_rate(readers: Sequence[int], owners: Sequence[int], seconds: float) -> float:
    """Return the bytes per microsecond that these cores read at once, each for so long from memory of its own.

    `owners[i]`: the core that has written reader i's memory first, on whose NUMA node it therefore lies.
    """
    size_bytes = max(LEAST_BYTES, min(OVER_CACHE * l3_bytes(), MOST_BYTES) // len(readers))
    together = Barrier(len(readers))

    def read(reader: int, owner: int) -> float:
        os.sched_setaffinity(0, {owner})  # of this thread
        memory = touched(size_bytes)
        os.sched_setaffinity(0, {reader})
        together.wait()
        begin, passes, spent_ns = time.monotonic(), 0, 0
        while not passes or time.monotonic() - begin < seconds:
            spent_ns += _probes.read_memory(memory)
            passes += 1
        return passes * size_bytes * 1e3 / spent_ns

    with ThreadPoolExecutor(len(readers)) as threads:  # the probe lets go of the interpreter
        return sum(threads.map(read, readers, owners))


def _remote(nodes: Sequence[Sequence[int]], pairs: Sequence[tuple[int, int]], each_s: float) -> tuple[list[Row], float]:
    """Return a line for each pair of nodes, and the worst share of local bandwidth; 1 where there are no pairs."""
    found = {(at, of): [_remote_rate(nodes, at, of, count, each_s) for count in (1, None)] for at, of in pairs}
    rows: list[Row] = [
        {
            "cores": f"node {at}, memory of node {of}",
            "GB/s": all_cores / 1e3,
            "GB/s per core": one_core / 1e3,
            "of one core alone": one_core / found[at, at][0],
        }
        for (at, of), (one_core, all_cores) in found.items()
    ]
    return rows, min((one / found[at, at][0] for (at, _), (one, _) in found.items()), default=1.0)


def _remote_rate(nodes: Sequence[Sequence[int]], at: int, of: int, count: int | None, each_s: float) -> float:
    """Return what the first `count` cores of a node, or all, read at once from another one's memory."""
    readers = nodes[at][:count]
    return _best(readers, [nodes[of][0]] * len(readers), each_s)


def _best(readers: Sequence[int], owners: Sequence[int], each_s: float) -> float:
    return max(read_rate(readers, owners, each_s) for _ in range(REPEATS))
