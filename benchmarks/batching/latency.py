"""Latency of a batch: the split that the server chooses beside one fat gang and onnxruntime; odd sizes beside even."""

import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from benchmarks.batching.setup import MAX_ROWS, Client, Setting, gangway, model_profile, with_and_without
from benchmarks.batching.turns import Turns
from benchmarks.peers.onnxruntime_peer import Timed, onnxruntime_peer, pinned, timed_ms
from gangway.scheduler.batching.planner import PlanTable, plan_table
from testing.reference import Example, repeated
from testing.report import Report, Row
from testing.repository import onnx_file

PAPERS_MODELS = ("resnet50", "inception_v3", "gpt2", "bert_base")
ODD_MODELS = ("resnet50", "bert_base")
ODD = (3, 5, 7, 13)
EVEN = (2, 4, 8, 16)
SPLIT_AT_MOST = 1.02  # times the fat gang's latency
PEER_AT_MOST = 0.9  # times onnxruntime's, geometric mean
LINE_AT_MOST = 1.05
CHOSEN, FAT = "chosen", "fat"
SPINNING = {"spinning": True, "not spinning": False}
SPINNING_ROWS = 8  # from here on only the way of waiting that was better is measured: large batches wait seldom


def run_split(report: Report, setting: Setting) -> None:
    """Every batch size of every model: the chosen configuration, the fat one, onnxruntime with all cores."""
    ratios: list[float] = []
    for model in setting.models_or(PAPERS_MODELS):
        rows = _split_rows(setting, model)
        report.table(f"{model}: latency of a batch, medians", rows)
        judge_split(report, model, rows)
        ratios += [float(row["over onnxruntime"]) for row in rows]
    if ratios:
        mean = statistics.geometric_mean(ratios)
        report.target("split: chosen over onnxruntime's fat instance, geometric mean", mean, PEER_AT_MOST)


def judge_split(report: Report, model: str, rows: Sequence[Row]) -> None:
    """Note the bounds. Where the fat configuration is the chosen one, the ratio says how much the machine varies."""
    split = [float(row["over fat"]) for row in rows if row["parts"] != 1]
    if split:
        report.target(f"split: {model}: chosen over fat, worst of {len(split)} batch sizes", max(split), SPLIT_AT_MOST)
    mean = statistics.geometric_mean(float(row["over fat"]) for row in rows)
    report.target(f"split: {model}: chosen over fat, geometric mean of all batch sizes", mean, SPLIT_AT_MOST)


def _split_rows(setting: Setting, model: str) -> list[Row]:
    """Measure one model. Small batches have many rounds, those that last longer than their share of the time two."""
    table = plan_table(model_profile(setting.repository, model), len(setting.cores), MAX_ROWS)
    example, ways, rows = setting.example(model), dict(SPINNING), list[Row]()
    with with_and_without(setting, model) as servers, ExitStack() as stack:
        clients = [stack.enter_context(Client(server.url, model)) for server in servers]
        for size in setting.batches:
            batch = repeated(example, size)
            ours = dict(zip((CHOSEN, FAT), (_served(client, batch) for client in clients), strict=True))
            turns = Turns(ours | _fat_peers(setting, model, batch, ways))
            turns.run(setting.seconds / len(setting.batches))
            best = turns.fastest(list(ways))
            if size >= SPINNING_ROWS:
                ways = {best: SPINNING[best]}
            rows.append(_split_row(size, table, len(setting.cores), turns, best))
    return rows


def _split_row(size: int, table: PlanTable, cores: int, turns: Turns, peer: str) -> Row:
    plan = table.best(cores, size)
    return {
        "rows": size,
        "chosen": str(plan),
        "parts": len(plan.parts),
        "predicted ms": plan.latency_us / 1000,
        "chosen ms": turns.median_ms(CHOSEN),
        "fat ms": turns.median_ms(FAT),
        "onnxruntime ms": turns.median_ms(peer),
        "its threads": peer,
        "over fat": turns.ratio(CHOSEN, FAT),
        "over onnxruntime": turns.ratio(CHOSEN, peer),
        "rounds": turns.rounds,
    }


def _served(client: Client, batch: Example) -> Timed:
    client.check(batch)
    return lambda: client.served_ms(batch.request)


def _fat_peers(setting: Setting, model: str, batch: Example, ways: Mapping[str, bool]) -> dict[str, Timed]:
    """One session with all cores for each way in which its threads wait."""
    path, cores = onnx_file(setting.repository, model), list(setting.cores)
    sides: dict[str, Timed] = {}
    for name, spinning in ways.items():
        with pinned(cores):
            sides[name] = timed_ms(onnxruntime_peer(path, batch.inputs, len(cores), spinning), cores)
    return sides


def run_odd(report: Report, setting: Setting) -> None:
    """Batches that are no powers of two, beside the line through the powers on both sides of them."""
    table: list[Row] = []
    for model in setting.models_or(ODD_MODELS):
        example = setting.example(model)
        with gangway(setting, [model], batching=True) as server, Client(server.url, model) as client:
            turns = Turns({str(size): _served(client, repeated(example, size)) for size in sorted(EVEN + ODD)})
            turns.run(setting.seconds)
        rounds_ms = {int(size): times_ms for size, times_ms in turns.rounds_ms.items()}
        for size in ODD:
            ratio = over_line(rounds_ms, size)
            table.append(_odd_row(model, size, turns, ratio))
            report.target(f"odd: {model}, {size} rows: over the line through powers of two", ratio, LINE_AT_MOST)
    report.table("batches of odd sizes, medians", table)


def _odd_row(model: str, size: int, turns: Turns, ratio: float) -> Row:
    below, above = neighbours(size)
    return {
        "model": model,
        "rows": size,
        "ms": turns.median_ms(str(size)),
        "between": f"{below}, {above}",
        "their ms": f"{turns.median_ms(str(below)):.1f}, {turns.median_ms(str(above)):.1f}",
        "over the line": ratio,
        "rounds": turns.rounds,
    }


def neighbours(size: int) -> tuple[int, int]:
    """Return the powers of two below and above a number that is none."""
    below = 1 << (size.bit_length() - 1)
    return below, 2 * below


def over_line(rounds_ms: Mapping[int, Sequence[float]], size: int) -> float:
    """Return the median over rounds of a batch's time over the line between its neighbours' times of the same round."""
    below, above = neighbours(size)
    share = (size - below) / (above - below)
    trios = zip(rounds_ms[size], rounds_ms[below], rounds_ms[above], strict=True)
    return statistics.median(time_ms / (low + share * (high - low)) for time_ms, low, high in trios)
