"""`gangway plan`, as a user starts it or in this process."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gangway.artifact.profile import LayerProfile, Profile, ProfiledMachine, machine_id, write_profile
from gangway.artifact.reader import read_manifest
from gangway.base.host_limits import cpu_name
from gangway.executor.launch import available_cores
from tests.helpers.started_command import status_of


def gangway_plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gangway.server.cli", "plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def cache_dir(compiled_zoo, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that has the mlp and no profile."""
    cache_dir: Path = tmp_path_factory.mktemp("plan") / "cache"
    artifact = compiled_zoo.artifact("mlp")
    shutil.copytree(artifact, cache_dir / artifact.name)
    return cache_dir


def write_measured(cache_dir: Path, artifact: Path, eight: float = 8) -> None:
    """A profile of four cores: a row takes 4 ms on one, 2 on two and on four; gangs do not disturb each other.

    `eight` rows: so many times as long.
    """
    manifest = read_manifest(artifact)
    batches = (1, 2, 4, 8)
    times = tuple(tuple(us * factor for factor in (1, 2, 4, eight)) for us in (4000.0, 2000.0, 2000.0))
    machine_name = machine_id(cpu_name(), len(available_cores("all")), manifest.target.name)
    machine = ProfiledMachine(machine_name, "a CPU", 4, manifest.target.name, 1.0, 1.0)
    layer = LayerProfile("all", (times,), 0.0, 0.0, (), ())
    profile = Profile(
        manifest.key, "mlp", machine, (1, 2, 4), batches, (layer,), times, times, (), 0, (9,) * len(batches), 0.01, 1.0
    )
    write_profile(cache_dir, profile)


def test_a_plan_says_gangs_and_times(
    compiled_zoo, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_measured(cache_dir, compiled_zoo.artifact("mlp"))
    model, options = str(compiled_zoo.repository / "mlp"), [f"--cache-dir={cache_dir}"]
    result = gangway_plan(model, *options, "--batch=1,8,16", f"--json={tmp_path / 'plan.json'}")
    assert result.returncode == 0, result.stderr
    assert "mlp on 4 cores" in result.stdout
    assert "<2, 2, 4>" in result.stdout and "the last slope goes on" in result.stdout
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert (plan["model"], plan["cores"]) == ("mlp", 4)
    one, eight, sixteen = plan["batches"]
    alone = {"instances": [{"count": 1, "cores": 2, "rows": 1}], "latency_us": 2000.0}
    assert one == {"rows": 1, "rounds": [alone], "latency_us": 2000.0, "one_gang_us": 2000.0}
    beside = {"instances": [{"count": 2, "cores": 2, "rows": 4}], "latency_us": 8000.0}
    assert eight == {"rows": 8, "rounds": [beside], "latency_us": 8000.0, "one_gang_us": 16000.0}
    assert sixteen["latency_us"] == pytest.approx(16000.0)
    assert status_of("plan", model, *options, "--cores=2") == 0
    fewer = capsys.readouterr().out
    assert "mlp on 2 cores" in fewer and "<1, 2, 8>" in fewer
    assert status_of("plan", model, *options, "--cores=5") == 2
    assert "measured on up to 4" in capsys.readouterr().err


def test_rounds_are_counted(compiled_zoo, cache_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_measured(cache_dir, compiled_zoo.artifact("mlp"), eight=10)
    model, options = str(compiled_zoo.repository / "mlp"), [f"--cache-dir={cache_dir}", "--cores=2"]
    assert status_of("plan", model, *options, "--batch=32", f"--json={tmp_path / 'plan.json'}") == 0
    assert "4 times <2, 1, 4>" in capsys.readouterr().out
    (batch,) = json.loads((tmp_path / "plan.json").read_text())["batches"]
    assert len(batch["rounds"]) == 4


def test_without_a_profile_it_says_how_to_make_one(
    compiled_zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = compiled_zoo.artifact("mlp")
    shutil.copytree(artifact, tmp_path / artifact.name)
    model = str(compiled_zoo.repository / "mlp")
    assert status_of("plan", model, f"--cache-dir={tmp_path}") == 1
    assert f"`gangway profile {model}`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent.onnx"], "absent.onnx does not exist"),
        ([".", "--cores=0"], "--cores"),
        ([".", "--batch=4,none"], "--batch"),
        ([".", "--batch=0"], "--batch"),
    ],
)
def test_mistakes(tmp_path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    path, *options = arguments
    assert status_of("plan", str(tmp_path / path), *options) == 2
    assert said in capsys.readouterr().err
