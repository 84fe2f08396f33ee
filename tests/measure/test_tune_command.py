"""`gangway tune` and `gangway report` of a small model of open height: killed, resumed, used, damaged, drawn."""

import json
import logging
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import psutil
import pytest

from gangway.artifact.cache import Cache
from gangway.artifact.format import Manifest
from gangway.artifact.tuning import Tuning, find_tuning
from gangway.compiler.arguments import CompileOptions
from gangway.compiler.key import model_key
from gangway.compiler.pipeline import compile_model
from gangway.compiler.target import detect
from gangway.executor.launch import available_cores
from gangway.measure import plan_command, profile_command, report_command, tune_command
from gangway.measure.model_runner import ModelRunner
from testing.waiting import until
from tests.helpers import onnx_text
from tests.helpers.small_cache import small_cache

pytestmark = pytest.mark.long

TRIALS = 6  # two artifacts of samples
SIZES = {"H": 20}  # of the model's height, which is open
DIMENSION = "--dimension=H=20"
needs_two_cores = pytest.mark.skipif(len(available_cores()) < 2, reason="nothing is disturbed on one core")


@dataclass(frozen=True)
class Tuned:
    """A small model that has been tuned, and what a first tuning, killed, had left."""

    path: Path
    cache_dir: Path
    tuning: Tuning
    left: dict[str, object]

    def compile(self) -> Manifest:
        """What serving gets."""
        options = CompileOptions(SIZES)
        return compile_model(self.path, "small", Cache(self.cache_dir), detect(), lambda *_: None, options).manifest


def write_model(path: Path) -> Path:
    graph = """(float[N, 16, H, 20] x) => (float[N, 48, H, 20] y) {
        a = Conv<pads=[1, 1, 1, 1]>(x, w0)
        b = Relu(a)
        y = Conv(b, w1)
    }"""
    shapes = {"w0": (32, 16, 3, 3), "w1": (48, 32, 1, 1)}
    return onnx_text.write(path, graph, **onnx_text.weights_of(3, shapes, 1 / 8))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    folder = tmp_path_factory.mktemp("tune")
    path, cache_dir = write_model(folder / "small.onnx"), folder / "cache"
    arguments = [str(path), f"--cache-dir={cache_dir}", f"--trials={TRIALS}", "--seconds=0.3", "--versions=3"]
    arguments += [DIMENSION, "--least-loss=0"]  # none is dropped
    process = subprocess.Popen([sys.executable, "-m", "gangway.server.cli", "tune", *arguments])
    children: set[psutil.Process] = set()

    def is_kept() -> bool:
        children.update(psutil.Process(process.pid).children(recursive=True))
        return process.poll() is not None or bool(list((cache_dir / "tunings").glob("*.samples")))

    until(is_kept)
    kept = list((cache_dir / "tunings").glob("*.samples"))
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it had not come to its end"
    left = json.loads(kept[0].read_text())
    _, alive = psutil.wait_procs(list(children), timeout=20)
    assert not alive
    with small_cache():
        assert tune_command.main([*arguments, f"--json={folder / 'tuning.json'}"]) == 0
    tuning = find_tuning(cache_dir, model_key(path, detect(), SIZES), detect().name)
    assert tuning is not None
    return Tuned(path, cache_dir, tuning, left)


def test_what_a_killed_tuning_had_measured_is_kept(tuned: Tuned) -> None:
    measured = [{sample.candidate.knobs: sample.latency_us for sample in k.samples} for k in tuned.tuning.kernels]
    before = tuned.left["latency_us"]
    assert isinstance(before, list)
    assert max(map(len, before)) >= 5
    assert all(measured[number].items() >= known.items() for number, known in enumerate(before))
    assert max(map(len, measured)) == TRIALS


def test_nothing_is_left_behind(tuned: Tuned) -> None:
    assert {path.name for path in tuned.cache_dir.iterdir() if path.name.startswith(".")} == set()
    assert [path.suffix for path in (tuned.cache_dir / "tunings").iterdir()] == [".json"]


