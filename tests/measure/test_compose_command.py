"""`gangway compose` of small models: found, killed, resumed, damaged, drawn, and what is no compound task."""

import json
import logging
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gangway.base.json_codec import decode, encode
from gangway.measure import compose_command
from gangway.measure.compound_runner import CompoundTimes, SegmentRun
from gangway.scheduler.stages.ir import StreamSegment
from gangway.scheduler.stages.schedule_file import (
    ScheduleFileError,
    StoredSchedule,
    find_schedule,
    read_schedule,
    read_state,
)
from testing.waiting import until
from tests.conftest import CompileKept
from tests.helpers import onnx_text

TENSORS = 'input [ { name: "x" data_type: TYPE_FP32 dims: [ 16, 12, 12 ] } ]'


def write_model(repository: Path, name: str, channels: int) -> None:
    graph = f"""(float[N, 16, 12, 12] x) => (float[N, {channels}, 6, 6] y) {{
        a = Conv<pads=[1, 1, 1, 1]>(x, w)
        b = MaxPool<kernel_shape=[2, 2], strides=[2, 2]>(a)
        y = Softmax<axis=1>(b)
    }}"""
    onnx_text.save(repository, name, graph, **onnx_text.weights_of(channels, {"w": (channels, 16, 3, 3)}, 1 / 8))


def write_ensemble(repository: Path, name: str, *steps: tuple[str, str, str]) -> Path:
    (repository / name / "1").mkdir(parents=True)
    texts = [
        f'{{ model_name: "{model}" model_version: -1 input_map {{ key: "x" value: "{source}" }}'
        f' output_map {{ key: "y" value: "{target}" }} }}'
        for model, source, target in steps
    ]
    outputs = [f'{{ name: "{target}" data_type: TYPE_FP32 dims: [ -1, 6, 6 ] }}' for _, _, target in steps]
    (repository / name / "config.pbtxt").write_text(
        f'platform: "ensemble" max_batch_size: 8 {TENSORS} output [ {", ".join(outputs)} ]'
        f" ensemble_scheduling {{ step [ {', '.join(texts)} ] }}"
    )
    return repository / name


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compose") / "models"
    for name, channels in (("first", 24), ("second", 40)):
        write_model(folder, name, channels)
    write_ensemble(folder, "both", ("first", "x", "one"), ("second", "x", "two"))
    write_ensemble(folder, "chain", ("first", "x", "one"), ("second", "one", "two"))
    return folder


@pytest.fixture(scope="module")
def cache_dir(repository: Path, compile_kept: CompileKept) -> Path:
    cache = repository.parent / "cache"
    cache.mkdir(mode=0o755)
    for name in ("first", "second"):
        compile_kept(repository / name / "1" / "model.onnx", name, cache)
    return cache


def found_in(cache_dir: Path) -> tuple[Path, StoredSchedule]:
    (path,) = (cache_dir / "schedules").glob("*.json")
    return path, read_schedule(path)


def test_a_killed_search_goes_on(repository: Path, cache_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(repository / "both"), f"--cache-dir={cache_dir}", "--search=random", "--pointers=8"]
    long = ["--rounds=10", "--candidates=40", "--seconds=600"]
    process = subprocess.Popen(
        [sys.executable, "-m", "gangway.server.cli", "compose", *arguments, *long], stderr=subprocess.DEVNULL
    )
    until(lambda: process.poll() is not None or list((cache_dir / "schedules").glob("*.samples")))
    kept = list((cache_dir / "schedules").glob("*.samples"))
    assert process.poll() is None and kept, "no sample has been kept"
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    before = len(json.loads(kept[0].read_text())["samples"])
    assert before > 2
    assert compose_command.main([*arguments, *long[:2], "--seconds=0.01"]) == 0  # they are more than the time allows
    path, found = found_in(cache_dir)
    assert not kept[0].exists()
    assert found.names == ("first", "second") and found.seconds > 0.3, "earlier seconds count"
    text = capsys.readouterr().out
    assert str(path) in text and "A  first" in text
    assert max(len(line) for line in text.splitlines() if line.startswith(("core", " "))) <= 80


