"""A worker process: its size, its manners, loading."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gangway.base.process import WORKER_NICE
from gangway.executor.launch import available_cores
from gangway.executor.messages import Exit, RunLease, WorkerReady
from gangway.measure.model_runner import LocalExecutor
from testing.processes import command_of
from testing.waiting import until
from tests.executor.conftest import two_workers

WAIT_US = 10_000_000
PRIVATE_KB_AT_MOST = 40 * 1024
STARTS = 8


@pytest.fixture
def cache_dir(tmp_path):
    return tmp_path


@pytest.fixture
def executor(cache_dir):
    """Workers of a test's own: here it is they who are looked at."""
    with two_workers(cache_dir) as executor:
        yield executor


def private_kb(pid):
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


def cpu_s(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_worker_is_small_and_stays_so(harness):
    pid = harness.executor.workers[0].pid

    def query():
        slot, _ = harness.start([0])
        assert harness.executor.slots.wait(slot, WAIT_US)
        harness.executor.left([0])
        harness.executor.slots.release(slot)

    for model_id in range(2, 12):
        harness.executor.load(model_id, harness.model.key, in_the_background=True)
        harness.executor.unload(model_id)
    query()
    before = private_kb(pid)
    for model_id in range(2, 42):
        harness.executor.load(model_id, harness.model.key, in_the_background=True)
        harness.executor.unload(model_id)
        query()
    assert private_kb(pid) < PRIVATE_KB_AT_MOST
    assert private_kb(pid) - before < 1024


def test_worker_imports_nothing_large():
    program = "import sys, gangway.executor.worker; print([m for m in sys.argv[1:] if m in sys.modules])"
    large = ["numpy", "grpc", "onnx", "onnxruntime", "google.protobuf", "tvm", "asyncio", "multiprocessing"]
    done = subprocess.run(
        [sys.executable, "-c", program, *large], capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stdout.strip() == "[]"


def test_idle_worker_sleeps(harness):
    pid = harness.executor.workers[0].pid
    before = cpu_s(pid)
    time.sleep(0.5)
    assert cpu_s(pid) - before <= 0.02  # two ticks of the clock that counts it


def test_worker_is_pinned_and_says_who_it_is(harness):
    status = harness.executor.control.status(1)
    assert status.pid == harness.executor.workers[1].pid
    assert status.lease is None
    assert os.sched_getaffinity(status.pid) == {available_cores()[-1]}
    assert os.getpriority(os.PRIO_PROCESS, status.pid) >= WORKER_NICE  # so that clients on the machine find a core
    slot, _ = harness.start([1])
    assert harness.executor.slots.wait(slot, WAIT_US)
    harness.executor.left([1])
    assert harness.executor.control.status(1).runs == 1
    until(lambda: harness.executor.control.quiet(1))


def test_terminal_signals_are_the_parents_business(harness):
    for process in harness.executor.workers:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
    slot, _ = harness.start([0, 1])
    assert harness.executor.slots.wait(slot, WAIT_US)
    harness.executor.left([0, 1])
    assert harness.executor.stop() == [0, 0]


def test_no_thread_gives_way_once_a_model_is_loaded(harness):
    """A killed process has not died before each of its threads had a turn: on a busy core that took 20 s."""

    def manners(thread):
        policy = os.sched_getscheduler(thread) & ~os.SCHED_RESET_ON_FORK
        return policy, os.getpriority(os.PRIO_PROCESS, thread)

    def are_equal():
        with contextlib.suppress(ProcessLookupError):  # the thread that loaded has just ended
            return {manners(int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()} == {manners(pid)}
        return False

    pid = harness.executor.workers[0].pid
    harness.executor.load(2, harness.model.key, in_the_background=True)
    until(are_equal)


def test_loading_what_is_not_there(harness):
    with pytest.raises(RuntimeError, match=r"worker 0: manifest\.json: "):
        harness.executor.load(5, "0" * 64, [0])


def test_kernels_without_the_symbol(make_harness, artifact_maker, tmp_path):
    harness = make_harness()
    model = artifact_maker(tmp_path, layers=2)
    source = tmp_path / "empty.c"
    source.write_text("int nothing;")
    kernels = tmp_path / model.key / "kernels.so"
    subprocess.run(["gcc", "-shared", "-fPIC", str(source), "-o", str(kernels)], check=True)
    with pytest.raises(RuntimeError, match="kernel count is not in the library"):
        harness.executor.load(5, model.key, [0])
    slot, _ = harness.start([0])  # the worker lives on
    assert harness.executor.slots.wait(slot, WAIT_US)


def test_successor_drops_the_commands_of_its_predecessor(harness):
    harness.executor.workers[0].kill()
    harness.executor.workers[0].wait(10)
    for _ in range(3):
        harness.executor.control.command(0, RunLease(0, 0, 1).pack())
    harness.executor.control.command(0, Exit().pack())
    harness.executor.restart(0)  # expects Ready as the first message
    harness.executor.load(1, harness.model.key, [0])
    slot, _ = harness.start([0])
    assert harness.executor.slots.wait(slot, WAIT_US)
    harness.executor.left([0])
    assert harness.counters() == {1}


def test_workers_die_with_their_parent(tiny_model):
    program = (
        "import os, signal, sys; from pathlib import Path; from gangway.measure.model_runner import LocalExecutor\n"
        "executor = LocalExecutor(Path(sys.argv[1]), [int(sys.argv[2])]).__enter__()\n"
        "print(executor.workers[0].pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    command = [sys.executable, "-c", program, str(tiny_model.cache_dir), str(available_cores()[0])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == -signal.SIGKILL
    until(lambda: not command_of(int(done.stdout)))


def test_start_is_fast(tiny_model):
    """In starts of Python itself: how fast these are is the business of the machine."""
    bare, times = [], []
    for _ in range(5):
        begin = time.monotonic()
        subprocess.run([sys.executable, "-c", ""], check=True, timeout=30)
        bare.append(time.monotonic() - begin)
        begin = time.monotonic()
        with LocalExecutor(tiny_model.cache_dir, [available_cores()[0]], io_bytes=1 << 20) as executor:
            times.append(time.monotonic() - begin)
            assert executor.control.status(0).pid == executor.workers[0].pid
    assert min(times) < STARTS * min(bare)


def test_ready_says_the_pid(tiny_model):
    executor = LocalExecutor(tiny_model.cache_dir, [available_cores()[0]])
    try:
        assert executor.expect(0, WorkerReady).pid == executor.workers[0].pid
    finally:
        executor.__exit__(None, None, None)
