"""Repositories as people bring them from Triton: one model for each kind of trouble, and what is to be said of it."""

from collections.abc import Callable, Mapping
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from tests.helpers import ensemble_configs

MOVES, CHANGES, CANNOT = "moves", "moves with changes", "cannot move"
TENSORS = 'input { name: "x" data_type: TYPE_FP32 dims: [ 4 ] } output { name: "y" data_type: TYPE_FP32 dims: [ 4 ] }'
ONNX = f'platform: "onnxruntime_onnx" max_batch_size: 8 {TENSORS}'


def model(rows: int | str = "N", operator: str = "Relu", domain: str = "") -> bytes:
    """y = operator(x), four columns."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [rows, 4]) for name in "xy")
    graph = helper.make_graph([helper.make_node(operator, ["x"], ["y"], domain=domain)], "graph", [x], [y])
    opsets = [helper.make_opsetid("", 17)] + ([helper.make_opsetid(domain, 1)] if domain else [])
    made: onnx.ModelProto = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    return bytes(made.SerializeToString())


def with_weights_in(file: str) -> bytes:
    """y = x + weights, which lie in a file that is not there."""
    made = onnx.load_from_string(model(operator="Identity"))
    made.graph.node[0].CopyFrom(helper.make_node("Add", ["x", "weights"], ["y"]))
    weights = TensorProto(name="weights", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", file), ("offset", "0"), ("length", "16")):
        weights.external_data.add(key=key, value=value)
    made.graph.initializer.append(weights)
    return bytes(made.SerializeToString())


def _write(folder: Path, config: str | None, path: str = "1/model.onnx", content: bytes = b"") -> None:
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content or model())
    if config is not None:
        (folder / "config.pbtxt").write_text(config)


MODEL_PY = b"""import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor("y", np.maximum(pb_utils.get_input_tensor_by_name(each, "x").as_numpy(), 0))]
            )
            for each in requests
        ]
"""
Write = Callable[[Path], None]


def _with(config: str | None, path: str = "1/model.onnx", content: bytes = b"") -> Write:
    return lambda folder: _write(folder, config, path, content)


def _loose(folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.with_suffix(".onnx").write_bytes(model())


def _ensemble(*members: str) -> Write:
    def write(folder: Path) -> None:
        names = ["a", *(f"t{number}" for number in range(1, len(members))), "b"]
        steps = [(member, f"x={names[number]}", f"y={names[number + 1]}") for number, member in enumerate(members)]
        ensemble_configs.write(
            folder.parent, folder.name, ensemble_configs.config_of("a:FP32:4", "b:FP32:4", steps, batch=8)
        )

    return write


KINDS: Mapping[str, tuple[str, Write]] = {
    "no_config": (MOVES, _with(None)),
    "for_gpus": (
        MOVES,
        _with(
            f"{ONNX} instance_group {{ kind: KIND_GPU gpus: [ 0 ] }} optimization {{ execution_accelerators {{"
            ' gpu_execution_accelerator { name: "tensorrt" } } }'
        ),
    ),
    "openvino": (MOVES, _with(f'backend: "openvino" max_batch_size: 8 {TENSORS}')),
    "batches": (MOVES, _with(f"{ONNX} dynamic_batching {{ max_queue_delay_microseconds: 100 }}")),
    "python": (MOVES, _with(f'backend: "python" max_batch_size: 8 {TENSORS}', "1/model.py", MODEL_PY)),
    "code_alone": (
        MOVES,
        _with(
            f'max_batch_size: 8 {TENSORS} parameters {{ key: "qos-ms" value {{ string_value: "own" }} }}',
            "1/model.py",
            MODEL_PY,
        ),
    ),
    "impossible": (MOVES, _with(f'{ONNX} parameters {{ key: "qos_ms" value {{ string_value: "0.01" }} }}')),
    "pipeline": (MOVES, _ensemble("for_gpus", "batches", "python")),
    "copied_folder": (CHANGES, _with(f'name: "original" {ONNX}')),
    "fixed_batch": (CHANGES, _with(f"{ONNX} dynamic_batching {{ }}", content=model(1))),
    "batch_in_dims": (CHANGES, _with(ONNX.replace("dims: [ 4 ]", "dims: [ -1, 4 ]"))),
    "other_type": (CHANGES, _with(ONNX.replace("TYPE_FP32", "TYPE_FP16", 1))),
    "preferred": (CHANGES, _with(f"{ONNX} dynamic_batching {{ preferred_batch_size: [ 4, 16 ] }}")),
    "misspelt": (CHANGES, _with(f'{ONNX} parameters {{ key: "qos-ms" value {{ string_value: "15" }} }}')),
    "decoupled": (CHANGES, _with(f"{ONNX} model_transaction_policy {{ decoupled: true }}")),
    "other_filename": (CHANGES, _with(ONNX, "1/network.onnx")),
    "no_version": (CHANGES, _with(ONNX, "network.onnx")),
    "loose_file": (CHANGES, _loose),
    "pipeline_of_changed": (MOVES, _ensemble("copied_folder", "no_version")),
    "tensorrt": (CANNOT, _with('platform: "tensorrt_plan" max_batch_size: 8', "1/model.plan", b"plan")),
    "torchscript": (CANNOT, _with('backend: "pytorch" max_batch_size: 8', "1/model.pt", b"script")),
    "ragged": (CANNOT, _with(ONNX.replace("dims: [ 4 ]", "dims: [ 4 ] allow_ragged_batch: true", 1))),
    "own_operator": (CANNOT, _with(ONNX, content=model(operator="Mine", domain="mine.org"))),
    "no_text": (CANNOT, _with("max_batch_size: eight")),
    "no_weights": (CANNOT, _with(None, content=with_weights_in("weights.bin"))),
    "no_sample": (
        CANNOT,
        _with(
            f'{ONNX} model_warmup {{ name: "w" batch_size: 1 inputs {{ key: "x" value {{ data_type: TYPE_FP32'
            ' dims: [ 4 ] input_data_file: "absent" } } }'
        ),
    ),
    "pipeline_of_none": (CANNOT, _ensemble("tensorrt", "no_config")),
}
"""By name: the verdict, and what writes the model into its folder."""


def write_all(repository: Path) -> Path:
    """Write a model of each kind."""
    for name, (_, write) in KINDS.items():
        write(repository / name)
    return repository
