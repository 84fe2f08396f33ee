"""`gangway perf` as a user runs it, against a real server; and its parts on made-up runs."""

import base64
import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gangway.clients.open_loop import CLIENTS
from gangway.clients.perf.command import main, parse_options
from gangway.clients.perf.mlperf import samples_of
from gangway.clients.perf.prepare import parse_isolated, parse_levels, resolve
from gangway.workload.mix import Mix, MixModel
from gangway.workload.qos import Qos, WorkloadError
from testing.live_server import LiveServer, free_port

TWO = Mix("two", (MixModel("a"), MixModel("b")))


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


Perf = Callable[..., Done]


@pytest.fixture
def perf(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Perf:
    """Runs the command in this process."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> Done:
        status = main(arguments)
        return Done(status, *capsys.readouterr())

    return run


@pytest.mark.parametrize("client", CLIENTS)
def test_one_run_says_everything_of_each_model(gangway_server: LiveServer, tmp_path: Path, perf: Perf, client: str):
    result, picture = tmp_path / "result.json", tmp_path / "latency.png"
    load = ("--mix", "mlp=3,simple=1", "--rate", "200", "--queries", "60", "--warmup", "0.1", "--seed", "5")
    wanted = ("--qos", "1000x,20000", f"--json={result}", f"--png={picture}", f"--client={client}")
    wanted += (f"--html={tmp_path / 'page.html'}",)
    done = perf(gangway_server.url, *load, *wanted)
    assert done.returncode == 0, done.stderr
    for said in ("in 1000x %", "in 20000ms %", "p99", "x isolated", "errors", "queue ms", "blocks", "sender late"):
        assert said in done.stdout
    written = json.loads(result.read_text())
    (run,) = written["runs"]
    assert written["client"] == client
    assert f"client {client}: {run['sender']['cpu_us_per_query']:.0f} us of CPU a query" in done.stdout
    assert written.keys() == {
        "format_version", "url", "client", "mix", "models", "capacity_per_s", "warm_up_s", "scenario", "runs", "goal",
        "found",
    }  # fmt: skip
    assert [(model["name"], model["share"]) for model in written["models"]] == [("mlp", 0.75), ("simple", 0.25)]
    assert written["models"][0]["targets_us"]["20000ms"] == 20e6
    assert written["models"][0]["targets_us"]["1000x"] == pytest.approx(1000 * written["models"][0]["isolated_us"])
    total = run["total"]
    assert (total["queries"], total["errors"], total["satisfied"]["20000ms"]) == (60, {}, 1.0)
    assert sum(row["queries"] for row in run["models"]) == 60
    assert 0 < total["p50_us"] <= total["p95_us"] <= total["p99_us"]
    assert run["server"]["mlp"]["queries"] >= run["models"][0]["queries"]  # warm-up, too
    assert run["server"]["mlp"].keys() >= {"mean_queue_us", "mean_compute_us", "blocks", "conflicts", "preemptions"}
    assert picture.read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "page.html").read_text()
    assert "in 1000x %" in page and base64.b64encode(picture.read_bytes()).decode() in page


def test_a_search_ends_at_the_rate_that_the_target_allows(gangway_server: LiveServer, tmp_path: Path, perf: Perf):
    result, picture = tmp_path / "result.json", tmp_path / "search.png"
    load = ("--mix", "simple=1", "--search", "--rate", "200", "--queries", "30", "--warmup", "0", "--step", "2")
    levels = ("--isolated", "simple=0.01", "--qos", "1x,1000000", "--votes", "1")
    done = perf("-u", gangway_server.url, *load, *levels, f"--json={result}", f"--png={picture}")
    assert done.returncode == 0, done.stderr
    found = json.loads(result.read_text())["found"]
    assert found["1x"]["rate_per_s"] == 0  # nobody answers within 10 us
    assert found["1000000ms"]["rate_per_s"] >= 200 * 2**6
    (reason,) = re.findall(r"^highest rate with 95% of all queries within 1x: none, (.*)", done.stdout, re.MULTILINE)
    assert re.fullmatch(
        r"down to \S+/s: simple has 0.0% there, p95 \S+ ms, target 0.01 ms; a longer run searches lower", reason
    )
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("client", CLIENTS)
def test_mlperf_s_load_generator_gives_its_verdict(gangway_server: LiveServer, tmp_path: Path, perf: Perf, client: str):
    result = tmp_path / "result.json"
    load = ("--mix", "mlp=3,simple=1", "--rate", "400", "--queries", "100", "--scenario", "mlperf-server")
    given = ("--qos", "10000", "--isolated", "mlp=1,simple=1", f"--client={client}")
    done = perf(gangway_server.url, *load, *given, f"--json={result}")
    assert done.returncode == 0, done.stderr
    written = json.loads(result.read_text())
    assert f"MLPerf loadgen, server scenario, client {client}: " in done.stdout
    assert f"Result is: {'VALID' if written['scenario']['valid'] else 'INVALID'}" in written["scenario"]["summary"]
    (run,) = written["runs"]
    assert (run["total"]["queries"], run["total"]["errors"]) == (100, {})
    assert 55 <= run["models"][0]["queries"] <= 95  # of 100, three quarters


def test_mlperf_s_load_generator_where_many_descriptors_are_open(gangway_server: LiveServer, perf: Perf) -> None:
    """`select` ends at 1023, and the load generator waits for ever for what is not answered."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    load = ("--mix", "simple=1", "--rate", "400", "--queries", "20", "--scenario", "mlperf-server")
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1024):
            stack.enter_context(Path(os.devnull).open("rb"))
        done = perf(gangway_server.url, *load, "--qos", "10000", "--isolated", "simple=1")
    assert done.returncode == 0, done.stderr


