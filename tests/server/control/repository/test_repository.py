import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from gangway.server.control.repository.repository import (
    BrokenModel,
    Entry,
    ModelVersion,
    find_models,
    misplaced_models,
    read_only_one,
)
from gangway.server.errors import ConfigError
from gangway.server.messages import MAX_VERSION, WHOLE_MODEL
from gangway.server.models.config import QosConfig, parse_qos


def read_repository(directories: Sequence[Path]) -> list[Entry]:
    """What is to be served, by name and version."""
    return [entry for name, folders in find_models(directories).items() for entry in read_only_one(name, folders)]


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
    assert (entry.name, entry.version, entry.path, entry.qos) == ("m", 1, tmp_path / "m/1/model.onnx", QosConfig())


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("", [MAX_VERSION]),
        ("version_policy { latest { num_versions: 2 } }", [11, MAX_VERSION]),
        (f"version_policy {{ specific {{ versions: [0, {MAX_VERSION}] }} }}", [0, MAX_VERSION]),
        ("version_policy { all {} }", [0, 1, 3, 11, MAX_VERSION]),
        ("version_policy { specific { versions: [3, 1, 3] } }", [1, 3]),
    ],
)
def test_version_policy(tmp_path: Path, policy: str, expected: list[int]) -> None:
    add_model(tmp_path, "m", policy, ("1", "3", "11", "02", "0", "notes", str(MAX_VERSION), str(MAX_VERSION + 1)))
    assert served_versions(tmp_path) == expected


def test_the_model_file_may_have_another_name(tmp_path: Path) -> None:
    folder = add_model(tmp_path, "m", 'default_model_filename: "net.onnx"')
    assert only_reason(tmp_path) == "there is no 1/net.onnx, only model.onnx"
    (folder / "1" / "net.onnx").write_bytes(b"")
    entry = only_entry(tmp_path)
    assert isinstance(entry, ModelVersion)
    assert entry.path.name == "net.onnx"


@pytest.mark.parametrize(
    ("name", "size"),
    [("", 1), ("h100", 2), ("config", 3), ("v100", 1)],
)
def test_a_configuration_may_be_chosen_by_its_name(tmp_path: Path, name: str, size: int) -> None:
    folder = add_model(tmp_path, "m", "max_batch_size: 1")
    (folder / "configs").mkdir()
    for file, each in {"h100": 2, "config": 3}.items():
        (folder / "configs" / f"{file}.pbtxt").write_text(f"max_batch_size: {each}")
    (entry,) = read_only_one("m", [folder], config_name=name)
    assert isinstance(entry, ModelVersion)
    assert entry.config.max_batch_size == size
    (folder / "configs" / "h100.pbtxt").write_text("max_batch_size: many")
    (entry,) = read_only_one("m", [folder], config_name="h100")
    assert isinstance(entry, BrokenModel)
    assert entry.reason.startswith("h100.pbtxt: line 1, column 17: ")


@pytest.mark.parametrize(
    ("config", "files", "served"),
    [
        ("", ("model.onnx/model.onnx", "model.onnx/weights.bin"), "model.onnx/model.onnx"),
        ('default_model_filename: "model.onnx"', ("model.onnx/model.onnx",), "model.onnx/model.onnx"),
        ('default_model_filename: "net.onnx"', ("net.onnx/model.onnx", "net.onnx/net.onnx"), "net.onnx/model.onnx"),
        ('default_model_filename: "a/net.onnx"', ("a/net.onnx/model.onnx",), "a/net.onnx/model.onnx"),
        ("", ("model.onnx/net.onnx",), "1/model.onnx is a folder without model.onnx"),
        ('default_model_filename: "net.onnx"', ("model.onnx/model.onnx",), "there is no 1/net.onnx"),
    ],
)
def test_a_folder_may_hold_the_file_and_its_data(
    tmp_path: Path, config: str, files: tuple[str, ...], served: str
) -> None:
    version = add_model(tmp_path, "m", config) / "1"
    (version / "model.onnx").unlink()
    for name in files:
        (version / name).parent.mkdir(parents=True, exist_ok=True)
        (version / name).write_bytes(b"onnx")
    entry = only_entry(tmp_path)
    if isinstance(entry, BrokenModel):
        assert entry.reason == served
    else:
        assert (entry.folder, entry.path, str(entry.file)) == (version.parent, version / served, served)


