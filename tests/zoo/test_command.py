"""`gangway zoo` and what it writes."""

from pathlib import Path

import pytest

from gangway.zoo import DEFAULT_NAMES, MODELS, write_model
from gangway.zoo.command import main


def test_config_states_tensors_and_the_latency_target(tmp_path: Path) -> None:
    text = (write_model(tmp_path, "simple") / "config.pbtxt").read_text()
    assert 'key: "qos_ms"' in text
    assert 'string_value: "3x"' in text
    assert "max_batch_size: 8" in text
    assert text.count("TYPE_INT32") == 4
    assert text.count("dims: [ 16 ]") == 4


@pytest.mark.parametrize(("name", "qos"), [("mobilenetv2", "10"), ("mlp", "3x")])
def test_config_states_the_paper_s_target_where_there_is_one(tmp_path: Path, name: str, qos: str) -> None:
    text = (write_model(tmp_path, name, paper_qos=True) / "config.pbtxt").read_text()
    assert f'string_value: "{qos}"' in text


def test_without_names_the_four_small_ones_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(DEFAULT_NAMES)
    printed = capsys.readouterr().out
    assert "(25.56 M parameters, 8.18 GFLOP)" in printed
    assert "(3.50 M parameters, 0.60 GFLOP)" in printed


def test_all_means_every_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"resnet50", "mlp", "simple_int8"}
    monkeypatch.setattr("gangway.zoo.command.MODELS", {name: MODELS[name] for name in small})
    assert main([str(tmp_path), "all"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == small
    with pytest.raises(SystemExit) as stop:
        main(["--help"])
    assert stop.value.code == 0
    assert "'all'" in capsys.readouterr().out


def test_what_exists_is_kept_unless_forced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["resnet51"], "resnet50"),
        (["resnet50", "--sequence", "384"], "none of these models takes tokens"),
        (["simple", "bert_base", "--sequence", "1000"], "1 to 512 tokens, not 1000"),
        (["bert_base", "--sequence", "0"], "1 to 512 tokens, not 0"),
    ],
)
def test_wrong_arguments_are_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([str(tmp_path), *arguments])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_an_unwritable_directory_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file"), "mlp"]) == 1
    assert "cannot write" in capsys.readouterr().err


def test_a_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, file: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gangway.zoo.graph.ModelGraph.write", full)
    assert main([str(tmp_path), "mlp"]) == 1
    assert not list((tmp_path / "mlp" / "1").iterdir())


def test_the_examples_of_triton_s_clients(tmp_path: Path) -> None:
    assert main([str(tmp_path), "examples", "simple"]) == 0
    names = {"simple", "simple_string", "simple_int8", "simple_identity", "simple_image"}
    names |= {"simple_sequence", "simple_dyna_sequence", "simple_string_dyna_sequence"}
    assert {path.name for path in tmp_path.iterdir()} == names
    text = (tmp_path / "simple_sequence" / "config.pbtxt").read_text()
    assert text.count("name:") == 1 + 2 + 2 and "sequence_batching {" in text  # clients see no control
    assert "dims: [ -1 ]" in (tmp_path / "simple_identity" / "config.pbtxt").read_text()


def test_an_ensemble_is_written_with_its_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "simple_ensemble"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"simple_ensemble", "simple_pixels", "simple_image"}
    assert list((tmp_path / "simple_ensemble" / "1").iterdir()) == []
    config = tmp_path / "simple_ensemble" / "config.pbtxt"
    assert 'platform: "ensemble"' in config.read_text()
    config.write_text("mine")
    assert main([str(tmp_path), "simple_ensemble"]) == 0
    assert config.read_text() == "mine"
    assert "kept" in capsys.readouterr().out
