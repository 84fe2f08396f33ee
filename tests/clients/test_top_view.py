"""What `gangway top` shows of a large, busy server in a small terminal."""

import re
from typing import Any

import pytest

from gangway.artifact.console import Console
from gangway.clients.top import view

CORES, MODELS = 64, 60
COLUMNS = 80


def model(number: int) -> dict[str, Any]:
    return {
        "name": f"[red]{'long_' * 20}{number}",
        "version": 1,
        "rate": 12345.6 + number,
        "p50_ms": 9876.5,
        "p99_ms": 10_000.0,
        "target_ms": 100_000.0,
        "in_time_share": 0.9991,
        "waiting": 4096,
        "refused": 12_345_678,
        "cores": 63.9,
        "ensemble": False,
    }


def core(number: int) -> dict[str, Any]:
    gang = {"model": "wide" * 30, "cores": CORES, "layer": 199}
    return {"core": number, "busy_share": 1.0, "gang": gang}


STATE = {
    "gangway": "0.1.0",
    "time_s": 1_000_000.0,
    "started_s": 1.0,
    "requests_in_flight": 4096,
    "queue": 4000,
    "cores": [core(number) for number in range(CORES)],
    "timeline": {"samples": 12, "cores": [[[6, 1, CORES], [6, -1, 0]]] * CORES},
    "models": [model(number) for number in range(MODELS)],
    "models_left_out": 3,
    "jobs": [{"kind": "compile", "model": "other" * 30, "since_s": 999_930.0, "phase": "kernels, 1 of 2"}],
    "unavailable": [{"name": "late", "version": None, "state": "LOADING", "reason": "why " * 50}],
}


def shown(lines: int | None) -> list[str]:
    console = Console(width=COLUMNS, highlight=False)
    with console.capture() as captured:
        console.print(view(STATE, "10.0.0.7:8000", COLUMNS, lines))
    return captured.get().splitlines()


@pytest.mark.parametrize("lines", [24, 50, None])
def test_everything_fits(lines: int | None) -> None:
    text = shown(lines)
    assert max(map(len, text)) <= COLUMNS
    assert lines is None or len(text) <= lines
    rows = [line for line in text if "[red]long_" in line]
    for row in rows:
        assert re.search(r"…? +12\d{3} +9876 +10000 +100000 +99\.9% +4096 +12\.3M +63\.9$", row.rstrip()), row
    lanes = [line for line in text if re.match(r" *\d+ +100% +B{20}·{20} +wide", line)]
    if lines is None:
        assert (len(rows), len(lanes)) == (MODELS, CORES)
    else:
        assert rows
        assert lanes
        assert f"and {CORES - len(lanes)} cores more" in "\n".join(text)
    assert f"and {MODELS - len(rows) + 3} models more" in text[-3]
    assert text[-2].startswith("compile otherother")
    assert text[-1].startswith("late loading: why")


def test_the_busiest_models_are_shown() -> None:
    rates = [int(found[1]) for line in shown(24) if (found := re.search(r" (123\d\d|124\d\d) ", line))]
    assert rates == sorted(rates)
    assert max(rates) == round(12345.6 + MODELS - 1)