def test_a_broken_model_does_not_hinder_others(tmp_path: Path) -> None:
    add_model(tmp_path, "b", "max_batch_size: 8\nunknown_field: 3\n")
    add_model(tmp_path, "a")
    (tmp_path / "c").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "README").write_text("not a model")
    a, b, c = read_repository([tmp_path])
    assert isinstance(a, ModelVersion)
    assert isinstance(b, BrokenModel)
    assert b.reason.startswith("config.pbtxt: line 2, column 1: ")
    assert "unknown_field" in b.reason
    assert c == BrokenModel("c", WHOLE_MODEL, "there is no version folder (such as '1')")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('name: "other"', "name 'other' differs from the folder's name 'm'"),
        ("max_batch_size: -1", "max_batch_size is -1"),
        ('default_model_filename: "../x.onnx"', "leaves the version folder"),
        ('default_model_filename: "a/../../x.onnx"', "leaves the version folder"),
        ('default_model_filename: "/x.onnx"', "leaves the version folder"),
        ('default_model_filename: "a//x.onnx"', "is no name of a file"),
        ('default_model_filename: "a/x.onnx"', "there is no 1/a/x.onnx"),
        ("sequence_batching { iterative_sequence: true }", "sequence_batching.iterative_sequence is not supported"),
        ('sequence_batching { control_input { name: "c" } }', "input 'c' has 0 controls, expected 1"),
        ("ensemble_scheduling {}", "whose platform is not ensemble"),
        ("model_transaction_policy { decoupled: true }", "decoupled is not supported"),
        ('input { name: "x" is_shape_tensor: true }', "input 'x': is_shape_tensor is not supported"),
        ('input { name: "x" } input { name: "x" }', "names an input twice"),
        ("output { data_type: TYPE_FP32 }", "an output has no name"),
        ("version_policy { specific { versions: [1, 4] } }", r"asks for \[1, 4\], but there are \[1\]"),
        ('parameters { key: "qos_ms" value { string_value: "soon" } }', 'qos_ms: expected .* got "soon"'),
        ("input { dims: 3 ", "config.pbtxt: line 1, column "),
        ("input { dim: 3 }", r"no field named \"dim\".*; did you mean 'dims'\?"),
        ("dynamic_batchin {}", r"; did you mean 'dynamic_batching'\?"),
        ("\x00", "config.pbtxt: line 1, column "),
    ],
)
def test_wrong_configs_say_what_is_wrong(tmp_path: Path, config: str, reason: str) -> None:
    add_model(tmp_path, "m", config)
    with pytest.raises(ConfigError, match=reason):
        raise ConfigError(only_reason(tmp_path))


def test_config_that_is_no_text(tmp_path: Path) -> None:
    (add_model(tmp_path, "m") / "config.pbtxt").write_bytes(b"\xff\xfe\x00")
    assert only_reason(tmp_path).startswith("config.pbtxt: 'utf-16")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1", "utf-16", "cp1251"])
def test_a_comment_in_any_encoding(tmp_path: Path, encoding: str) -> None:
    comment = "модель" if encoding == "cp1251" else "f\xfcr alle F\xe4lle"
    (add_model(tmp_path, "m") / "config.pbtxt").write_bytes(f"# {comment}\nmax_batch_size: 3".encode(encoding))
    entry = only_entry(tmp_path)
    assert isinstance(entry, ModelVersion)
    assert entry.config.max_batch_size == 3


@pytest.mark.parametrize(
    ("engine", "remove", "add", "reason"),
    [
        ('platform: "tensorrt_plan"', "", "model.plan", ""),
        ('platform: "tensorrt_plan"', "model.onnx", "model.plan", "platform 'tensorrt_plan' is not .* no 1/model.onnx"),
        ('backend: "openvino"', "", "model.py", "'openvino' is not supported, only ONNX .* there is 1/model.py"),
        ('backend: "tensorrt" default_model_filename: "m.plan"', "", "m.plan", "1/m.plan is no .onnx file"),
    ],
)
def test_an_onnx_file_is_served_whatever_is_named(
    tmp_path: Path, engine: str, remove: str, add: str, reason: str
) -> None:
    version = add_model(tmp_path, "m", engine) / "1"
    (version / add).write_bytes(b"")
    if remove:
        (version / remove).unlink()
    entry = only_entry(tmp_path)
    if isinstance(entry, BrokenModel):
        assert reason and re.search(reason, entry.reason)
    else:
        assert not reason and "'tensorrt_plan'" in entry.without_effect[0]


