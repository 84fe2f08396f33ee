from pathlib import Path

import pytest
from gangway.server.model_config import ConfigError, Qos, parse_qos
from gangway.server.repository import BrokenModel, ModelVersion, read_repository


def add_model(repository: Path, name: str, config: str | None = None, versions: tuple[str, ...] = ("1",)) -> Path:
    for version in versions:
        (repository / name / version).mkdir(parents=True)
        (repository / name / version / "model.onnx").write_bytes(b"onnx")
    if config is not None:
        (repository / name / "config.pbtxt").write_text(config)
    return repository / name


def only_entry(repository: Path) -> ModelVersion | BrokenModel:
    (entry,) = read_repository([repository])
    return entry


def only_reason(repository: Path) -> str:
    entry = only_entry(repository)
    assert isinstance(entry, BrokenModel)
    return entry.reason


def served_versions(repository: Path) -> list[int]:
    entries = read_repository([repository])
    assert all(isinstance(entry, ModelVersion) for entry in entries)
    return [entry.version for entry in entries]


def test_a_model_without_config_is_served(tmp_path: Path) -> None:
    add_model(tmp_path, "m")
    entry = only_entry(tmp_path)
    assert isinstance(entry, ModelVersion)
    assert (entry.name, entry.version, entry.path, entry.qos) == ("m", 1, tmp_path / "m/1/model.onnx", Qos())


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("", [11]),
        ("version_policy { latest { num_versions: 2 } }", [3, 11]),
        ("version_policy { all {} }", [1, 3, 11]),
        ("version_policy { specific { versions: [3, 1, 3] } }", [1, 3]),
    ],
)
def test_version_policy(tmp_path: Path, policy: str, expected: list[int]) -> None:
    add_model(tmp_path, "m", policy, ("1", "3", "11", "02", "0", "notes"))
    assert served_versions(tmp_path) == expected


def test_the_model_file_may_have_another_name(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "m", 'default_model_filename: "net.onnx"')
    assert only_reason(tmp_path) == "there is no 1/net.onnx"
    (folder / "1" / "net.onnx").write_bytes(b"")
    entry = only_entry(tmp_path)
    assert isinstance(entry, ModelVersion)
    assert entry.path.name == "net.onnx"


def test_a_broken_model_does_not_hinder_others(tmp_path: Path) -> None:
    add_model(tmp_path, "b", "max_batch_size: 8\nunknown_field: 3\n")
    add_model(tmp_path, "a")
    (tmp_path / "c").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "README").write_text("not a model")
    a, b, c = read_repository([tmp_path])
    assert isinstance(a, ModelVersion)
    assert isinstance(b, BrokenModel)
    assert b.reason.startswith("config.pbtxt: 2:1 : ")
    assert "unknown_field" in b.reason
    assert c == BrokenModel("c", 0, "there is no version folder (such as '1')")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('name: "other"', "name 'other' differs from the folder's name 'm'"),
        ('platform: "tensorrt_plan"', "'tensorrt_plan' is not supported"),
        ('backend: "python"', "'python' is not supported"),
        ("max_batch_size: -1", "max_batch_size is -1"),
        ('default_model_filename: "../x.onnx"', "leaves the version folder"),
        ("sequence_batching { iterative_sequence: true }", "sequence_batching.iterative_sequence is not supported"),
        ('sequence_batching { control_input { name: "c" } }', "input 'c' has 0 controls, expected 1"),
        ("ensemble_scheduling {}", "whose platform is not ensemble"),
        ("model_transaction_policy { decoupled: true }", "decoupled is not supported"),
        ('input { name: "x" is_shape_tensor: true }', "input 'x': is_shape_tensor is not supported"),
        ('input { name: "x" } input { name: "x" }', "names an input twice"),
        ("output { data_type: TYPE_FP32 }", "an output has no name"),
        ("version_policy { specific { versions: [1, 4] } }", r"asks for \[1, 4\], but there are \[1\]"),
        ('parameters { key: "qos_ms" value { string_value: "soon" } }', 'qos_ms: expected .* got "soon"'),
        ("input { dims: 3 ", "config.pbtxt: 1:"),
        ("\x00", "config.pbtxt: 1:"),
    ],
)
def test_wrong_configs_say_what_is_wrong(tmp_path: Path, config: str, reason: str) -> None:
    add_model(tmp_path, "m", config)
    with pytest.raises(ConfigError, match=reason):
        raise ConfigError(only_reason(tmp_path))


def test_config_that_is_no_text(tmp_path: Path) -> None:
    (add_model(tmp_path, "m") / "config.pbtxt").write_bytes(b"\xff\xfe\x00")
    assert only_reason(tmp_path).startswith("config.pbtxt: 'utf-8'")


def test_one_name_in_two_repositories(tmp_path: Path) -> None:
    for repository in ("one", "two"):
        add_model(tmp_path / repository, "m")
    assert read_repository([tmp_path / "one", tmp_path / "two"]) == [
        BrokenModel("m", 0, "model appears in two or more repositories")
    ]


def test_a_missing_repository_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_repository([tmp_path / "nowhere"])


def test_qos_parameter(tmp_path: Path) -> None:
    add_model(tmp_path, "m", 'parameters: { key: "qos_ms" value: { string_value: "3x" } }')
    entry = only_entry(tmp_path)
    assert isinstance(entry, ModelVersion)
    assert entry.qos == Qos(multiple=3.0)
    assert parse_qos(" 12.5 ") == Qos(milliseconds=12.5)


@pytest.mark.parametrize("text", ["", "x", "0", "-3", "nan", "inf", "1e999", "3 x x", "3y", "0x"])
def test_wrong_qos(text: str) -> None:
    with pytest.raises(ConfigError, match="qos_ms"):
        parse_qos(text)
