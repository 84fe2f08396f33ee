"""Models that Triton's client examples name and the zoo does not have: as small as can be, right in shape only."""

from pathlib import Path

import onnx
from onnx import TensorProto, helper

OPSET, IR_VERSION = 17, 8
PHOTO, SCORES = [299, 299, 3], "InceptionV3/Predictions/Softmax"


def write_photo_model(repository: Path, name: str) -> None:
    """`grpc_client.py` sends a picture of [1, 299, 299, 3]: answer with the probabilities of its channels."""
    nodes = [
        helper.make_node("ReduceMean", ["input"], ["means"], axes=[1, 2], keepdims=0),
        helper.make_node("Softmax", ["means"], [SCORES], axis=1),
    ]
    _write(repository / name, nodes, ("input", PHOTO), (SCORES, PHOTO[-1:]), TensorProto.FLOAT)


def write_integer_identity(repository: Path, name: str) -> None:
    """`memory_growth_test.py` wants its 16 numbers back."""
    nodes = [helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])]
    _write(repository / name, nodes, ("INPUT0", [16]), ("OUTPUT0", [16]), TensorProto.INT32)


def _write(
    folder: Path, nodes: list[object], source: tuple[str, list[int]], result: tuple[str, list[int]], kind: int
) -> None:
    infos = [helper.make_tensor_value_info(tensor, kind, ["N", *dims]) for tensor, dims in (source, result)]
    graph = helper.make_graph(nodes, folder.name, infos[:1], infos[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
    (folder / "1").mkdir(parents=True)
    onnx.save(model, folder / "1" / "model.onnx")
