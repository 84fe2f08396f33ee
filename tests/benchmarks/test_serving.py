"""What the verdicts of `benchmarks.serving` and `benchmarks.serving.overload` rest on."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format

from benchmarks.peers.triton_server import CONFIGURATIONS
from benchmarks.peers.triton_server import write_repository as write_triton_repository
from benchmarks.serving.overload import Sample, chained, recovery_s, thirds
from benchmarks.serving.points import (
    ALL,
    EACH,
    Counts,
    Criterion,
    Point,
    counts_of,
    decode,
    decode_file,
    encode,
    encode_file,
    highest_share,
    models_of,
    over_isolated,
    satisfied,
    wilson,
)
from benchmarks.serving.servers import known_servers, write_repository
from benchmarks.serving.table import add_tables, anything_holds
from gangway.protos import model_config_pb2 as mc
from gangway.server.models.settings import precision_of
from gangway.workload.arrivals import Arrivals
from gangway.workload.outcomes import Outcomes, summarise
from testing.reference import symbolic_dimensions
from testing.report import Report


def point(share: float, in_time: tuple[int, int], seed: int = 1) -> Point:
    """Two models, asked 100 and 20 times; so many of them were answered within 3 times isolated."""
    models = {
        name: Counts(asked, {"3x": good, "4x": good, "5x": good}, 2.0, 1e4, 2e4, {})
        for name, asked, good in zip("ab", (100, 20), in_time, strict=True)
    }
    total = sum(in_time)
    counts = Counts(120, {"3x": total, "4x": total, "5x": total}, 2.0, 1e4, 2e4, {"UNAVAILABLE": 20})
    return Point("s", "m", share, seed, 3.0, 10.0, 12.0, models, counts, 1.0, 0.1, 5.0, 1.0)


def test_each_model_counts_by_its_worst_and_all_together() -> None:
    one = [point(0.5, (100, 18))]
    assert satisfied(one, Criterion(EACH, "3x")) == 0.9
    assert satisfied(one, Criterion(ALL, "3x")) == pytest.approx(118 / 120)
    both = [*one, point(0.5, (100, 20), seed=2)]
    assert satisfied(both, Criterion(EACH, "3x")) == 0.95


def test_a_ladder_ends_at_the_first_step_that_fails() -> None:
    points = [point(0.3, (100, 20)), point(0.4, (90, 20)), point(0.5, (100, 20))]
    assert highest_share(points, Criterion(EACH, "3x")) == 0.3
    assert highest_share(points[1:], Criterion(EACH, "3x")) == 0.0
    assert highest_share([], Criterion(EACH, "3x")) == 0.0
    assert anything_holds(points[:1])
    assert not anything_holds(points[1:2])


def test_points_survive_the_file() -> None:
    one = point(0.5, (100, 18))
    assert decode(encode(one)) == one
    text = encode_file({"a": 1.5}, [one, point(0.6, (1, 2))])
    assert decode_file(text) == ({"a": 1.5}, [one, point(0.6, (1, 2))])
    assert decode_file(text[:-7]) == ({"a": 1.5}, [one])  # killed while it wrote
    assert decode_file("") == ({}, [])


def test_points_of_two_clients_are_two_points() -> None:
    one = point(0.5, (1, 2))
    assert replace(one, client="grpcio").key != one.key
    fields = json.loads(encode(one))
    assert fields.pop("client") == "raw"
    assert decode(json.dumps(fields)) == one  # of a file from before the choice


def test_counts_are_those_of_the_run() -> None:
    outcomes = Outcomes(
        ("a", "b"),
        models=np.array([0, 0, 1, 1]),
        scheduled_us=np.array([0.0, 1e6, 2e6, 3e6]),
        latency_us=np.array([100.0, 500.0, 1000.0, 50.0]),
        status=np.array([0, 0, 0, 1]),
        statuses=("OK", "UNAVAILABLE"),
    )
    summary = summarise(outcomes, {"3x": [300.0, 3000.0], "5x": [500.0, 5000.0]}, [100.0, 1000.0], seconds=4)
    assert models_of(summary)["a"].in_time == {"3x": 1, "5x": 2}
    assert models_of(summary)["b"].in_time == {"3x": 1, "5x": 1}  # an error is not in time
    total = counts_of(summary.total)
    assert (total.queries, total.answered, total.errors) == (4, 3, {"UNAVAILABLE": 1})
    assert total.mean_over_isolated == pytest.approx((1 + 5 + 1) / 3)


def test_latency_over_isolated_is_the_mean_over_answers() -> None:
    assert over_isolated([point(0.5, (100, 18))]) == 2.0
    assert math.isnan(over_isolated([]))


def test_wilsons_interval() -> None:
    low, high = wilson(81, 263)  # of Newcombe's table (1998): 0.2553, 0.3662
    assert (low, high) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(20, 20)[0] < 0.9


def test_repositories_have_targets_and_link_to_the_models(compiled_zoo, tmp_path: Path) -> None:
    write_repository(tmp_path, compiled_zoo.repository, {"mlp": 7.25, "simple": None})
    with_target = text_format.Parse((tmp_path / "mlp" / "config.pbtxt").read_text(), mc.ModelConfig())
    without = text_format.Parse((tmp_path / "simple" / "config.pbtxt").read_text(), mc.ModelConfig())
    assert with_target.parameters["qos_ms"].string_value == "7.250"
    assert not {"qos_ms", "precision_min_cosine"} & without.parameters.keys()
    low = tmp_path / "low"
    low.mkdir()
    write_repository(low, compiled_zoo.repository, {"mlp": None}, min_cosine=0.0)
    config = text_format.Parse((low / "mlp" / "config.pbtxt").read_text(), mc.ModelConfig())
    assert precision_of(config, "bf16").min_cosine == 0
    assert (tmp_path / "mlp" / "1" / "model.onnx").samefile(compiled_zoo.onnx_file("mlp"))


def test_triton_is_told_instances_threads_and_where_the_model_is(compiled_zoo, tmp_path: Path) -> None:
    write_triton_repository(tmp_path, compiled_zoo.repository, ["mlp"], CONFIGURATIONS["triton 2x1"])
    config = text_format.Parse((tmp_path / "mlp" / "config.pbtxt").read_text(), mc.ModelConfig())
    assert (config.backend, config.platform, config.instance_group[0].count) == ("python", "", 2)
    assert config.parameters["threads"].string_value == "1"
    assert config.parameters["batch_dimensions"].string_value == ",".join(
        symbolic_dimensions(compiled_zoo.onnx_file("mlp"))
    )
    assert Path(config.parameters["onnx_file"].string_value).samefile(compiled_zoo.onnx_file("mlp"))
    assert (tmp_path / "mlp" / "1" / "model.py").exists()


def test_servers_are_known_by_name() -> None:
    assert known_servers(["gangway", "edf"], ["1x2"]) == ["gangway", "edf", "triton 1x2"]
    with pytest.raises(ValueError, match="triton 3x3"):
        known_servers([], ["3x3"])


def test_goals_are_judged_as_far_as_the_ladder_went() -> None:
    report = Report("title", {}, "command")
    fine, poor = (replace(point(share, (100, good)), mix="light") for share, good in ((0.35, 20), (0.5, 1)))
    poor = replace(poor, total=replace(poor.total, in_time={"3x": 1, "4x": 1, "5x": 1}))
    add_tables(report, [replace(fine, server="gangway")], ["light"], ["gangway"], "gangway")
    assert [target.met for target in report.targets] == [True, False]  # 0.35 is carried; 2.0 times isolated
    report = Report("title", {}, "command")
    add_tables(report, [replace(one, server="gangway") for one in (fine, poor)], ["light"], ["gangway"], "gangway")
    assert [target.measured for target in report.targets] == [0.35, 0.35, 0.35, 2.0]
    (rows,) = report.tables.values()
    assert rows[0]["gangway"] == "0.35 (0.35)"


def test_recovery_begins_when_a_second_of_queries_is_in_time() -> None:
    times_us = np.arange(0, 20e6, 1e5)
    latency_us = np.where((times_us >= 5e6) & (times_us < 12e6), 9e5, 1e3)
    zeros = np.zeros(len(times_us), dtype=np.int64)
    outcomes = Outcomes(("a",), zeros, times_us, latency_us, zeros)
    assert recovery_s(outcomes, [2e3], end_s=10) == pytest.approx(1.9)  # one in ten may still be late
    assert recovery_s(outcomes, [2e3], end_s=13) == 0
    assert recovery_s(outcomes, [1.0], end_s=10) == math.inf


def test_memory_is_compared_by_medians_of_thirds() -> None:
    samples = [Sample(size, 0) for size in (50, 60, 100, 101, 180, 110, 110)]
    first, second, last = thirds(samples)
    assert last / first - 1 == pytest.approx(1.0)
    assert last / second - 1 == pytest.approx(110 / 100.5 - 1)
    assert all(math.isnan(third) for third in thirds([]))


def test_a_trace_after_another_begins_when_that_ends() -> None:
    both = chained(Arrivals(np.array([1.0]), np.array([0])), 2.0, Arrivals(np.array([5.0]), np.array([1])))
    assert both.times_us.tolist() == [1.0, 2e6 + 5]
    assert both.models.tolist() == [0, 1]
