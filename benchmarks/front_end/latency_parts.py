"""The parts of a request's way: instants of client and server, joined by the request's id, as tables and a picture."""

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from testing.processes import CoreUse
from testing.report import Row

SENT: Final = "sent"
RECEIVED: Final = "received"
ARRIVED: Final = "REQUEST_START"
# Part: the instant at which it ends. The first one begins when the client sends.
PARTS: Final[Mapping[str, str]] = {
    "to the server": ARRIVED,  # client, socket, gRPC
    "checks, copy": "QUEUE_START",
    "scheduler wakes": "SCHEDULE_START",  # the front end hands it over; the scheduler reads all its messages
    "decision": "SCHEDULE_END",
    "workers wake": "COMPUTE_START",  # the scheduler writes the lease and tells them
    "compute": "COMPUTE_OUTPUT_START",
    "front end wakes": "RESPONSE_START",
    "response": "REQUEST_END",
    "to the client": RECEIVED,  # gRPC, socket, client
}
FLOOR_PARTS: Final[Mapping[str, str]] = {"to the server": ARRIVED, "to the client": RECEIVED}
COMPUTE: Final = "compute"
COLOURS: Final = ["#1f5a99", "#5b9bd5", "#e07b39", "#f4b183", "#7b5ea7", "#d9d9d9", "#b7950b", "#5fa55a", "#2e6b34"]

Instants = Mapping[str, int]  # CLOCK_MONOTONIC, ns


class Trip(NamedTuple):
    """A request as its client saw it: CLOCK_MONOTONIC in nanoseconds before the call and after it."""

    request_id: str
    sent_ns: int
    received_ns: int


class Way(NamedTuple):
    """What each part of one request's way took, in microseconds, in the order of `PARTS` or `FLOOR_PARTS`."""

    parts_us: tuple[float, ...]

    @property
    def total_us(self) -> float:
        """From send to receive."""
        return sum(self.parts_us)

    @property
    def beyond_compute_us(self) -> float:
        """All of a whole way but its computation."""
        return self.total_us - self.parts_us[list(PARTS).index(COMPUTE)]


def read_traces(text: str) -> dict[str, dict[str, int]]:
    """Return the instants of each request id in a trace file of mode triton. Raises ValueError for no JSON."""
    instants: defaultdict[int, dict[str, int]] = defaultdict(dict)
    numbers: dict[str, int] = {}
    for entry in json.loads(text):
        if "request_id" in entry:
            numbers[entry["request_id"]] = entry["id"]
        for stamp in entry.get("timestamps", ()):
            instants[entry["id"]][stamp["name"]] = stamp["ns"]
    return {request_id: instants[number] for request_id, number in numbers.items()}


def join(trips: Iterable[Trip], traces: Mapping[str, Instants], parts: Mapping[str, str] = PARTS) -> list[Way]:
    """Return the way of each trip that has a trace with all instants; others were not traced."""
    ways = []
    for trip in trips:
        known = {**traces.get(trip.request_id, {}), RECEIVED: trip.received_ns}
        if all(instant in known for instant in parts.values()):
            instants = [trip.sent_ns, *(known[instant] for instant in parts.values())]
            ways.append(Way(tuple((end - begin) / 1e3 for begin, end in pairwise(instants))))
    return ways


def medians_us(ways: Sequence[Way]) -> list[float]:
    """Return the median of each part."""
    return np.median([way.parts_us for way in ways], axis=0).tolist()