def test_all_versions_give_the_numbers_of_onnxruntime(tuned: Tuned) -> None:
    manifest = tuned.compile()
    assert manifest.key == tuned.tuning.tuned_key != tuned.tuning.key
    assert max(len(layer.versions) for layer in manifest.layers) == 3
    session = onnxruntime.InferenceSession(str(tuned.path))
    with ModelRunner(tuned.cache_dir, manifest, available_cores()[:2], 1) as runner:
        (source,), (target,) = runner._places(0)
        x = np.frombuffer(runner.io.view, np.float32, 16 * 20 * 20, source).reshape(1, 16, 20, 20).copy()
        (expected,) = session.run(None, {"x": x})
        for version in range(3):
            runner.io.view[target : target + expected.nbytes] = bytes(expected.nbytes)
            runner.run(1, len(runner.workers), version)
            y = np.frombuffer(runner.io.view, np.float32, expected.size, target).reshape(expected.shape).copy()
            np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


def test_the_first_version_was_the_fastest_alone(tuned: Tuned) -> None:
    for kernel in tuned.tuning.kernels:
        times_us = {kernel.samples[one.sample].candidate.knobs: one.latency_us for one in kernel.finalists}
        assert times_us[kernel.versions[0].knobs] <= times_us[kernel.samples[0].candidate.knobs]
        assert [one.blocking_bytes for one in kernel.versions[1:]] == sorted(
            (one.blocking_bytes for one in kernel.versions[1:]), reverse=True
        )


def test_a_lost_artifact_is_made_again_from_the_tuning(tuned: Tuned) -> None:
    found = tuned.compile()
    for path in (tuned.cache_dir / found.key).iterdir():
        path.unlink()  # weights.bin is that of the static choices, too, by a link
    made = tuned.compile()
    assert made.key == found.key
    assert [[v.description for v in layer.versions] for layer in made.layers] == [
        [v.description for v in layer.versions] for layer in found.layers
    ]


@needs_two_cores
def test_report_wants_a_profile_then_draws(tuned: Tuned, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(tuned.path), f"--cache-dir={tuned.cache_dir}", DIMENSION]
    assert report_command.main([*arguments, "-o", str(tmp_path / "report")]) == 1
    assert f"`gangway profile {tuned.path} --dimension H=20`" in capsys.readouterr().err
    assert plan_command.main(arguments) == 1
    assert f"`gangway profile {tuned.path} --dimension H=20`" in capsys.readouterr().err
    with small_cache():
        assert profile_command.main([*arguments, "--seconds=0.3"]) == 0
    assert plan_command.main(arguments) == 0
    page = tmp_path / "page.html"
    assert report_command.main([*arguments, "-o", str(tmp_path / "report"), "--html", str(page)]) == 0
    assert page.read_text().count("data:image/png;base64,") == len(list((tmp_path / "report").glob("*.png")))
    names = ("speed_up", "interference", "loss_by_count", "pareto", "version_counts")
    assert {path.name for path in (tmp_path / "report").iterdir()} == {
        f"{n}.{kind}" for n in names for kind in ("csv", "png")
    }
    for name in names:
        assert (tmp_path / "report" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert len((tmp_path / "report" / f"{name}.csv").read_text().splitlines()) > 1


def test_a_damaged_tuning_is_ignored(
    tuned: Tuned, tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = (tuned.cache_dir / "tunings").iterdir()
    content = path.read_bytes()
    try:
        path.write_bytes(content.replace(b'"knobs": "', b'"knobs": "of another template '))
        assert tuned.compile().key == tuned.tuning.key
        path.write_bytes(content[: len(content) // 2])
        with caplog.at_level(logging.WARNING):
            assert tuned.compile().key == tuned.tuning.key
            assert "damaged tuning ignored" in caplog.text
            assert (
                report_command.main(
                    [str(tuned.path), f"--cache-dir={tuned.cache_dir}", DIMENSION, f"-o={tmp_path / 'no'}"]
                )
                == 1
            )
        assert "gangway tune" in capsys.readouterr().err
    finally:
        path.write_bytes(content)
    assert not (tmp_path / "no").exists()


def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    assert tune_command.main([str(tmp_path / "broken.onnx"), f"--cache-dir={tmp_path / 'cache'}"]) == 1
    assert "gangway tune: " in capsys.readouterr().err
    for wrong in (["absent.onnx"], [".", "--versions=6"], [".", "--trials=0"], [".", "--least-loss=101"]):
        with pytest.raises(SystemExit) as stopped:
            tune_command.main(wrong)
        assert stopped.value.code == 2
