"""A server that measures its models when it has nothing to do, and lets go when it has.

It has one core: on several ones a measurement reads much memory, beside generators of interference.
"""

import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from gangway.artifact.format import Manifest
from gangway.artifact.profile import machine_id, profile_path, read_profile, write_profile
from gangway.artifact.reader import read_manifest
from gangway.base.host_limits import cpu_name
from gangway.executor.launch import available_cores
from gangway.measure.profiler import profile_model
from testing.live_server import live_server
from testing.load import raw_channel, raw_infer
from testing.processes import command_of, running_below
from testing.reference import example_of
from testing.waiting import until

pytestmark = pytest.mark.long

TIMEOUT_S = 90
CORE = available_cores()[0]
FLAGS = (f"--cores={CORE}", "--profile-seconds=0.5")


def test_a_missing_profile_is_made_when_there_are_no_requests(compiled_zoo, tmp_path: Path) -> None:
    shutil.copytree(compiled_zoo.repository / "mlp", tmp_path / "models" / "mlp")
    cache_dir, artifact = tmp_path / "cache", compiled_zoo.artifact("mlp")
    shutil.copytree(artifact, cache_dir / artifact.name)
    path = profile_of(read_manifest(cache_dir / artifact.name), cache_dir)
    path.parent.mkdir()
    path.write_text('{"format_version": 1}')  # left by an older release
    example = example_of("mlp", compiled_zoo.onnx_file("mlp"))
    with live_server(tmp_path / "models", [f"--cache-dir={cache_dir}", *FLAGS]) as server:
        (job,) = await_jobs(server.process.pid, 1)
        os.kill(job, signal.SIGSTOP)  # so that it cannot be done before the request comes
        with raw_channel(server.url) as channel:
            raw_infer(channel)(example.request, timeout=TIMEOUT_S)
        until(lambda: not command_of(job), lambda: "a request ends the measurement")
        text = await_log(server.log, "mlp: its layers have been measured")
    assert "its profile cannot be used, so its layers are measured again" in text
    assert list(path.parent.iterdir()) == [path]
    made = read_profile(path)
    assert made.key == artifact.name
    assert server.process.returncode == 0
    write_profile(cache_dir, replace(made, cores_whole=1.0))  # however whole the host gave them
    with live_server(tmp_path / "models", [f"--cache-dir={cache_dir}", *FLAGS]) as server:
        assert "its profile cannot be used" not in server.log.read_text()
        assert not await_jobs(server.process.pid, 0)


def test_a_profile_in_doubt_is_used_and_made_again(compiled_zoo, tmp_path: Path) -> None:
    shutil.copytree(compiled_zoo.repository / "mlp", tmp_path / "models" / "mlp")
    cache_dir, artifact = tmp_path / "cache", compiled_zoo.artifact("mlp")
    shutil.copytree(artifact, cache_dir / artifact.name)
    manifest = read_manifest(cache_dir / artifact.name)
    measured = profile_model(cache_dir, manifest, [CORE], seconds=0.2)
    in_doubt = replace(measured, cores_whole=0.01)
    path = write_profile(cache_dir, in_doubt)
    with live_server(tmp_path / "models", [f"--cache-dir={cache_dir}", *FLAGS]) as server:
        await_log(server.log, "mlp: its layers have been measured")
        assert "mlp: cores slowed each other down while it was measured (1 % of" in server.log.read_text()
    assert read_profile(path).seconds != in_doubt.seconds, "it is another measurement"


def profile_of(manifest: Manifest, cache_dir: Path) -> Path:
    """Where a server on one core keeps a model's profile."""
    machine = machine_id(cpu_name(), 1, manifest.target.name)
    return profile_path(cache_dir, manifest.key, machine)


def await_log(log: Path, words: str) -> str:
    """What a server has logged, once these words are in it."""
    until(lambda: words in log.read_text(), log.read_text)
    return log.read_text()


def await_jobs(pid: int, count: int) -> list[int]:
    """The measurements under a server, once there are so many."""
    until(lambda: len(running_below(pid, "gangway.measure.profiler")) >= count)
    return running_below(pid, "gangway.measure.profiler")
