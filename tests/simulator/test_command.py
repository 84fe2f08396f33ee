"""`gangway simulate` as a user runs it."""

import csv
import json
from collections import defaultdict

import pytest

from gangway.scheduler.policies.registry import DEFAULT_POLICY
from gangway.server.cli import main
from gangway.simulator.measured import shipped_models


def simulate(*arguments):
    return main(["simulate", *map(str, arguments)])


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_at_a_rate(tmp_path, capsys):
    arguments = ("--cores", 4, "--policy", f"{DEFAULT_POLICY},model_fcfs", "--mix", "light", "--rate", 60)
    assert simulate(*arguments, "--queries", 200, "--timeline", "--trace-decisions", "-o", tmp_path) == 0
    assert "light, 4 cores, 200 queries, seed 1" in capsys.readouterr().out
    found = rows(tmp_path / "model_fcfs.csv")
    assert [row["model"] for row in found] == ["efficientnet_b0", "mobilenetv2", "tiny_yolov2", "total"]
    assert sum(int(row["queries"]) for row in found[:-1]) == int(found[-1]["queries"]) == 200
    assert 0 < float(found[-1]["satisfied"]) <= 100
    assert (tmp_path / "policies.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "model_fcfs.trace.json").read_text())["traceEvents"]
    busy_us = sum(event["dur"] for event in events if event["ph"] == "X")
    assert busy_us == pytest.approx(float(rows(tmp_path / "model_fcfs.counters.csv")[0]["core_busy_us"]), rel=1e-3)
    starts = [row for row in rows(tmp_path / "model_fcfs.decisions.csv") if row["decision"] == "Start"]
    assert len({row["query"] for row in starts}) == 200


def test_the_highest_rate(tmp_path):
    arguments = ("--cores", 2, "--mix", "resnet50=1,googlenet=3", "--qos", "3x", "--policy", "model_fcfs")
    assert simulate(*arguments, "--queries", 300, "--each", "-o", tmp_path) == 0
    found = rows(tmp_path / "model_fcfs.csv")
    assert all(float(row["satisfied"]) >= 95 for row in found)
    probes = rows(tmp_path / "search.csv")
    best = float(found[-1]["rate_per_s"])
    higher = [float(row["share"]) for row in probes if float(row["rate_per_s"]) > best * 1.001]
    assert higher and max(higher) < 0.95


def test_other_profiles(tmp_path):
    fields = json.loads(shipped_models()["tiny_yolov2"].read_text())
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**fields, "model_name": "mine"}))
    arguments = ("--mix", "mine=1", "--qos", "50", "--rate", 5, "--queries", 20, "-o", tmp_path / "out")
    assert simulate("--profile", path, "--cores", 1, *arguments) == 0
    assert [row["model"] for row in rows(tmp_path / "out" / f"{DEFAULT_POLICY}.csv")] == ["mine", "total"]


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
        (("--cores", 0), "positive"),
        (("--cores", 2000), "at most 1024 cores"),
        (("--seed", -1), "from 0 on"),
        (("--queries", 1.5), "whole"),
        (("--rate", "fast"), "positive number"),
        (("--satisfied", 101), "100 percent"),
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
    assert simulate(*arguments, "--rows", 8, "--batch", 8, "-o", tmp_path / "large") == 0
    events = json.loads((tmp_path / "large" / f"{DEFAULT_POLICY}.trace.json").read_text())["traceEvents"]
    stretches = [event["args"] for event in events if event["ph"] == "X"]
    assert {args["rows"] for args in stretches} <= {1, 2, 4, 8}
    parts = defaultdict(dict)
    for args in stretches:
        parts[args["batch"]][args["part"]] = args["rows"]
    assert all(sum(rows_of.values()) == 8 for rows_of in parts.values()), "each batch is a request of 8 rows"
    for rows_of in parts.values():
        assert sorted(rows_of) == sorted(f"{part} of {len(rows_of)}" for part in range(1, len(rows_of) + 1))
    assert max(map(len, parts.values())) > 1
