"""The value of an ONNX node all of whose inputs are constants."""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from gangway.compiler.errors import ModelError
from gangway.compiler.graph import Node
from gangway.compiler.specs import Array


def evaluate(node: Node, constants: Mapping[str, Array]) -> dict[str, Array]:
    """Return the outputs of a node whose inputs are all constant. Raises ModelError if it cannot be computed."""
    from onnx import helper  # noqa: PLC0415
    from onnx.reference import ReferenceEvaluator  # noqa: PLC0415 - most models have nothing to fold

    proto = helper.make_node(node.operator, node.inputs, node.outputs, **node.attributes)
    feeds = {name: constants[name] for name in node.inputs if name}
    try:
        values = cast(list[Any], ReferenceEvaluator(proto).run(None, feeds))
    except Exception as error:  # whatever numpy raises on hostile shapes
        raise ModelError(f"node '{node.name}' ({node.operator}) of constants: {error}") from error
    return {name: np.asarray(value) for name, value in zip(node.outputs, values, strict=True)}
