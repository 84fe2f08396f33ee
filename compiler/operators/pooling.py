"""Pooling: windows, and means and maxima of the whole image."""

from dataclasses import replace

from gangway.compiler.graph import Node
from gangway.compiler.layers import Geometry, Program
from gangway.compiler.operators.registry import lowers
from gangway.compiler.operators.windows import window_of
from gangway.compiler.specs import GlobalPoolSpec, PoolSpec


@lowers("MaxPool", "AveragePool")
def pool(program: Program, node: Node) -> None:
    """Maximum or mean of a window."""
    image = program.geometry(node, node.inputs[0])
    height, width = node.attributes["kernel_shape"]
    window = window_of(node, image, (height, width))
    average = node.operator == "AveragePool"
    if window.dilation != (1, 1):
        raise node.unsupported(f"dilations {window.dilation}")
    if average and window.kernel == window.stride == (1, 1) and not any(window.pads):
        program.views[node.outputs[0]] = node.inputs[0]  # an adaptive pooling, exported where it has nothing to do
        return
    if average and window.kernel == (image.height, image.width) and not any(window.pads):
        program.add(node, global_pool(image), (node.inputs[0],))
        return
    spec = PoolSpec(
        "average" if average else "max",
        image.channels,
        image.height,
        image.width,
        window.kernel,
        window.stride,
        window.pads,
        average and bool(node.attributes.get("count_include_pad", 0)),
        window.ceil_pads,
    )
    program.add(node, spec, (node.inputs[0],))


@lowers("GlobalAveragePool")
def global_average_pool(program: Program, node: Node) -> None:
    """Mean over all pixels."""
    program.add(node, global_pool(program.geometry(node, node.inputs[0])), (node.inputs[0],))


@lowers("GlobalMaxPool")
def global_max_pool(program: Program, node: Node) -> None:
    """Maximum of all pixels."""
    spec = replace(global_pool(program.geometry(node, node.inputs[0])), mode="max")
    program.add(node, spec, (node.inputs[0],))


def global_pool(image: Geometry) -> GlobalPoolSpec:
    """The mean of all pixels."""
    return GlobalPoolSpec(image.channels, image.height, image.width)
