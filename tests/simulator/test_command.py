"""`gangway simulate` as a user runs it."""

import csv
import itertools
import json
from collections import defaultdict

import pytest

from gangway.scheduler.policies.registry import DEFAULT_POLICY
from gangway.server.cli import main
from gangway.simulator import command
from gangway.simulator.measured import shipped_models
from gangway.simulator.rates import RATE_STEP


def simulate(*arguments):
    return main(["simulate", *map(str, arguments)])


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_at_a_rate(tmp_path, capsys):
    arguments = ("--cores", 4, "--policy", f"{DEFAULT_POLICY},model_fcfs", "--mix", "light", "--rate", 60)
    assert simulate(*arguments, "--queries", 200, "--timeline", "--trace-decisions", "-o", tmp_path,
                    "--html", tmp_path / "page.html") == 0  # fmt: skip
    assert "light, 4 modelled cores, 200 queries, seed 1" in capsys.readouterr().out
    found = rows(tmp_path / "model_fcfs.csv")
    assert [row["model"] for row in found] == ["efficientnet_b0", "mobilenetv2", "tiny_yolov2", "total"]
    assert sum(int(row["queries"]) for row in found[:-1]) == int(found[-1]["queries"]) == 200
    assert 0 < float(found[-1]["satisfied"]) <= 100
    assert (tmp_path / "policies.png").read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "page.html").read_text()
    assert "model_fcfs" in page and "warning:</strong>" in page and "data:image/png;base64," in page
    events = json.loads((tmp_path / "model_fcfs.trace.json").read_text())["traceEvents"]
    busy_us = sum(event["dur"] for event in events if event["ph"] == "X")
    assert busy_us == pytest.approx(float(rows(tmp_path / "model_fcfs.counters.csv")[0]["core_busy_us"]), rel=1e-3)
    starts = [row for row in rows(tmp_path / "model_fcfs.decisions.csv") if row["decision"] == "Start"]
    assert len({row["query"] for row in starts}) == 200


def test_the_highest_rate(tmp_path, capsys):
    arguments = ("--cores", 2, "--mix", "resnet50=1,googlenet=3", "--qos", "3x", "--policy", "model_fcfs")
    assert simulate(*arguments, "--queries", 300, "--each", "--seeds", 2, "-o", tmp_path) == 0
    probes = rows(tmp_path / "search.csv")
    best = {}
    for goal, search in itertools.product(("all", "each"), "01"):
        tried = [row for row in probes if (row["goal"], row["search"]) == (goal, search)]
        best[goal, search] = max(float(row["rate_per_s"]) for row in tried if float(row["share"]) >= 0.95)
        higher = [float(row["share"]) for row in tried if float(row["rate_per_s"]) > best[goal, search] * 1.001]
        assert higher and max(higher) < 0.95
    assert all(best["each", search] <= best["all", search] * RATE_STEP for search in "01")
    found = rows(tmp_path / "model_fcfs.csv")[-1]
    assert float(found["rate_per_s"]) == pytest.approx((best["each", "0"] + best["each", "1"]) / 2, rel=1e-4)
    curve = rows(tmp_path / "policies.csv")
    assert [float(row["in_time"]) for row in curve] == sorted((float(row["in_time"]) for row in curve), reverse=True)
    assert "95 % of each model" in capsys.readouterr().out


def test_without_matplotlib_there_are_tables(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "missing_packages", lambda packages: f"{packages[0]}: pip install it")
    arguments = ("--cores", 2, "--mix", "resnet50=1", "--qos", "3x", "--rate", 5, "--queries", 20, "-o", tmp_path)
    assert simulate(*arguments, "--machine", "contended") == 0
    out = capsys.readouterr().out
    assert "2 modelled contended cores" in out and "no picture: it needs matplotlib" in out
    assert not (tmp_path / "policies.png").exists()


def test_doubtful_measurements_are_named(tmp_path, capsys):
    fields = json.loads(shipped_models()["tiny_yolov2"].read_text())
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**fields, "model_name": "mine", "cores_whole": 0.6, "spread": 0.08, "sessions": 4}))
    arguments = ("--mix", "mine=1", "--rate", 5, "--queries", 20, "--cores", 1, "-o", tmp_path / "out")
    assert simulate("--profile", path, *arguments) == 0
    errors = capsys.readouterr().err
    assert "warning: mine: cores slowed each other down to 60%" in errors
    assert "warning: mine: its times spread by 8.0% over 4 session(s)" in errors


def test_other_profiles(tmp_path):
    fields = json.loads(shipped_models()["tiny_yolov2"].read_text())
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**fields, "model_name": "mine"}))
    arguments = ("--mix", "mine=1", "--qos", "50", "--rate", 5, "--queries", 20, "-o", tmp_path / "out")
    assert simulate("--profile", path, "--cores", 1, *arguments) == 0
    assert [row["model"] for row in rows(tmp_path / "out" / f"{DEFAULT_POLICY}.csv")] == ["mine", "total"]


def scaled(numbers, factor):
    """Times of any nesting, all of them so many times as long."""
    return [scaled(each, factor) for each in numbers] if isinstance(numbers, list) else factor * numbers


