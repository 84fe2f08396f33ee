"""What the verdicts of `benchmarks.batching` rest on."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

from benchmarks.batching.estimator import arrivals_of, compare
from benchmarks.batching.latency import ODD, judge_split, neighbours, over_line
from benchmarks.batching.poisson import alternate, p50_ratio
from benchmarks.batching.queue_model import PerDispatch, serve
from benchmarks.batching.saturation import Side, configuration_of, steady_rate
from benchmarks.batching.setup import MAX_ROWS, Counted
from benchmarks.batching.step import crowd_of, crowd_row, step_of, step_row
from benchmarks.batching.turns import Turns
from benchmarks.peers.triton_server import Configuration
from benchmarks.peers.triton_server import write_repository as write_triton_repository
from benchmarks.serving.servers import write_repository
from gangway.clients.inputs import outputs_of
from gangway.protos import grpc_service_pb2 as pb
from gangway.protos import model_config_pb2 as mc
from gangway.scheduler.batching.sizes import BatchSizes
from gangway.scheduler.policy_config import BATCHING
from testing.load import RIGHT, Outcome
from testing.reference import Example, repeated
from testing.report import Report

MS = 1_000_000


def outcome(begin_ms: float, end_ms: float, result: str = RIGHT) -> Outcome:
    return Outcome(int(begin_ms * MS), int(end_ms * MS), result)


def test_sides_take_turns_and_ratios_are_those_of_a_round() -> None:
    now_s = 0.0
    speed = iter([1.0] * 2 + [1.0, 1.0, 3.0, 3.0, 1.0, 1.0])  # of the machine: the second round is three times as slow

    def side(ms: float) -> float:
        nonlocal now_s
        now_s += 1.0
        return ms * next(speed)

    turns = Turns({"a": lambda: side(100), "b": lambda: side(200)}, settle_s=0)
    turns.run(7.5, least=2, clock=lambda: now_s)
    assert turns.rounds_ms == {"a": [100, 300, 100], "b": [200, 600, 200]}
    assert (turns.rounds, turns.median_ms("a"), turns.ratio("b", "a"), turns.fastest(["b", "a"])) == (3, 100, 2, "a")


def test_short_queries_run_several_times_in_a_round() -> None:
    calls = 0

    def short() -> float:
        nonlocal calls
        calls += 1
        return 20.0

    Turns({"a": short}, settle_s=0).run(0, least=2)
    assert calls == 1 + 2 * 3


def test_rows_are_repeated_on_both_sides_of_an_example() -> None:
    inputs = {"x": np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)}
    request = pb.ModelInferRequest(model_name="m")
    request.inputs.add(name="x", datatype="FP32", shape=[2, 2])
    batch = repeated(Example(inputs, {"y": np.array([[5], [6]])}, request.SerializeToString()), 5)
    assert batch.outputs["y"].tolist() == [[5], [6], [5], [6], [5]]
    sent = pb.ModelInferRequest.FromString(batch.request)
    assert (sent.model_name, sent.inputs[0].datatype, list(sent.inputs[0].shape)) == ("m", "FP32", [5, 2])
    echo = pb.ModelInferResponse(raw_output_contents=sent.raw_input_contents)
    echo.outputs.add(name="x", datatype="FP32", shape=[5, 2])
    assert outputs_of(echo)["x"].tolist() == [[1, 2], [3, 4], [1, 2], [3, 4], [1, 2]]


def test_the_rate_of_answers_in_bursts_does_not_depend_on_where_a_burst_ends() -> None:
    ends_ns = [burst * 500 * MS for burst in range(4) for _ in range(32)]  # 32 answers every half second
    assert steady_rate(ends_ns) == pytest.approx(64)
    assert steady_rate(ends_ns[5:]) == pytest.approx(64, rel=0.05)
    assert math.isnan(steady_rate([7, 7]))
    assert math.isnan(steady_rate([]))


def test_rates_are_compared_round_by_round() -> None:
    ours, theirs = Side("", b"", [100.0, 50.0, 100.0]), Side("", b"", [50.0, 25.0, 80.0])
    assert ours.over(theirs) == 2.0
    assert Counted(100, 30).rows_per_execution(Counted(20, 10)) == 4.0


def test_configurations_of_triton_are_read() -> None:
    assert configuration_of("1x2:8") == Configuration(1, 2, 8)
    assert configuration_of("2x1s") == Configuration(2, 1, 0, spinning=True)
    with pytest.raises(ValueError, match="invalid literal"):
        configuration_of("many")


def test_triton_makes_batches_of_any_size_if_told_to(compiled_zoo, tmp_path: Path) -> None:
    write_triton_repository(tmp_path, compiled_zoo.repository, ["mlp"], Configuration(1, 2, batch_rows=32))
    config = text_format.Parse((tmp_path / "mlp" / "config.pbtxt").read_text(), mc.ModelConfig())
    assert (config.max_batch_size, config.HasField("dynamic_batching")) == (32, True)
    assert config.parameters["batch_dimensions"].string_value == ""


def test_repositories_may_allow_larger_batches(compiled_zoo, tmp_path: Path) -> None:
    write_repository(tmp_path, compiled_zoo.repository, {"mlp": None}, max_batch_size=48)
    config = text_format.Parse((tmp_path / "mlp" / "config.pbtxt").read_text(), mc.ModelConfig())
    assert config.max_batch_size == 48


def test_a_step_is_held_against_as_many_rows_in_the_old_size() -> None:
    before = [outcome(at, at + ms) for at, ms in ((0, 10), (10, 12), (30, 14))]
    after = [outcome(100, 124), outcome(130, 150, "UNAVAILABLE"), outcome(160, 180)]
    step = step_of(before, after, times=2)
    assert (step.failures, step.old_ms, step.first_ms, step.new_ms) == (1, [22, 26], 24, [20, 20])
    row = step_row("m", [step])
    assert (row["first over new"], row["new over old"], row["new, worst"], row["old, worst"]) == (1.2, 20 / 24, 24, 26)


def test_a_crowd_is_held_against_the_former_rate() -> None:
    before = [outcome(at, at + 10) for at in range(0, 1000, 10)]  # 100 answers a second
    after = [outcome(1000 + at, 1320 + at) for at in range(0, 600, 5)]
    crowd = crowd_of([*before, *after], counted_ns=500 * MS, step_ns=1000 * MS, end_ns=1400 * MS, after=64)
    assert crowd.rate_before_per_s == pytest.approx(100)
    assert crowd.old_ms == pytest.approx(640)
    assert set(crowd.latencies_ms) == {320}
    assert len(crowd.latencies_ms) == 16  # those that end in time
    assert crowd.failures == 0
    row = crowd_row("m", crowd)
    assert (row["p50 ms"], row["worst ms"]) == (320, 320)


def test_every_server_gets_every_trace() -> None:
    now_s, sent = 0.0, []

    def send(name: str, seed: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
        nonlocal now_s
        now_s += 1.0
        sent.append((name, seed))
        return np.array([1.0, 2.0 if name == "a" else 4.0, 9.0])

    chunks = alternate(send, ["a", "b"], 5, clock=lambda: now_s)
    assert sent == [("a", 1), ("b", 1), ("b", 2), ("a", 2), ("a", 3), ("b", 3)]
    assert p50_ratio(chunks["a"], chunks["b"]) == 0.5


def test_odd_sizes_are_held_against_the_line_between_powers_of_two() -> None:
    assert [neighbours(size) for size in ODD] == [(2, 4), (4, 8), (4, 8), (8, 16)]
    rounds_ms = {4: [10.0, 20.0, 10.0], 8: [20.0, 40.0, 30.0], 7: [17.5, 38.5, 50.0]}
    assert over_line(rounds_ms, 7) == pytest.approx(1.1)  # of 1, 1.1 and 2


def test_only_where_a_split_is_chosen_it_is_held_against_the_fat_gang() -> None:
    report = Report("title", {}, "command")
    rows = [{"parts": parts, "over fat": ratio} for parts, ratio in ((1, 1.25), (2, 0.8), (2, 1.01))]
    judge_split(report, "m", rows)
    assert [target.measured for target in report.targets] == [1.01, pytest.approx(1.01 ** (1 / 3))]
    judge_split(report, "m", rows[:1])
    assert len(report.targets) == 3
    assert not report.targets[2].met


@pytest.mark.parametrize("row_us", [100.0, 900.0])  # batches gain much, or little
def test_deciding_at_each_dispatch_spares_the_time_of_changes(row_us: float) -> None:
    found = compare(BatchSizes(lambda rows: 1000.0 + row_us * (rows - 1), MAX_ROWS), "step", queries=1500)
    assert all(len(latencies) == pytest.approx(1500, rel=0.1) for latencies in found.values())
    assert found["each dispatch"].mean() < found["a change takes 5 s"].mean()


@pytest.mark.parametrize("load", ["step", "ramp"])
@pytest.mark.parametrize("row_us", [100.0, 500.0, 800.0, 950.0])
def test_sizes_by_the_load_are_no_worse_than_the_two_that_do_not_know_it(row_us: float, load: str) -> None:
    sizes = BatchSizes(lambda rows: 10_000.0 + 10 * row_us * (rows - 1), MAX_ROWS)
    times_us = [float("inf"), *(sizes.latency_us(rows) + BATCHING.gang_us for rows in range(1, MAX_ROWS + 1))]
    arrivals_us = arrivals_of(load, times_us.__getitem__, 1500)
    fastest = [min(range(1, rows + 1), key=lambda size: times_us[size] / size) for rows in range(1, MAX_ROWS + 1)]

    def mean_us(rows_of: Callable[[int, float], int]) -> float:
        return float(serve(arrivals_us, PerDispatch(rows_of, times_us.__getitem__)).mean())

    by_load = mean_us(lambda depth, rate: sizes.next_rows(depth, rate * sizes.row_us))
    assert by_load < 1.03 * mean_us(lambda depth, _: sizes.next_rows(depth))
    assert by_load < 1.03 * mean_us(lambda depth, _: fastest[min(depth, MAX_ROWS) - 1])
