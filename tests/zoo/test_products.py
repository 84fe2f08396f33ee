"""Matrix products against the counts that the zoo's tests hold against the literature, and against cases by hand."""

import pytest
from onnx import TensorProto, helper

from gangway.zoo import build, count
from gangway.zoo.cost import MatrixProduct, matrix_products


def macs(product: MatrixProduct) -> int:
    return product.groups * product.inputs * product.outputs * product.taps * product.positions


@pytest.mark.parametrize("name", ["mobilenetv2", "resnet18"])
def test_products_add_up_to_the_count(name: str) -> None:
    model = build(name).without_weights()
    counts = count(model)
    found = matrix_products(model)
    assert sum(map(macs, found)) == counts.multiply_adds
    weights = sum(macs(product) // product.positions for product in found if product.weighted)
    assert 0.98 * counts.parameters < weights <= counts.parameters  # without biases and normalisation


def test_kinds_of_products() -> None:
    nodes = [
        helper.make_node("Conv", ["image", "kernel"], ["pixels"], name="conv", group=2, strides=[2, 2]),
        helper.make_node("MatMul", ["tokens", "matrix"], ["q"], name="weighted"),
        helper.make_node("MatMul", ["q", "keys"], ["scores"], name="attention"),
        helper.make_node("Gemm", ["row", "transposed"], ["logits"], name="gemm", transB=1),
        helper.make_node("MatMul", ["matrix", "square"], ["constant"], name="folded"),
        helper.make_node("MatMul", ["tokens", "constant"], ["more"], name="after"),
    ]
    dims = {
        "image": [1, 6, 9, 9], "kernel": [8, 3, 3, 3], "tokens": [1, 4, 5, 7], "matrix": [7, 3], "keys": [1, 4, 3, 5],
        "row": [1, 7], "transposed": [11, 7], "square": [3, 3],
    }  # fmt: skip
    constants = ("kernel", "matrix", "transposed", "square")
    graph = helper.make_graph(
        nodes,
        "kinds",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
            for name, shape in dims.items()
            if name not in constants
        ],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("scores", "logits", "more")],
        [helper.make_tensor(name, TensorProto.FLOAT, dims[name], [0.0] * _size(dims[name])) for name in constants],
    )
    assert matrix_products(helper.make_model(graph)) == [
        MatrixProduct("conv", 2, 3, 4, 9, 16, True),
        MatrixProduct("weighted", 1, 7, 3, 1, 20, True),
        MatrixProduct("attention", 4, 3, 5, 1, 5, False),
        MatrixProduct("gemm", 1, 7, 11, 1, 1, True),
        MatrixProduct("after", 1, 7, 3, 1, 20, True),
    ]


def _size(shape: list[int]) -> int:
    size = 1
    for dimension in shape:
        size *= dimension
    return size
