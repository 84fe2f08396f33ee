"""Answers and times, printed for people."""

import statistics
from collections.abc import Mapping, Sequence

import numpy as np
from rich.table import Table

from gangway.artifact.console import Console
from gangway.clients.tensors import Array
from gangway.clients.timing import PHASES, ServerTimes

FIRST_VALUES = 6


def show_outputs(console: Console, outputs: Mapping[str, Array], top: int | None) -> None:
    """Print shape, dtype and the first values of each output, and the `top` largest of each row of scores."""
    table = Table("output", "shape", "dtype", "first values")
    for name, values in outputs.items():
        table.add_row(name, "x".join(map(str, values.shape)), values.dtype.name, _first_values(values))
    console.print(table)
    if top is None:
        return
    for name, values in outputs.items():
        if is_scores(values):
            console.print(_top_table(name, values, top))


def show_timing(console: Console, round_trip_ms: Sequence[float], server: ServerTimes) -> None:
    """Print the client's round trip and the server's split of it, milliseconds, means over the requests."""
    round_trip = statistics.fmean(round_trip_ms)
    table = Table("time", "ms")
    table.columns[1].justify = "right"
    several = f", mean of {len(round_trip_ms)}" if len(round_trip_ms) > 1 else ""
    table.add_row(f"round trip, seen by the client{several}", f"{round_trip:.3f}")
    for phase in PHASES:
        table.add_row("  server: " + phase.replace("_", " "), f"{server.mean_ms(phase):.3f}")
    table.add_row("  transport and the rest", f"{round_trip - server.total_ms:.3f}")
    console.print(table)
    if server.requests != len(round_trip_ms):
        console.print(f"The server's times are means over {server.requests} requests: it served other clients too.")


def is_scores(values: Array) -> bool:
    """Say whether the values are floats [C] or [N, C], besides dimensions of 1."""
    return values.dtype.kind == "f" and values.size > 0 and len([d for d in values.shape[1:] if d != 1]) <= 1


def top_of(row: Array, count: int) -> list[tuple[int, float]]:
    """Return (index, value) of the largest values of a row, largest first."""
    order = np.argsort(-row.astype(np.float64), kind="stable")[:count]
    return [(int(index), float(row[index])) for index in order]


def _top_table(name: str, values: Array, top: int) -> Table:
    table = Table("row", "rank", "index", "value", title=f"largest values of {name}")
    rows = values.reshape(1, -1) if values.ndim == 1 else values.reshape(values.shape[0], -1)
    for number, row in enumerate(rows):
        for rank, (index, value) in enumerate(top_of(row, top), 1):
            table.add_row(str(number), str(rank), str(index), f"{value:.6g}")
    return table


def _first_values(values: Array) -> str:
    shown = [f"{value:.6g}" if values.dtype.kind == "f" else str(value) for value in values.flat[:FIRST_VALUES]]
    return ", ".join(shown) + (", ..." if values.size > FIRST_VALUES else "")