def test_coordinate_descent_is_never_slower_than_its_starts(repository: Path, cache_dir: Path) -> None:
    models = [str(repository / name) for name in ("first", "second")]
    options = ["--search=coordinate", "--rounds=1", "--candidates=3", "--pointers=2"]
    assert compose_command.main([*models, f"--cache-dir={cache_dir}", *options]) == 0
    _, found = found_in(cache_dir)  # an ensemble's file is that of its models
    assert found.search == "coordinate" and found.schedules > 2
    assert found.time_us <= min(found.sequential_us, found.parallel_us)
    assert find_schedule(cache_dir, found.keys, "no such target") is None


def test_a_damaged_schedule_is_refused(cache_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, found = found_in(cache_dir)
    content = path.read_bytes()
    assert decode(StoredSchedule, encode(found), "schedule") == found
    record = json.loads(content)
    changes: list[dict[str, object]] = [
        {"format_version": 0},
        {"keys": ["x" * 64] * 2},
        {"keys": []},
        {"cores": 0},
        {"layers": [1000000, 1]},
        {"pointers": [[3, 1], [0, 0]]},
        {"stages": record["stages"][:-1]},
        {"stages": record["stages"] * 2},
        {"stages": [[{"stream": -1, "begin": 0, "end": 1, "cores": 1, "versions": []}]]},
        {"time_us": -1.0},
        {"more": 1},
    ]
    damaged = [json.dumps(record | change).encode() for change in changes]
    for number, text in enumerate([*damaged, content[: len(content) // 2], b"\xff\x00", b"[" * 100_000]):
        wrong = tmp_path / f"{number}.json"
        wrong.write_bytes(text)
        with pytest.raises(ScheduleFileError, match=f"{number}.json"):
            read_schedule(wrong)
        with caplog.at_level(logging.WARNING):
            assert read_state(wrong, found.keys, "", found.layers, found.cores) is None
        assert "damaged samples ignored" in caplog.text


def test_what_is_no_compound_task(repository: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = {
        (str(repository / "chain"),): "step second needs 'one' of step first",
        (str(repository / "first"),): "one model is no compound task",
        (str(tmp_path / "absent"),): "does not exist",
        (str(repository / "first"), str(repository / "both")): "an ensemble has no ONNX file",
        (*[str(repository / "first")] * 3, "--pointers=1"): "3 models need at least 2",
        (*[str(repository / "first")] * 27,): "2 to 26 models, not 27",
        (str(repository / "both"), "--search=best"): "invalid choice",
    }
    for arguments, message in cases.items():
        with pytest.raises(SystemExit) as stopped:
            compose_command.main([*arguments, f"--cache-dir={tmp_path}"])
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err
    (tmp_path / "broken.onnx").write_bytes(b"no model")
    assert compose_command.main([str(tmp_path / "broken.onnx")] * 2 + [f"--cache-dir={tmp_path / 'cache'}"]) == 1
    assert "gangway compose: " in capsys.readouterr().err


def test_pictures_join_cores_alike_and_fit_the_width() -> None:
    spans = (
        SegmentRun(StreamSegment(0, 0, 3, 40), 0, 0.0, 400.0),
        SegmentRun(StreamSegment(1, 0, 2, 24), 40, 0.0, 100.0),
        SegmentRun(StreamSegment(1, 2, 5, 64), 0, 400.0, 1000.0),
    )
    lines = compose_command.picture(CompoundTimes(1000.0, 0.0, spans), 64, 1000.0)
    assert [line.split()[:2] for line in lines[:2]] == [["cores", "0-39"], ["cores", "40-63"]]
    assert max(map(len, lines)) <= 80
    first, second = (line.split()[2] for line in lines[:2])
    assert len(first) == len(second) and first.strip("A").strip("B") == ""
    assert second.startswith("B" * 7 + ".") and second.endswith(".BB" + "B" * (first.count("B") - 2))
    assert lines[2].count("|") == 3
    half = compose_command.picture(CompoundTimes(1000.0, 0.0, spans), 64, 2000.0)
    assert abs(len(half[0].split()[2]) * 2 - len(first)) <= 1
