"""Models that compute next to nothing, so that what is measured is serving: as ONNX for us, in Python for Triton."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import TensorProto, helper

OPSET, IR_VERSION = 17, 8
MAX_BATCH_SIZE = 8
PYTHON = Path(__file__).parent / "triton_pass.py"  # what all of them are for Triton


@dataclass(frozen=True)
class PassModel:
    """Answers with the elements of its input at every so-manyth place. Shapes are without the batch."""

    name: str
    source: Sequence[int]
    result: Sequence[int]

    def nodes(self) -> list[onnx.NodeProto]:
        """Return it as ONNX."""
        if self.source == self.result:
            return [helper.make_node("Identity", ["INPUT0"], ["OUTPUT0"])]
        steps = [size // kept for size, kept in zip(self.source, self.result, strict=True)]
        axes = range(1, 1 + len(steps))
        slices = {"starts": [0] * len(steps), "ends": self.source, "axes": axes, "steps": steps}
        constants = [helper.make_node("Constant", [], [name], value_ints=list(of)) for name, of in slices.items()]
        return [*constants, helper.make_node("Slice", ["INPUT0", *slices], ["OUTPUT0"])]


IDENTITY = PassModel("identity", (16,), (16,))
CORNER = PassModel("corner", (3, 224, 224), (3, 1, 1))  # an image's first pixel: 602 KB in, 12 bytes out
PASS_MODELS = (IDENTITY, CORNER)


def write_pass_models(repository: Path, models: Sequence[PassModel] = PASS_MODELS) -> None:
    """Write model.onnx and config.pbtxt of these models."""
    for model in models:
        infos = [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", *shape])
            for name, shape in (("INPUT0", model.source), ("OUTPUT0", model.result))
        ]
        graph = helper.make_graph(model.nodes(), model.name, infos[:1], infos[1:])
        onnx_model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
        (repository / model.name / "1").mkdir(parents=True)
        onnx.save(onnx_model, repository / model.name / "1" / "model.onnx")
        (repository / model.name / "config.pbtxt").write_text(_config(model))


def _config(model: PassModel) -> str:
    return (
        f'name: "{model.name}"\nplatform: "onnxruntime_onnx"\nmax_batch_size: {MAX_BATCH_SIZE}\n'
        f'input {{ name: "INPUT0" data_type: TYPE_FP32 dims: {list(model.source)} }}\n'
        f'output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: {list(model.result)} }}\n'
    )
