"""The zoo's models: sizes of the true architectures, meaningful answers, deterministic files, the command."""

import math
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from gangway.zoo import NAMES, write_model
from gangway.zoo.command import main


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("zoo")
    for name in NAMES:
        write_model(directory, name)
    return directory


def parameters(path: Path) -> int:
    """Trainable numbers: statistics of batch normalisation and constants do not count."""
    tensors = onnx.load(path).graph.initializer
    return sum(math.prod(t.dims) for t in tensors if t.dims and "running" not in t.name)


@pytest.mark.parametrize(("name", "count"), [("resnet50", 25_557_032), ("mobilenetv2", 3_504_872), ("simple", 0)])
def test_parameter_count_is_the_architecture_s(repository: Path, name: str, count: int) -> None:
    assert parameters(repository / name / "1" / "model.onnx") == count


@pytest.mark.parametrize("name", ["resnet50", "mobilenetv2", "mlp"])
def test_answers_are_finite_and_depend_on_the_input(repository: Path, name: str) -> None:
    session = onnxruntime.InferenceSession(str(repository / name / "1" / "model.onnx"))
    (info,) = session.get_inputs()
    assert info.name == "input"
    assert info.shape[0] == "N"
    x = np.random.default_rng(1).standard_normal((2, *info.shape[1:]), dtype=np.float32)
    (y,) = session.run(["output"], {"input": x})
    assert np.isfinite(y).all()
    assert 0.1 < y.std() < 30
    assert np.abs(y[0] - y[1]).max() > 0.02 * np.abs(y).max()


def test_simple_adds_and_subtracts(repository: Path) -> None:
    session = onnxruntime.InferenceSession(str(repository / "simple" / "1" / "model.onnx"))
    a, b = np.arange(16, dtype=np.int32)[None], np.full((1, 16), 3, np.int32)
    total, difference = session.run(["OUTPUT0", "OUTPUT1"], {"INPUT0": a, "INPUT1": b})
    assert (total == a + b).all()
    assert (difference == a - b).all()


def test_the_same_name_gives_the_same_bytes(repository: Path, tmp_path: Path) -> None:
    write_model(tmp_path, "mlp")
    for file in ("1/model.onnx", "config.pbtxt"):
        assert (tmp_path / "mlp" / file).read_bytes() == (repository / "mlp" / file).read_bytes()


def test_config_states_the_latency_target(tmp_path: Path) -> None:
    text = (write_model(tmp_path, "simple") / "config.pbtxt").read_text()
    assert 'key: "qos_ms"' in text
    assert 'string_value: "3x"' in text
    assert "max_batch_size: 8" in text
    assert text.count("TYPE_INT32") == 4


def test_command_writes_keeps_and_forces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "mlp", "simple", "--paper-qos"]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mlp", "simple"]
    model = tmp_path / "mlp" / "1" / "model.onnx"
    content = model.read_bytes()
    model.write_bytes(b"mine")
    assert main([str(tmp_path), "mlp"]) == 0
    assert model.read_bytes() == b"mine"
    assert "kept" in capsys.readouterr().out
    assert main([str(tmp_path), "mlp", "--force"]) == 0
    assert model.read_bytes() == content


def test_command_names_what_it_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path), "resnet51"])
    assert stop.value.code == 2
    assert "resnet50" in capsys.readouterr().err


def test_command_reports_an_unwritable_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file"), "mlp"]) == 1
    assert "cannot write" in capsys.readouterr().err
