"""Rows per second when clients always wait: Gangway (batching on, off), Triton's dynamic batching, onnxruntime."""

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np

from benchmarks.batching.setup import TIMEOUT_S, Setting, counted, gangway
from benchmarks.batching.turns import Turns
from benchmarks.front_end.transports import ALIGNED, in_region, region_with
from benchmarks.peers.onnxruntime_peer import onnxruntime_peer, pinned, timed_ms
from benchmarks.peers.triton_server import Configuration, triton_server
from testing.load import RIGHT, Load, LoadProcess, raw_channel
from testing.reference import Example, repeated
from testing.report import Report, Row
from testing.repository import onnx_file

MODELS = ("resnet50", "mobilenetv2")
CLIENTS = 32
WARM_UP_S = 1.0
STRETCH_S = 4.0
LEAST_ROUNDS = 2
ENGINE_ROWS = (1, 8, 32)  # batches that onnxruntime alone may choose from
ENGINE_SHARE = 0.2  # of a model's time
PEER_AT_LEAST = 1.15
OURS, OFF = "gangway", "gangway, batching off"
PAGE_BYTES = 4096


@dataclass(frozen=True)
class Side:
    """A server under load: its rows per second, round by round, and the mean size of the batches it made."""

    url: str
    request: bytes
    rates_per_s: list[float] = field(default_factory=list)
    batch_rows: list[float] = field(default_factory=list)

    def over(self, other: "Side") -> float:
        """Return the median of each round's ratio of rates."""
        return statistics.median(a / b for a, b in zip(self.rates_per_s, other.rates_per_s, strict=True))


def steady_rate(ends_ns: Sequence[int]) -> float:
    """Return answers per second: the slope of their number over time. NaN if all come at the same time.

    The answers of a batch come at once: how many there are between two moments depends on where batches happen to end,
    the slope of the line next to all of them does not.
    """
    times_s = (np.sort(np.array(ends_ns, dtype=np.float64)) - min(ends_ns, default=0)) / 1e9
    if len(times_s) < 2 or times_s[-1] == 0:
        return float("nan")
    slope, _ = np.polyfit(times_s, np.arange(len(times_s)), 1)
    return float(slope)


def configuration_of(text: str) -> Configuration:
    """Read INSTANCESxTHREADS:ROWS, with an s behind the threads if they spin. Raises ValueError."""
    shape, _, rows = text.partition(":")
    instances, _, threads = shape.partition("x")
    return Configuration(int(instances), int(threads.removesuffix("s")), int(rows or 0), threads.endswith("s"))


def run_saturation(report: Report, setting: Setting) -> None:
    """Let CLIENTS clients, each with a row, wait for their answers all the time."""
    configurations = [configuration_of(text) for text in setting.triton]
    how = "in shared memory" if setting.regions else "in messages"
    for model in setting.models_or(MODELS):
        sides = _measure(setting, model, configurations)
        ours = sides[OURS]
        engine, engine_rate = max(_engine_rates(setting, model).items(), key=lambda item: item[1])
        over_engine = statistics.median(ours.rates_per_s) / engine_rate
        rows = [_row(name, side, ours) for name, side in sides.items()]
        rows.append({"server": engine, "rows/s": engine_rate, "rows a batch": "", "gangway over it": over_engine})
        report.table(f"{model}, {CLIENTS} clients, one row each, {how}", rows)
        peers = {one.name: ours.over(sides[one.name]) for one in configurations} | {engine: over_engine}
        for name, ratio in peers.items():
            report.goal(f"saturation: {model}: rows/s over {name}", ratio, PEER_AT_LEAST)


def _measure(setting: Setting, model: str, configurations: Sequence[Configuration]) -> dict[str, Side]:
    """Start all servers of a model and let them take turns, a stretch of load each."""
    example = repeated(setting.example(model), 1)
    with ExitStack() as stack:
        urls = {name: stack.enter_context(gangway(setting, [model], name == OURS)).url for name in (OURS, OFF)}
        for one in configurations:
            urls[one.name] = stack.enter_context(triton_server(setting.repository, [model], one)).url
        requests = {name: _request(stack, url, example, setting.regions) for name, url in urls.items()}
        sides = {name: Side(url, requests[name]) for name, url in urls.items()}
        _take_turns(sides, example, model, setting.seconds)
    return sides


def _request(stack: ExitStack, url: str, example: Example, regions: bool) -> bytes:
    """Return the request; if asked for, with its one input in a region that the server knows."""
    if not regions:
        return example.request
    (values,) = example.inputs.values()
    channel = stack.enter_context(raw_channel(url))
    stack.enter_context(region_with(channel, values.tobytes(), values.nbytes + PAGE_BYTES))
    return in_region(example.request, ALIGNED, 0)


def _take_turns(sides: Mapping[str, Side], example: Example, model: str, seconds: float) -> None:
    end_s, number, names = time.monotonic() + seconds, 0, list(sides)
    while number < LEAST_ROUNDS or time.monotonic() < end_s:
        first = number % len(names)
        for name in names[first:] + names[:first]:
            side = sides[name]
            before = counted(side.url, model)
            load = Load(side.url, side.request, example.outputs, CLIENTS, TIMEOUT_S)
            side.rates_per_s.append(_stretch(name, load))
            side.batch_rows.append(counted(side.url, model).rows_per_execution(before))
        number += 1


def _stretch(name: str, load: Load) -> float:
    """Return the rate of one stretch of a server's load. Raises RuntimeError when an answer is wrong or an error."""
    with LoadProcess(load) as process:
        time.sleep(WARM_UP_S)
        begin_ns = time.monotonic_ns()
        time.sleep(STRETCH_S)
        end_ns = time.monotonic_ns()
        outcomes = process.stop().outcomes
    if bad := Counter(outcome.result for outcome in outcomes if outcome.result != RIGHT):
        raise RuntimeError(f"{name}: of {len(outcomes)} answers some were none: {dict(bad)}")
    return steady_rate([outcome.end_ns for outcome in outcomes if begin_ns <= outcome.end_ns < end_ns])


def _engine_rates(setting: Setting, model: str) -> dict[str, float]:
    """Return rows per second of onnxruntime without any server or client, by size of batch and way of waiting."""
    path, cores, example = onnx_file(setting.repository, model), list(setting.cores), setting.example(model)
    sides, sizes = {}, {}
    for size in ENGINE_ROWS:
        for spinning in (True, False):
            name = f"onnxruntime alone, batches of {size}" + (", spinning" if spinning else "")
            with pinned(cores):
                once = onnxruntime_peer(path, repeated(example, size).inputs, len(cores), spinning)
            sides[name], sizes[name] = timed_ms(once, cores), size
    turns = Turns(sides)
    turns.run(ENGINE_SHARE * setting.seconds)
    return {name: size / turns.median_ms(name) * 1000 for name, size in sizes.items()}


def _row(name: str, side: Side, ours: Side) -> Row:
    return {
        "server": name,
        "rows/s": statistics.median(side.rates_per_s),
        "rows a batch": f"{statistics.mean(side.batch_rows):.1f}",
        "gangway over it": ours.over(side),
    }
