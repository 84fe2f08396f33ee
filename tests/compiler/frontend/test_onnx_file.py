"""External data is found without reading the weights, and damage is left to the importer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from gangway.compiler.frontend.onnx_file import may_have_external_data


@pytest.fixture
def model(network: Any) -> Any:
    weights = {"w": np.ones((8, 64), np.float32)}
    return network([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": [1, 8]}, {"y": None}, weights)


def test_external_data_is_found(model: Any, tmp_path: Path) -> None:
    inside = model.save(tmp_path / "inside.onnx")
    outside = model.save(tmp_path / "outside.onnx", save_as_external_data=True, location="d", size_threshold=0)
    assert not may_have_external_data(inside)
    assert may_have_external_data(outside)


def test_damaged_files_are_left_to_the_importer(model: Any, tmp_path: Path) -> None:
    content = model.save(tmp_path / "whole.onnx").read_bytes()
    path = tmp_path / "cut.onnx"
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        may_have_external_data(path)  # neither fails nor hangs
    path.write_bytes(b"\x3a" + b"\xff" * 12)
    assert may_have_external_data(path)


def test_an_absent_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        may_have_external_data(tmp_path / "none.onnx")