def test_arrivals_from_a_file_and_inputs_from_a_folder(gangway_server: LiveServer, tmp_path: Path, perf: Perf):
    (tmp_path / "trace.csv").write_text("time_us,model\n" + "".join(f"{i * 1000},simple\n" for i in range(20)))
    (tmp_path / "simple").mkdir()
    for name in ("INPUT0", "INPUT1"):
        np.save(tmp_path / "simple" / f"{name}.npy", np.ones((1, 16), dtype=np.int32))
    (tmp_path / "own.toml").write_text('[[models]]\nname = "simple"\nqos = 10000\n')
    arguments = ("--mix", str(tmp_path / "own.toml"), "--trace", str(tmp_path / "trace.csv"), "--warmup", "0")
    done = perf(gangway_server.url, *arguments, "--input-data", str(tmp_path), "--json", str(tmp_path / "r.json"))
    assert done.returncode == 0, done.stderr
    (run,) = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert (run["total"]["queries"], run["total"]["satisfied"], run["rate_per_s"]) == (20, {"qos": 1.0}, None)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--mix", "nothing=1", "--rate", "5"), 1, "NOT_FOUND"),
        (("--mix", "mlp=1", "--rate", "5", "--input-data", "/no/such"), 2, "/no/such/mlp/"),
        (("--mix", "mlp=1", "--rate", "5", "--isolated", "simple=3", "--qos", "3x"), 2, "no latency of mlp"),
        (("--mix", "mlp=1,simple=1", "--rate", "5", "--shape", "imput:16"), 2, "no model has an input 'imput'"),
        (
            ("--mix", "mlp=1,simple=1", "--rate", "5", "--shape", "input:17"),
            2,
            "input 'input' is [-1, 16]; say the sizes",
        ),
    ],
)
def test_what_the_server_cannot_do_is_said(gangway_server: LiveServer, arguments, status, said, perf: Perf):
    done = perf(gangway_server.url, *arguments)
    assert (done.returncode, said in done.stderr, len(done.stderr.splitlines())) == (status, True, 1), done.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (("--mix", "mlp=1", "--rate", "5", "--timeout-ms", "2000"), 3, "no server answers"),
        (("--mix", "ligth", "--rate", "5"), 2, "unknown mix 'ligth'"),
        (("--mix", "absent.toml", "--rate", "5"), 2, "absent.toml"),
    ],
)
def test_mistakes_have_exit_codes_of_their_own(arguments, status, said, perf: Perf):
    done = perf(f"127.0.0.1:{free_port()}", *arguments)
    assert (done.returncode, said in done.stderr, len(done.stderr.splitlines())) == (status, True, 1), done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        "--mix light --scenario mlperf-server",
        "--mix light --rate 0",
        "--mix light --rate 5 --trace t.csv",
        "--mix light --search --trace t.csv",
        "--mix light --search --goal 1.1",
        "--mix light --search --step 1",
        "--mix light --rate 5 --seconds soon",
        "--mix light --rate 5 --queries 0",
        "--mix light --rate 5 --client curl",
    ],
)
def test_arguments_without_meaning_are_refused(arguments: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        parse_options(arguments.split())
    assert caught.value.code == 2
    assert capsys.readouterr().err.splitlines()[1] == "gangway perf --help lists all arguments"


def test_the_command_line_knows_it():
    command = [sys.executable, "-m", "gangway.server.cli", "perf", "--mix", "ligth", "--rate", "5"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "unknown mix 'ligth'" in done.stderr) == (2, True)


def test_levels_are_sets_of_targets_and_the_first_one_sets_weights():
    workload = resolve(TWO, parse_levels("3x,5x"), {}, {"a": 1000, "b": 3000}, {})
    assert workload.targets_us == {"3x": (3000, 9000), "5x": (5000, 15000)}
    assert workload.mix.shares == pytest.approx((0.75, 0.25))


def test_targets_come_from_the_mix_then_from_the_server():
    mix = Mix("two", (MixModel("a", 1, Qos(milliseconds=7)), MixModel("b", 1)))
    configured: dict[str, Any] = {"a": Qos(milliseconds=1), "b": Qos(multiple=2)}
    assert resolve(mix, (), configured, {"a": 1000, "b": 3000}, {}).targets_us == {"qos": (7000, 6000)}
    assert resolve(mix, (), {"a": None, "b": None}, {}, {}).targets_us == {"qos": (7000, None)}
    floored = resolve(TWO, parse_levels("3x,5ms"), {}, {"a": 1000, "b": 3000}, {"a": 3400.0, "b": 3400.0})
    assert floored.targets_us == {"3x": (3400, 9000), "5ms": (5000, 5000)}, "what the server calls 3x"


def test_isolated_latencies_are_given_or_taken_from_a_result(tmp_path: Path):
    assert parse_isolated("a=1.5,b=3", ("b", "a")) == {"b": 3000, "a": 1500}
    earlier = tmp_path / "earlier.json"
    earlier.write_text('{"models": [{"name": "a", "isolated_us": 7}]}')
    assert parse_isolated(str(earlier), ("a",)) == {"a": 7}
    for wrong in ("a", "a=x", "a=0", "b=1"):
        with pytest.raises(WorkloadError, match="--isolated"):
            parse_isolated(wrong, ("a",))
    earlier.write_text("[]")
    with pytest.raises(WorkloadError, match="is no result of gangway perf"):
        parse_isolated(str(earlier), ("a",))


def test_samples_stand_for_models_by_shares():
    samples = samples_of((0.7, 0.2999, 0.0001), 1000)
    assert len(samples) == 1000
    assert samples == sorted(samples)
    assert [samples.count(model) for model in range(3)] == [699, 300, 1]