@pytest.mark.parametrize(
    ("config", "files", "served"),
    [
        ('backend: "python"', ("model.py",), "model.py"),
        ('backend: "python"', ("model.py", "model.onnx"), "model.py"),
        ('backend: "python"', ("model.onnx",), "model.onnx"),
        ('backend: "python" default_model_filename: "other.py"', ("model.py", "other.py"), "other.py"),
        ('backend: "python" default_model_filename: "a/other.py"', ("a/other.py",), "a/other.py"),
        ("", ("model.py",), "model.py"),
        ("", ("model.py", "model.onnx"), "model.onnx"),
        ('backend: "python"', (), "there is neither 1/model.py nor 1/model.onnx"),
        ('backend: "python" default_model_filename: "other.py"', ("model.py",), "there is no 1/other.py"),
        ("", ("model.pt",), "there is no 1/model.onnx, only model.pt"),
        ("", tuple("abcd"), "there is no 1/model.onnx, only a, b, c, ..."),
    ],
)
def test_which_file_is_a_python_model(tmp_path: Path, config: str, files: tuple[str, ...], served: str) -> None:
    version = add_model(tmp_path, "m", config) / "1"
    (version / "model.onnx").unlink()
    for name in files:
        (version / name).parent.mkdir(exist_ok=True)
        (version / name).write_bytes(b"")
    entry = only_entry(tmp_path)
    if isinstance(entry, BrokenModel):
        assert entry.reason == served
    else:
        assert (entry.folder, entry.path, str(entry.file)) == (version.parent, version / served, served)
        assert entry.is_python == served.endswith(".py")


def test_what_lies_wrongly_is_named(tmp_path: Path) -> None:
    assert list(misplaced_models([tmp_path])) == [
        f"{tmp_path} holds no models: a model lies in it as NAME/1/model.onnx"
    ]
    (tmp_path / "net.onnx").write_bytes(b"")
    (tmp_path / "lost+found").mkdir()
    (tmp_path / ".trash").mkdir()
    loose, nothing = misplaced_models([tmp_path])
    assert loose.endswith(f"a model lies in folders of its own, as {tmp_path}/net/1/model.onnx")
    assert nothing.startswith(f"{tmp_path} holds no models")
    assert read_repository([tmp_path]) == []
    folder = add_model(tmp_path, "m")
    (sentence,) = misplaced_models([folder])
    assert sentence == f"{folder} looks like a model, not like a repository: name the folder above it"
    os.mkdir(os.fsencode(tmp_path) + b"/caf\xe9")
    assert ["UTF-8" in sentence for sentence in misplaced_models([tmp_path])] == [True, False]
    assert [entry.name for entry in read_repository([tmp_path])] == ["m"]


@pytest.mark.parametrize(
    ("name", "hint"), [("02", "02 has leading zeros"), ("m.onnx", "m.onnx must lie in one"), ("x", r"\(such as '1'\)$")]
)
def test_a_model_without_versions_says_why(tmp_path: Path, name: str, hint: str) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / name).touch() if "." in name else (tmp_path / "m" / name).mkdir()
    assert re.search(hint, only_reason(tmp_path))


def test_one_name_in_two_repositories(tmp_path: Path) -> None:
    for repository in ("one", "two"):
        add_model(tmp_path / repository, "m")
    assert read_repository([tmp_path / "one", tmp_path / "two"]) == [
        BrokenModel("m", WHOLE_MODEL, "model appears in two or more repositories")
    ]


def test_a_missing_repository_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_repository([tmp_path / "nowhere"])


def test_qos_parameter(tmp_path: Path) -> None:
    add_model(tmp_path, "m", 'parameters: { key: "qos_ms" value: { string_value: "3x" } }')
    entry = only_entry(tmp_path)
    assert isinstance(entry, ModelVersion)
    assert entry.qos == QosConfig(multiple=3.0)
    assert parse_qos(" 12.5 ") == QosConfig(milliseconds=12.5)


@pytest.mark.parametrize("text", ["", "x", "0", "-3", "nan", "inf", "1e999", "3 x x", "3y", "0x"])
def test_wrong_qos(text: str) -> None:
    with pytest.raises(ConfigError, match="qos_ms"):
        parse_qos(text)
