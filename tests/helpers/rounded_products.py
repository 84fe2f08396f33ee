"""A model that onnxruntime answers otherwise than kernels: it may round the activations of a product to 8 bits."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

DEPTH, WIDTH, BLOCK = 96, 40, 32


def save_rounded(path: Path, sizes: Sequence[int | str], rounds: bool = True) -> Path:
    """Write it; `sizes` of its first dimensions. `rounds`: it lets onnxruntime round."""
    random = np.random.default_rng(12)
    blocks = DEPTH // BLOCK
    constants = {
        "q": random.integers(0, 256, (WIDTH, blocks, BLOCK // 2)).astype(np.uint8),
        "s": random.uniform(0.01, 0.1, WIDTH * blocks).astype(np.float32),
    }
    product = helper.make_node(
        "MatMulNBits", ["x", "q", "s"], ["y"], domain="com.microsoft", K=DEPTH, N=WIDTH, bits=4, block_size=BLOCK,
        accuracy_level=4 if rounds else 0,
    )  # fmt: skip
    graph = helper.make_graph(
        [product],
        "rounded",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [*sizes, DEPTH])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [*sizes, WIDTH])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(helper.make_model(graph, opset_imports=imports, ir_version=8), path)
    return path