def part_rows(ways: Sequence[Way], floor: Sequence[Way]) -> list[Row]:
    """Return a line for each part, one for all but compute and one for all: p50, p99, share of all requests' time.

    `floor`: of a server that does nothing.
    """
    taken_us = np.array([way.parts_us for way in ways])  # [requests, parts]
    names = list(PARTS)
    at = names.index(COMPUTE)
    columns = {name: taken_us[:, place] for place, name in enumerate(names)}
    columns |= {"all but compute": taken_us.sum(axis=1) - taken_us[:, at], "all": taken_us.sum(axis=1)}
    bare_us: dict[str, float] = dict(zip(FLOOR_PARTS, medians_us(floor), strict=True))
    bare_us["all but compute"] = bare_us["all"] = float(np.median([way.total_us for way in floor]))
    return [
        {
            "part": name,
            "p50 us": float(np.median(column)),
            "p99 us": float(np.percentile(column, 99)),
            "share %": float(100 * column.sum() / taken_us.sum()),
            "do-nothing p50 us": bare_us.get(name, ""),
        }
        for name, column in columns.items()
    ]


def use_rows(cases: Mapping[str, tuple[Mapping[str, CoreUse], int]], field: str) -> list[Row]:
    """Return a line for each role, with one number of `CoreUse` per request for each case: microseconds, or times.

    `cases`: what each role used, and the number of requests.
    """
    unit = 1 if field == "turns" else 1000
    roles = list(dict.fromkeys(role for uses, _ in cases.values() for role in uses))
    rows: list[Row] = []
    for role in [*roles, "all"]:
        chosen = roles if role == "all" else [role]
        numbers = {
            name: sum(getattr(uses[each], field) for each in chosen if each in uses) / requests / unit
            for name, (uses, requests) in cases.items()
        }
        rows.append({"role": role, **numbers})
    return rows


def beyond_idle(during: CoreUse, seconds: float, before: CoreUse, idle_seconds: float) -> CoreUse:
    """Return what a load of so many seconds added to what was used in `idle_seconds` without it; at least nothing."""
    share = seconds / idle_seconds
    return CoreUse(*(max(0, round(now - share * then)) for now, then in zip(during, before, strict=True)))


def draw(path: Path, models: Mapping[str, Mapping[str, Sequence[Way]]]) -> None:
    """Draw the medians of each case's parts, a panel for each model. Raises OSError.

    `models`: ways by case. Ways of two parts are of a server that does nothing.
    """
    from matplotlib.figure import Figure  # noqa: PLC0415 - an extra package

    rows = sum(map(len, models.values()))
    figure = Figure(figsize=(9.5, 1.3 + 0.48 * rows + 0.45 * len(models)), layout="constrained")
    panels = figure.subplots(len(models), squeeze=False, height_ratios=[len(cases) for cases in models.values()])
    colours = dict(zip(PARTS, COLOURS, strict=True))
    for panel, (model, cases) in zip(panels[:, 0], models.items(), strict=True):
        longest_ms = max(sum(medians_us(ways)) for ways in cases.values()) / 1e3
        for place, ways in enumerate(cases.values()):
            parts = PARTS if len(ways[0].parts_us) == len(PARTS) else FLOOR_PARTS
            left = 0.0
            for part, taken_us in zip(parts, medians_us(ways), strict=True):
                panel.barh(place, taken_us / 1e3, left=left, color=colours[part], edgecolor="white", linewidth=0.5)
                if taken_us / 1e3 > 0.04 * longest_ms:
                    colour = "black" if part == COMPUTE else "white"
                    text = f"{taken_us:.0f}"
                    panel.text(left + taken_us / 2e3, place, text, ha="center", va="center", fontsize=8, color=colour)
                left += taken_us / 1e3
            panel.text(left, place, f" {left:.2f} ms", va="center", fontsize=9)
        panel.set_yticks(range(len(cases)), list(cases))
        panel.set_xlim(0, longest_ms * 1.1)
        panel.invert_yaxis()
        panel.spines[["top", "right"]].set_visible(False)
        panel.set_title(f"{model}: median of each part, us", loc="left", fontsize=10)
    panels[-1, 0].set_xlabel("ms from the client's send to its receive")
    patches = [panels[0, 0].barh(0, 0, color=colour, label=part) for part, colour in colours.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    figure.savefig(path, dpi=80)
