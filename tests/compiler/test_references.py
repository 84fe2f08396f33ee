"""Whatever reads a model looks at its references first: other files are its own, or nobody opens them."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from gangway.compiler.errors import ModelError
from gangway.compiler.key import external_files
from gangway.compiler.model_file import open_model, parse
from testing.repository import GANGWAY
from tests.helpers.onnx_models import make_model
from tests.helpers.sampled import sampled

CONTENT = bytes(range(64))


def part(location: str, **more: int) -> TensorProto:
    """A tensor of four numbers in another file."""
    tensor = TensorProto(name="w", dims=[4], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **more}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def adder(tensor: TensorProto, is_constant: bool = False) -> bytes:
    constants = [helper.make_node("Constant", [], ["w"], value=tensor)] if is_constant else []
    nodes = [*constants, helper.make_node("Add", ["x", "w"], ["y"])]
    model = make_model(nodes, {"x": [4]}, {"y": [4]}, opset=18, ir_version=9)
    model.graph.initializer.extend([] if is_constant else [tensor])
    return bytes(model.SerializeToString())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    for path in (folder / "own.bin", folder / "sub" / "own.bin", tmp_path / "other.bin"):
        path.write_bytes(CONTENT)
    os.mkfifo(folder / "pipe")
    return folder


REFUSED: dict[str, tuple[Callable[[Path], bytes], str]] = {
    "above": (lambda folder: adder(part("../other.bin")), "'../other.bin' leaves the model's folder"),
    "around": (lambda folder: adder(part("sub/../own.bin")), "leaves the model's folder"),
    "absolute": (lambda folder: adder(part(str(folder / "own.bin"))), "leaves the model's folder"),
    "pipe": (lambda folder: adder(part("pipe")), "'pipe' is no regular file"),
    "folder": (lambda folder: adder(part("sub")), "'sub' is no regular file"),
    "end": (lambda folder: adder(part("own.bin", offset=56, length=16)), "has 64 bytes, and the model wants 16"),
    "behind": (lambda folder: adder(part("own.bin", offset=65)), "has 64 bytes"),
    "before": (lambda folder: adder(part("own.bin", offset=-8, length=16)), "has 64 bytes"),
    "constant": (lambda folder: adder(part("own.bin", length=16), is_constant=True), "no initializer of a graph"),
    "cut off": (lambda folder: adder(part("own.bin", length=16))[:-3], "is not an ONNX file, or it is truncated"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_all_readers_refuse(folder: Path, compile_file: Callable[[Path], Any], why: str) -> None:
    make, sentence = REFUSED[why]
    path = folder / "model.onnx"
    path.write_bytes(make(folder))
    for read in (external_files, parse, open_model, compile_file):
        with pytest.raises(ModelError) as caught:
            read(path)
        assert sentence in str(caught.value)


@pytest.mark.parametrize("why", sampled(["constant", "pipe"], ["pipe"]))
def test_the_command_that_quantises_refuses(folder: Path, tmp_path: Path, why: str) -> None:
    make, sentence = REFUSED[why]
    path = folder / "model.onnx"
    path.write_bytes(make(folder))
    (tmp_path / "examples").mkdir()
    np.savez(tmp_path / "examples" / "one.npz", x=np.ones(4, np.float32))
    command = [*GANGWAY, "quantize", str(path), "--data", str(tmp_path / "examples")]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 1
    assert sentence in told.stderr


@pytest.mark.parametrize("location", ["sub/own.bin", "./own.bin", "link.bin"])
def test_files_of_the_folder_are_read(folder: Path, compile_file: Callable[[Path], Any], location: str) -> None:
    """A link leads anywhere: whoever has the folder has made it."""
    (folder / "link.bin").symlink_to(folder.parent / "other.bin")
    path = folder / "model.onnx"
    path.write_bytes(adder(part(location, offset=16, length=16)))
    assert list(external_files(path).values()) == [folder / location]
    compile_file(path)
