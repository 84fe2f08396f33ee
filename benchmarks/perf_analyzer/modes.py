"""How perf_analyzer is made to generate load, in the ways that people use most."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mode:
    """How perf_analyzer generates load, and at how many levels; it `searches`: as many as it likes."""

    flags: tuple[str, ...]
    levels: int = 1
    metrics: bool = False  # it scrapes those of the server, too
    searches: bool = False


MODES = {
    "sync": Mode(("--sync",)),
    "async": Mode(("--async",)),
    "concurrency 1:8": Mode(("--concurrency-range", "1:8"), levels=8),
    "poisson": Mode(("--request-rate-range", "100", "--request-distribution", "poisson")),
    "stream, shared memory": Mode(("--streaming", "--async", "--shared-memory", "system")),
    "stream": Mode(("--streaming", "--async", "--concurrency-range", "8")),
    "shared memory": Mode(("--shared-memory", "system", "--concurrency-range", "8")),
    "metrics": Mode(("--async",), metrics=True),
}


def closed_loop(clients: int) -> Mode:
    """Return the mode that keeps so many requests under way."""
    return Mode(("--concurrency-range", str(clients)))
