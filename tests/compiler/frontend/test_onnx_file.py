"""References to other files are found without reading the weights, and what is not plain is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import AttributeProto, ModelProto, SparseTensorProto, TensorProto, helper

from gangway.compiler.frontend.onnx_file import DamagedError, Reference, message, references


@pytest.fixture
def model(network: Any) -> Any:
    weights = {"w": np.ones((8, 64), np.float32)}
    return network([helper.make_node("MatMul", ["x", "w"], ["y"])], {"x": [1, 8]}, {"y": None}, weights)


def elsewhere(name: str) -> TensorProto:
    tensor = TensorProto(name=name, dims=[1], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="offset", value="8")
    tensor.external_data.add(key="location", value=name)
    return tensor


def test_references_are_found(model: Any, tmp_path: Path) -> None:
    inside = model.save(tmp_path / "inside.onnx")
    outside = model.save(tmp_path / "outside.onnx", save_as_external_data=True, location="d", size_threshold=0)
    assert references(inside) == []
    assert references(outside) == [Reference("d", 0, 8 * 64 * 4)]


def test_initializers_of_graphs_inside_nodes_are_found(tmp_path: Path) -> None:
    left_over = elsewhere("not external any more")
    left_over.data_location = TensorProto.DEFAULT
    inner = helper.make_graph([], "inner", [], [], [elsewhere("in a branch")])
    branch = helper.make_node("If", ["x"], ["y"], then_branch=inner, else_branch=inner)
    graph = helper.make_graph([branch], "outer", [], [], [elsewhere("weights"), left_over])
    path = tmp_path / "model.onnx"
    path.write_bytes(helper.make_model(graph).SerializeToString())
    assert set(references(path)) == {Reference("in a branch", 8, None), Reference("weights", 8, None)}


def constant(tensor: TensorProto) -> Any:
    return helper.make_node("Constant", [], ["c"], value=tensor)


def graph_of(*nodes: Any) -> Any:
    return helper.make_graph(nodes, "g", [], [])


def in_attribute(change: Callable[[AttributeProto], Any]) -> Any:
    node = helper.make_node("Constant", [], ["c"])
    attribute = node.attribute.add(name="a")
    change(attribute)
    return graph_of(node)


def with_training() -> ModelProto:
    model = helper.make_model(graph_of())
    model.training_info.add().initialization.CopyFrom(graph_of(constant(elsewhere("t"))))
    return model


def with_sparse() -> ModelProto:
    graph = graph_of()
    graph.sparse_initializer.append(SparseTensorProto(values=elsewhere("t"), dims=[1]))
    return helper.make_model(graph)


def with_function() -> ModelProto:
    function = helper.make_function("own", "F", [], ["c"], [constant(elsewhere("t"))], [])
    return helper.make_model(graph_of(), functions=[function])


def with_default() -> ModelProto:
    """A function's attribute that has a value where a node gives none."""
    function = helper.make_function("own", "F", [], [], [], [])
    function.attribute_proto.append(helper.make_attribute("a", elsewhere("t")))
    return helper.make_model(graph_of(), functions=[function])


OTHERS = {
    "attribute": lambda: helper.make_model(graph_of(constant(elsewhere("t")))),
    "list": lambda: helper.make_model(in_attribute(lambda each: each.tensors.append(elsewhere("t")))),
    "sparse attribute": lambda: helper.make_model(
        in_attribute(lambda each: each.sparse_tensor.indices.CopyFrom(elsewhere("t")))
    ),
    "sparse list": lambda: helper.make_model(
        in_attribute(lambda each: each.sparse_tensors.add().values.CopyFrom(elsewhere("t")))
    ),
    "inner graph": lambda: helper.make_model(
        in_attribute(lambda each: each.graphs.append(graph_of(constant(elsewhere("t")))))
    ),
    "sparse": with_sparse,
    "function": with_function,
    "default": with_default,
    "training": with_training,
}


@pytest.mark.parametrize("place", OTHERS)
def test_other_tensors_than_initializers_are_refused(tmp_path: Path, place: str) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(OTHERS[place]().SerializeToString())
    with pytest.raises(ValueError, match="a tensor that is no initializer of a graph is in another file"):
        references(path)


@pytest.mark.parametrize(
    ("entries", "why"),
    [
        ([], "has no location"),
        ([("location", "a"), ("location", "b")], "'location' of a tensor is given twice"),
        ([("location", "a"), ("offset", "far")], "no text and numbers"),
        ([("location", "a"), ("length", "1e3")], "no text and numbers"),
    ],
)
def test_references_that_are_not_plain_are_refused(tmp_path: Path, entries: list[tuple[str, str]], why: str) -> None:
    tensor = TensorProto(name="t", dims=[1], data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    for key, value in entries:
        tensor.external_data.add(key=key, value=value)
    path = tmp_path / "model.onnx"
    path.write_bytes(helper.make_model(helper.make_graph([], "g", [], [], [tensor])).SerializeToString())
    with pytest.raises(ValueError, match=why):
        references(path)


def test_damaged_files_are_refused(model: Any, tmp_path: Path) -> None:
    """What ends between two fields is whole for who knows no better."""
    content = model.save(tmp_path / "whole.onnx").read_bytes()
    path = tmp_path / "cut.onnx"
    refused = 0
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        try:
            assert references(path) == []
        except DamagedError:
            refused += 1
    assert refused > len(content) // 7 * 0.9
    for head in (b"\x3a" + b"\xff" * 12, b"\x00\x00", b"\x3b"):
        path.write_bytes(head)
        with pytest.raises(DamagedError):
            references(path)


def test_graphs_that_are_too_deep_are_refused(tmp_path: Path) -> None:
    content = message(1, b"location")
    for _ in range(3000):
        content = message(1, message(5, message(6, content)))  # node, attribute, graph
    path = tmp_path / "deep.onnx"
    path.write_bytes(message(7, content))
    with pytest.raises(DamagedError):
        references(path)


def test_an_absent_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        references(tmp_path / "none.onnx")
