"""What `gangway top` shows of a large, busy server in a small terminal."""

import re
from typing import Any

import pytest

from gangway.base.console import Console
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
        "idle": False,
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
    "decisions": [
        {"model": model(3)["name"], "version": 1, "time_s": 1.0, "text": f"start {number}; because: {'why ' * 40}end"}
        for number in range(8)
    ],
    "start": None,
    "unavailable": [{"name": "late", "version": None, "state": "LOADING", "reason": "why " * 50}],
}


def shown(lines: int | None, columns: int = COLUMNS, mark: str = "", **changes: Any) -> list[str]:
    console = Console(width=columns, highlight=False)
    with console.capture() as captured:
        console.print(view(STATE | changes, "10.0.0.7:8000", columns, lines, mark))
    return captured.get().splitlines()


@pytest.mark.parametrize("start", [None, {"text": "3 of 10 models; kernels 12 of 40; some 20 s left"}])
@pytest.mark.parametrize("lines", [24, 50, None])
def test_everything_fits(lines: int | None, start: dict[str, str] | None) -> None:
    text = shown(lines, start=start)
    assert (text[2] == "starting: 3 of 10 models; kernels 12 of 40; some 20 s left") == bool(start)
    assert max(map(len, text)) <= COLUMNS
    assert lines is None or len(text) <= lines
    rows = [line for line in text if "[red]long_" in line]
    for row in rows:
        assert re.search(r"…? +12\d{3} +9876 +10000 +100000 +99\.9% +4096 +12\.3M +63\.9$", row.rstrip()), row
    lanes = [line for line in text if re.match(r" *\d+ +100% +B{17}·{17} +wide", line)]
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


@pytest.mark.parametrize("columns", [80, 68, 60, 40])
def test_columns_are_left_out_rather_than_cut(columns: int) -> None:
    text = shown(24, columns)
    assert max(map(len, text)) <= columns
    (head,) = [line for line in text if "rate/s" in line]
    rows = [line for line in text if "[red]" in line]
    names = re.split(r" +(?=rate|p\d|target|in time|queue|refused|cores)", head.strip())[1:]
    assert set(names) <= {"rate/s", "p50 ms", "p99 ms", "target", "in time", "queue", "refused", "cores"}
    assert len(names) >= columns // 10
    assert all(len(row.split("…")[1].split()) == len(names) for row in rows)
    assert [line for line in text if re.fullmatch(r"and \d+ cores more", line)]


@pytest.mark.parametrize(("lines", "columns", "least"), [(24, 80, 3), (50, 80, 4), (16, 60, 1), (None, 80, 4)])
def test_decisions_leave_room_for_their_model(lines: int | None, columns: int, least: int) -> None:
    text = shown(lines, columns, mark="D", models=STATE["models"][:6], models_left_out=0, unavailable=[], jobs=[])
    assert lines is None or len(text) <= lines
    told = "\n".join(text)
    assert least <= told.count("because:") == told.count("why end") <= 4
    assert [line for line in text if line.startswith("D [red]")]
    assert lines == 16 or len([line for line in text if "[red]" in line]) >= 4


def test_one_is_one() -> None:
    gang = {"model": "net", "cores": 1, "layer": 1}
    one = {"core": 0, "busy_share": 1.0, "gang": gang}
    timeline = {"samples": 12, "cores": [[[12, 1, 1]]]}
    text = "\n".join(shown(None, cores=[one], timeline=timeline, requests_in_flight=1, models_left_out=1))
    assert "1.0 of 1 core busy, 1 request, 4000 queued" in text
    assert "net, 1 core, layer 1" in text
    assert "and 1 model more" in text
