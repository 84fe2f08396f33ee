"""`gangway perf` that Ctrl-C or the server's end cuts short: what was measured is shown; and the line of a terminal."""

import json
import os
import pty
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from testing.live_server import LiveServer, live_server, stop
from testing.repository import GANGWAY
from testing.waiting import until
from tests.conftest import CompiledZoo

PERF = ("perf", "--mix=mlp=1", "--isolated=mlp=1", "--qos=3x", "--warmup=0.2")


@contextmanager
def running(server: LiveServer, *flags: str, stderr: int = subprocess.PIPE) -> Iterator["subprocess.Popen[str]"]:
    command = [*GANGWAY, *PERF, "--url", server.url, *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, bufsize=1) as process:
        try:
            yield process
        finally:
            process.kill()


def shown_until(process: "subprocess.Popen[str]", text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if text in line:
            return
    raise AssertionError(f"{text!r} is not shown")


def answered(server: LiveServer, process: "subprocess.Popen[str]", count: int) -> None:
    """Return when the server has answered so many requests more."""
    import tritonclient.grpc as triton

    with triton.InferenceServerClient(server.url) as client:

        def served() -> int:
            statistics = client.get_inference_statistics("mlp").model_stats[0]
            return int(statistics.inference_stats.success.count)

        begin = served()
        until(lambda: process.poll() is not None or served() >= begin + count)
        assert process.poll() is None


def test_a_run_that_is_interrupted_shows_what_it_has(gangway_server: LiveServer, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    with running(gangway_server, "--rate=50", "--seconds=1000", f"--json={file}") as process:
        shown_until(process, "sequential rate")
        answered(gangway_server, process, 60)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "")
    assert "interrupted after" in out and "queries had ended" in out
    (total,) = (line.split() for line in out.splitlines() if "total" in line)
    result = json.loads(file.read_text())
    assert result["scenario"] == {"name": "poisson", "interrupted": True}
    (run,) = result["runs"]
    assert run["total"]["queries"] >= 40 and str(run["total"]["queries"]) in total
    assert not run["total"]["errors"]
    (shown_s,) = re.findall(r"interrupted after (\S+) s", out)
    assert run["seconds"] == pytest.approx(float(shown_s), abs=0.06)
    assert run["total"]["qps"] >= run["total"]["queries"] / run["seconds"], "of the time that it lasted"


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("--scenario=mlperf-server",), ("--search",)])
def test_a_server_that_ends_leaves_what_was_measured(
    compiled_zoo: CompiledZoo, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    file = tmp_path / "result.json"
    alone = (f"--cache-dir={compiled_zoo.cache_dir}", "--model-control-mode=explicit", "--load-model=mlp")
    with (
        live_server(compiled_zoo.repository, alone) as server,
        running(server, "--rate=50", "--seconds=2", f"--json={file}", *flags) as process,
    ):
        shown_until(process, "sequential rate")
        answered(server, process, 40)
        stop(server.process)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 3, out
    assert len(err.splitlines()) == 1 and err.startswith("gangway perf: "), err
    result = json.loads(file.read_text())
    assert result["scenario"]["interrupted"]
    total = result["runs"][-1]["total"]
    assert 20 <= total["queries"] - total["errors"]["UNAVAILABLE"] < total["queries"]
    assert "UNAVAILABLE" in out or "so far" in out


@pytest.mark.long
def test_a_search_that_is_interrupted_shows_its_rates(gangway_server: LiveServer) -> None:
    flags = ("--search", "--rate=30", "--seconds=1", "--qos=1000x")
    with running(gangway_server, *flags) as process:
        shown_until(process, "queries;")  # the first rate
        answered(gangway_server, process, 20)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "of all queries within 1000x: " in out and "so far" in out


def test_nothing_is_shown_of_nothing(gangway_server: LiveServer) -> None:
    with running(gangway_server, "--rate=50", "--seconds=1000", "--warmup=900") as process:
        shown_until(process, "sequential rate")
        answered(gangway_server, process, 20)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "gangway perf: interrupted before anything was measured\n")
    assert "total" not in out


@pytest.mark.long
def test_a_terminal_shows_how_far_a_run_is_and_a_pipe_does_not(gangway_server: LiveServer) -> None:
    flags = ("--rate=50", "--seconds=2")
    leader, follower = pty.openpty()
    with running(gangway_server, *flags, stderr=follower) as process:
        out, _ = process.communicate(timeout=60)
    os.close(follower)
    shown = os.read(leader, 1 << 16).decode()
    os.close(leader)
    assert process.returncode == 0 and "total" in out
    assert " of 2 s: " in shown and " answered, " in shown
    assert shown.endswith("\r\x1b[K")  # nothing of it stays
    with running(gangway_server, *flags) as process:
        _, err = process.communicate(timeout=60)
    assert err == ""