@pytest.fixture
def twice_as_fast(tmp_path):
    """tiny_yolov2 as if it had been measured in bf16."""
    fields = json.loads(shipped_models()["tiny_yolov2"].read_text())
    times = ("latency_us", "batch_us", "isolated_us", "together_us", "memory_us", "compute_us")
    path = tmp_path / "bf16.json"
    path.write_text(json.dumps({**fields, **{name: scaled(fields[name], 0.5) for name in times}}))
    return path


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.long), 4])
def test_deadlines_choose_between_two_precisions(tmp_path, twice_as_fast, batch):
    """At a rate that fp32 alone hardly carries more are in time; at a low one nearly all stay in fp32."""
    mix = ("--mix", "tiny_yolov2=1", "--qos", "3x", "--cores", 2, "--queries", 400, "--batch", batch)
    in_time, in_fp32 = {}, {}
    for rate, bf16 in itertools.product((4, 38), ((), ("--bf16-profile", twice_as_fast))):
        folder = tmp_path / f"{rate}-{len(bf16)}"
        assert simulate(*mix, "--rate", rate, *bf16, "--trace-decisions", "-o", folder) == 0
        stem = folder / DEFAULT_POLICY
        in_time[rate, bool(bf16)] = float(rows(stem.with_suffix(".csv"))[-1]["satisfied"])
        counters = rows(stem.with_suffix(".counters.csv"))[0]
        counted = int(counters["in_fp32"]), int(counters["in_bf16"])
        assert bool(sum(counted)) == bool(bf16)
        if bf16:
            in_fp32[rate] = counted[0] / sum(counted)
    assert in_time[38, True] > in_time[38, False] + 5
    assert in_time[4, True] >= 99
    assert in_fp32[4] > 0.95 and 0.05 < in_fp32[38] < in_fp32[4]


def test_a_model_in_bf16_must_be_in_the_mix(tmp_path, twice_as_fast, capsys):
    assert simulate("--mix", "resnet50=1", "--rate", 5, "--bf16-profile", twice_as_fast, "-o", tmp_path) == 1
    assert "measured in bf16, but not in the mix: tiny_yolov2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mix", "absent"), "unknown mix 'absent'"),
        (("--mix", "absent.toml"), "absent.toml"),
        (("--mix", "other=1"), "nobody measured 'other'"),
        (("--profile", "absent.json"), "absent.json"),
        (("--qos", "soon"), "soon"),
        (("--mix", "resnet50=1", "--cores", 2), "no targets to search for"),
    ],
)
def test_what_cannot_be_done(tmp_path, capsys, arguments, message):
    assert simulate(*arguments, "-o", tmp_path) == 1
    error = capsys.readouterr().err
    assert error.startswith("gangway simulate: ") and message in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "absent"), "unknown scheduler 'absent'"),
        (("--cores", 0), "at least 1"),
        (("--cores", 2000), "at most 1024 cores"),
        (("--seed", -1), "from 0 on"),
        (("--queries", 1.5), "whole"),
        (("--rate", "fast"), "positive number"),
        (("--satisfied", 101), "up to 100"),
        (("--rate", 5, "--clients", 2), "not allowed with"),
    ],
)
def test_wrong_usage(tmp_path, capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_info:
        simulate(*arguments, "-o", tmp_path)
    assert exit_info.value.code == 2 and message in capsys.readouterr().err


def test_a_closed_loop_has_the_rate_that_it_finds(tmp_path, capsys):
    arguments = ("--cores", 2, "--mix", "resnet50=1", "--clients", 4, "--queries", 100, "-o", tmp_path)
    assert simulate(*arguments) == 0
    found = rows(tmp_path / f"{DEFAULT_POLICY}.csv")[-1]
    assert int(found["queries"]) == 100 and float(found["rate_per_s"]) == pytest.approx(float(found["qps"]), rel=1e-3)


def test_bursts_of_requests_in_batches(tmp_path, capsys):
    arguments = ("--cores", 16, "--mix", "gpt2=1", "--rate", 40, "--queries", 60, "--timeline")
    assert simulate(*arguments, "--burst", 8, "--batch", 64, "-o", tmp_path) == 0
    assert "rows a batch" in capsys.readouterr().out
    found = rows(tmp_path / f"{DEFAULT_POLICY}.csv")
    assert int(found[-1]["queries"]) == 64, "whole bursts"


def test_requests_of_several_rows_are_split_over_gangs(tmp_path):
    """Of a model whose gangs of two cores lose 15 %, so that a serial part makes wide ones slow."""
    fields = json.loads(shipped_models()["gpt2"].read_text())
    both_us = [1.15 * time_us / 2 for time_us in fields["isolated_us"][0]]
    path = tmp_path / "mine.json"
    times_us = [fields["isolated_us"][0], both_us]
    path.write_text(json.dumps({**fields, "isolated_us": times_us, "together_us": times_us, "model_name": "mine"}))
    arguments = ("--cores", 16, "--profile", path, "--mix", "mine=1", "--rate", 40, "--queries", 60, "--timeline")
    assert simulate(*arguments, "--rows", 8, "--batch", 8, "-o", tmp_path / "large") == 0
    events = json.loads((tmp_path / "large" / f"{DEFAULT_POLICY}.trace.json").read_text())["traceEvents"]
    stretches = [event["args"] for event in events if event["ph"] == "X"]
    assert {args["rows"] for args in stretches} <= {1, 2, 4, 8}
    parts = defaultdict(dict)
    for args in stretches:
        if "batch" in args:  # otherwise a request on one gang
            parts[args["batch"]][args["part"]] = args["rows"]
    assert all(sum(rows_of.values()) == 8 for rows_of in parts.values()), "each batch is a request of 8 rows"
    for rows_of in parts.values():
        assert sorted(rows_of) == sorted(f"{part} of {len(rows_of)}" for part in range(1, len(rows_of) + 1))
    assert max(map(len, parts.values())) > 1
