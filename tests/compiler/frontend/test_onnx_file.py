"""External data is found without reading the weights, and damage is left to the importer."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from gangway.compiler.frontend.onnx_file import external_locations, message


@pytest.fixture
def model(network: Any) -> Any:
    weights = {"w": np.ones((8, 64), np.float32)}
    return network([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": [1, 8]}, {"y": None}, weights)


def test_external_data_is_found(model: Any, tmp_path: Path) -> None:
    inside = model.save(tmp_path / "inside.onnx")
    outside = model.save(tmp_path / "outside.onnx", save_as_external_data=True, location="d", size_threshold=0)
    assert external_locations(inside) == set()
    assert external_locations(outside) == {"d"}


def test_external_data_is_found_in_attributes_and_functions(tmp_path: Path) -> None:
    def elsewhere(name: str) -> TensorProto:
        tensor = TensorProto(name=name, dims=[1], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
        tensor.external_data.add(key="offset", value="8")
        tensor.external_data.add(key="location", value=name)
        return tensor

    left_over = elsewhere("not external any more")
    left_over.data_location = TensorProto.DEFAULT
    inner = helper.make_graph(
        [helper.make_node("Constant", [], ["c"], value=elsewhere("in a branch"))], "inner", [], []
    )
    branch = helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner)
    function = helper.make_function(
        "own", "F", [], ["y"], [helper.make_node("Constant", [], ["y"], value=elsewhere("in a function"))], []
    )
    graph = helper.make_graph([branch], "outer", [], [], [elsewhere("weights"), left_over])
    path = tmp_path / "model.onnx"
    path.write_bytes(helper.make_model(graph, functions=[function]).SerializeToString())
    assert external_locations(path) == {"in a branch", "in a function", "weights"}


def test_damaged_files_are_left_to_the_importer(model: Any, tmp_path: Path) -> None:
    content = model.save(tmp_path / "whole.onnx").read_bytes()
    path = tmp_path / "cut.onnx"
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        external_locations(path)  # neither fails nor hangs
    path.write_bytes(b"\x3a" + b"\xff" * 12)
    assert external_locations(path) == set()


def test_graphs_that_are_too_deep_are_left_to_the_importer(tmp_path: Path) -> None:
    content = message(1, b"\x0a\x08location")
    for _ in range(3000):
        content = message(1, message(5, message(6, content)))  # node, attribute, graph
    path = tmp_path / "deep.onnx"
    path.write_bytes(message(7, content))
    assert external_locations(path) == set()


def test_an_absent_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        external_locations(tmp_path / "none.onnx")
