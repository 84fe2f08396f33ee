"""`gangway profile`, as a user starts it or in this process."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gangway.artifact.precision import BF16
from gangway.artifact.profile import profile_path, read_profile, write_profile
from gangway.artifact.reader import read_manifest
from gangway.compiler.target import detect, for_precision
from gangway.measure import plan_command, profile_command
from gangway.measure.profile_command import summary, wholeness
from tests.helpers.profiles import PROFILE
from tests.helpers.small_cache import small_cache
from tests.helpers.started_command import status_of


def gangway_profile(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gangway.server.cli", "profile", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_mlp_end_to_end(compiled_zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache_dir = compiled_zoo.linked_cache(tmp_path)
    options = [f"--cache-dir={cache_dir}", "--seconds=0.3", f"--json={tmp_path / 'mlp.json'}"]
    with small_cache():
        assert profile_command.main([str(compiled_zoo.repository / "mlp"), *options]) == 0
    shown = capsys.readouterr().out
    profile = read_profile(tmp_path / "mlp.json")
    manifest = read_manifest(compiled_zoo.artifact("mlp"))
    assert (profile.key, profile.model_name) == (manifest.key, "mlp")
    assert [layer.name for layer in profile.layers] == [layer.name for layer in manifest.layers]
    kept = profile_path(cache_dir, profile.key, profile.machine.machine_id)
    assert read_profile(kept) == profile
    assert all(layer.name in shown for layer in manifest.layers)
    assert all(word in shown for word in ("us on 1", "of peak", "GFLOP/s", "whole model on 1 core", str(kept)))
    if len(profile.cores) > 1:
        assert f"{profile.cores[-1]} gangs of 1 core at once" in shown
        assert "all cores at once: the slowest did" in shown


@pytest.mark.long
def test_both_precisions(compiled_zoo, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`deadline` is fp32 and bf16 for all commands that look at a model; `gangway plan` finds what was measured."""
    cache = compiled_zoo.linked_cache(tmp_path)
    options = [str(compiled_zoo.repository / "mobilenetv2"), f"--cache-dir={cache}", "--precision=deadline"]
    options += ["--min-cosine=0.9"]
    with small_cache():
        file = tmp_path / "both.json"
        assert profile_command.main([*options, "--seconds=0.3", f"--json={file}"]) == 0
    keys = [read_profile(path).key for path in (file, tmp_path / "both-bf16.json")]
    manifests = [read_manifest(cache / key) for key in keys]
    has_bf16 = bool(for_precision(detect(), BF16).extensions)
    assert [manifest.precision for manifest in manifests] == ["fp32", "bf16" if has_bf16 else "fp32"]
    capsys.readouterr()
    plan = tmp_path / "plan.json"
    assert plan_command.main([*options, f"--json={plan}"]) == 0
    assert capsys.readouterr().out.count("mobilenetv2") >= 2
    assert plan.exists() and plan.with_name("plan-bf16.json").exists()
    assert status_of("compile", *options) == 0
    shown = capsys.readouterr().out
    assert " fp32 kernels for " in shown and (not has_bf16 or " bf16 kernels for " in shown)
    assert status_of("report", *options, f"--output={tmp_path / 'report'}") == 1
    assert "mobilenetv2 has not been tuned on this machine" in capsys.readouterr().err


def test_one_core_says_that_it_has_no_slopes(compiled_zoo) -> None:
    path = compiled_zoo.onnx_file("mlp")
    result = gangway_profile(str(path), f"--cache-dir={compiled_zoo.cache_dir}", "--seconds=0.5", "--cores=0")
    assert result.returncode == 0, result.stderr
    assert "no slopes: on one core" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["absent.onnx"], 2, "absent.onnx does not exist"),
        ([".", "--cores=4095"], 2, "not available to this process"),
        ([".", "--seconds=0"], 2, "--seconds"),
        (["broken.onnx"], 1, "gangway profile: "),
        (["empty"], 2, "no version folder"),
    ],
)
def test_mistakes(
    tmp_path: Path, arguments: list[str], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    (tmp_path / "empty").mkdir()
    path, *options = arguments
    assert status_of("profile", str(tmp_path / path), f"--cache-dir={tmp_path / 'cache'}", *options) == status
    assert said in capsys.readouterr().err


def test_cores_that_were_not_whole_are_warned_of() -> None:
    assert not any("WARNING" in line for line in summary(PROFILE))
    (warning,) = wholeness(replace(PROFILE, cores_whole=0.52))
    assert warning in summary(replace(PROFILE, cores_whole=0.52))
    assert warning.startswith("WARNING: all cores at once: the slowest did 52% of what one does alone. ")
    assert wholeness(replace(PROFILE, cores=(1,))) == []
    assert wholeness(replace(PROFILE, cores=(1,), cores_whole=0.52)) == [warning]
    (line,) = wholeness(replace(PROFILE, cores_whole=0.52, agreeing=3))
    assert line == "all cores at once: the slowest did 52% of what one does alone, on which 3 measurements agree"


def test_a_better_profile_from_before_is_kept_and_shown(
    compiled_zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    former = replace(PROFILE, key=read_manifest(compiled_zoo.artifact("mlp")).key, cores_whole=0.9)
    former = replace(former, layers=former.layers * len(read_manifest(compiled_zoo.artifact("mlp")).layers))
    cache_dir = compiled_zoo.linked_cache(tmp_path)
    path = write_profile(cache_dir, former)
    monkeypatch.setattr(profile_command, "profile_model", lambda *_: replace(former, cores_whole=0.13, seconds=2.0))
    arguments = [str(compiled_zoo.repository / "mlp"), f"--cache-dir={cache_dir}"]
    assert profile_command.main([*arguments, f"--json={tmp_path / 'kept.json'}"]) == 0
    assert read_profile(path) == read_profile(tmp_path / "kept.json") == former
    shown = capsys.readouterr().out
    assert "the slowest did 90% of what one does alone" in shown
    assert "All this is from before: in the new measurement cores were only 13% there" in shown
