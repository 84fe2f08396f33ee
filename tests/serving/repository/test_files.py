"""`gangway serve model.onnx`: ONNX files are models without a repository, and nothing is written beside them."""

import os
import subprocess
from pathlib import Path

import onnx
import pytest
import tritonclient.grpc as triton
from onnx.external_data_helper import set_external_data

from testing.live_server import live_server
from testing.repository import GANGWAY
from tests.conftest import CompileKept
from tests.helpers.adder_models import Controlled, adder, fill_cache, replace

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory, compile_kept: CompileKept) -> Path:
    return fill_cache(tmp_path_factory.mktemp("compiled"), compile_kept)


def save_beside(path: Path, number: float) -> None:
    """An adder whose number stands in a file of its own, as large models have it."""
    model = onnx.ModelProto.FromString(adder(number))
    (tensor,) = model.graph.initializer
    data = path.with_name(path.name + ".data")
    data.write_bytes(tensor.raw_data)
    set_external_data(tensor, data.name, 0, len(tensor.raw_data))
    tensor.ClearField("raw_data")
    path.write_bytes(model.SerializeToString())


def test_files_are_models_and_follow_their_changes(tmp_path: Path, cache_dir: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "first.onnx").write_bytes(adder(1))
    (folder / "other name.onnx").write_bytes(adder(2))
    save_beside(folder / "large.onnx", 5)
    before = sorted(os.walk(folder))
    flags = [f"--cache-dir={cache_dir}", "--model-control-mode=poll", "--repository-poll-secs=0.1"]
    flags += ["second=" + str(folder / "other name.onnx"), str(folder / "large.onnx")]
    with (
        live_server(folder / "first.onnx", flags) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        served = Controlled(server, client, folder, folder, folder)
        assert sorted(served.index()) == [("first", "1"), ("large", "1"), ("second", "1")]
        assert [served.added(name) for name in ("first", "second", "large")] == [1, 2, 5]
        assert sorted(os.walk(folder)) == before
        replace(folder / "first.onnx", adder(3))
        served.wait_until(lambda: served.added("first") == 3)
        (folder / "first.onnx").unlink()
        served.wait_until(lambda: "there is no file" in served.server.log.read_text())
        assert served.added("first") == 3


def test_files_stand_beside_repositories(tmp_path: Path, cache_dir: Path) -> None:
    (tmp_path / "models" / "one" / "1").mkdir(parents=True)
    (tmp_path / "models" / "one" / "1" / "model.onnx").write_bytes(adder(1))
    (tmp_path / "two.onnx").write_bytes(adder(2))
    flags = [str(tmp_path / "two.onnx"), f"--cache-dir={cache_dir}", "--model-control-mode=explicit", "--load-model=*"]
    with live_server(tmp_path / "models", flags) as server, triton.InferenceServerClient(server.url) as client:
        served = Controlled(server, client, tmp_path, tmp_path, tmp_path)
        assert (served.added("one"), served.added("two")) == (1, 2)
        client.unload_model("two")
        served.wait_until(lambda: not client.is_model_ready("two"))
        client.load_model("two")
        assert served.added("two") == 2


def test_files_in_a_folder_without_folders_are_models(tmp_path: Path, cache_dir: Path) -> None:
    for name, number in (("one", 1), ("two", 2)):
        (tmp_path / f"{name}.onnx").write_bytes(adder(number))
    with (
        live_server(tmp_path, [f"--cache-dir={cache_dir}"]) as server,
        triton.InferenceServerClient(server.url) as client,
    ):
        served = Controlled(server, client, tmp_path, tmp_path, tmp_path)
        assert (served.added("one"), served.added("two")) == (1, 2)
        assert "not served" not in server.log.read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("no.onnx",), "no.onnx cannot be read: No such file or directory"),
        (("model.onx",), "model.onx does not exist"),
        (("notes.txt",), "notes.txt is not a folder, nor a file that ends with .onnx"),
        (("model.onnx", "again/model.onnx"), "2 files are models called 'model': give another name, as NAME=FILE"),
        ((".x=model.onnx",), "'.x' is no name for a model"),
        (("a/b=model.onnx",), "'a/b' is no name for a model"),
        (("m=notes.onnx",), "notes.onnx cannot be read"),
    ],
)
def test_what_is_no_model_is_refused(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    (tmp_path / "again").mkdir()
    for name in ("model.onnx", "again/model.onnx", "notes.txt"):
        (tmp_path / name).write_bytes(adder(1))
    ran = subprocess.run(
        [*GANGWAY, "serve", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert ran.returncode == 2
    assert f"argument MODELS: {said}" in ran.stderr


def test_flags_may_stand_between_models(tmp_path: Path) -> None:
    for name in ("a.onnx", "b.onnx"):
        (tmp_path / name).write_bytes(adder(1))
    ran = subprocess.run(
        [*GANGWAY, "serve", "a.onnx", "--http-port", "1", "b.onnx", "--show-config"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert 'http-port = "1"  # command line' in ran.stdout
