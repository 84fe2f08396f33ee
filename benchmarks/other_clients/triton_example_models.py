"""Models that Triton's client examples name and the zoo does not have: as small as can be, right in shape only."""

from collections.abc import Sequence
from pathlib import Path

import onnx
from onnx import NodeProto, TensorProto, helper

OPSET, IR_VERSION = 17, 8
Dims = Sequence[int | str]
IMAGE, CLASSES = [3, 224, 224], [3]


def write_photo_model(repository: Path, name: str) -> None:
    """`grpc_client.py` sends a picture without a batch: answer with the probabilities of its channels."""
    nodes = [
        helper.make_node("ReduceMean", ["data_0"], ["means"], axes=[1, 2], keepdims=0),
        helper.make_node("Softmax", ["means"], ["fc6_1"], axis=0),
    ]
    _write(repository / name, nodes, ("data_0", IMAGE), ("fc6_1", CLASSES), TensorProto.FLOAT)


def write_integer_identity(repository: Path, name: str) -> None:
    """`memory_growth_test.py` wants its 16 numbers back."""
    nodes = [helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])]
    _write(repository / name, nodes, ("INPUT0", ["N", 16]), ("OUTPUT0", ["N", 16]), TensorProto.INT32)


def _write(folder: Path, nodes: list[NodeProto], source: tuple[str, Dims], result: tuple[str, Dims], kind: int) -> None:
    infos = [helper.make_tensor_value_info(tensor, kind, dims) for tensor, dims in (source, result)]
    graph = helper.make_graph(nodes, folder.name, infos[:1], infos[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    (folder / "1").mkdir(parents=True)
    onnx.save(model, folder / "1" / "model.onnx")
