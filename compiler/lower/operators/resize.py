"""Resize of the last two axes: whatever the mode, a sum of a few lines, each of a few columns. Samples at points."""

import math
from dataclasses import replace

import numpy as np

from gangway.compiler.frontend.graph import Node
from gangway.compiler.frontend.shape_inference import evaluate
from gangway.compiler.kernels.plain_specs import GridSampleSpec
from gangway.compiler.kernels.specs import Array, ResizeSpec, lines_kept
from gangway.compiler.lower.layers import Program, lowers

MOST_TAPS = 32  # each is code of its own
MOST_ENTRIES = 1 << 24  # of an axis' matrix, before most are found to be zero
ROI_OPSET = 11  # since when input 1 is a region, and scales are input 2


@lowers("Resize", "Upsample")
def resize(program: Program, node: Node) -> None:
    """An axis is a matrix, [length after][length before], nearly all of which are zeros: onnxruntime's own resized unit
    matrix.
    """
    kind, result = program.type(node.inputs[0]), program.type(node.outputs[0])
    rank = len(kind.shape)
    if kind.dtype != "float32" or rank < 2 or result.dtype != kind.dtype:
        raise node.unsupported(f"{kind.dtype}{list(kind.shape)} is no float32 image")
    if node.attributes.get("coordinate_transformation_mode", b"") == b"tf_crop_and_resize":
        raise node.unsupported("a region of interest")
    if node.attributes.get("keep_aspect_ratio_policy", b"stretch") != b"stretch":
        raise node.unsupported("its scales depend on each other")
    axes = [axis % rank for axis in node.attributes.get("axes", range(rank))]
    outer = [axis for axis in range(rank - 2) if kind.shape[axis] != result.shape[axis]]
    given = _given(program, node)
    factors = {axis: given[1][at] for at, axis in enumerate(axes)}
    if outer or (given[0] == "scales" and any(factors.get(axis, 1) != 1 for axis in range(rank - 2))):
        raise node.unsupported("other axes than the last two change")
    tables = {}
    for name, axis in (("row", rank - 2), ("column", rank - 1)):
        matrix = _matrix(program, node, kind.shape[axis], result.shape[axis], given[0], factors.get(axis))
        tables[f"{name}_places"], tables[f"{name}_weights"] = _taps(node, matrix)
    rows = tables["row_places"]
    spec = ResizeSpec(
        math.prod(kind.shape[:-2]),
        kind.shape[-2],
        kind.shape[-1],
        (result.shape[-2], result.shape[-1]),
        (rows.shape[1], tables["column_places"].shape[1]),
        lines_kept(rows),
    )
    program.add(node, spec, (node.inputs[0],), tables)


def _given(program: Program, node: Node) -> tuple[str, Array]:
    """Return whether scales or sizes are given, and what they are."""
    if program.graph.opset < ROI_OPSET:
        return "scales", program.constant(node, 1)
    for name, index in (("scales", 2), ("sizes", 3)):
        value = program.optional(node, index)
        if value is not None and value.size:
            return name, value
    raise node.unsupported("neither scales nor sizes")


def _matrix(program: Program, node: Node, before: int, after: int, name: str, factor: np.generic | None) -> Array:
    """Return what an axis of the result, [after], is made of, [after][before]."""
    if factor is None or (name == "scales" and factor == 1) or before == after == 1:
        if before != after:
            raise node.unsupported("an axis changes that has no scale")
        return np.eye(before, dtype=np.float32)
    if before * max(before, after) > MOST_ENTRIES:
        raise node.unsupported(f"an axis of {before} numbers becomes one of {after}")
    vector = np.array([1, 1, factor, 1], np.float32) if name == "scales" else np.array([1, 1, after, before])
    inputs: dict[str, Array] = {"x": np.eye(before, dtype=np.float32)[None, None], name: vector}
    names: tuple[str, ...] = ("x", name)
    if program.graph.opset >= ROI_OPSET:  # some of those operator sets want all inputs, though empty
        inputs |= {empty: np.zeros(0, np.float32) for empty in ("roi", "scales") if empty != name}
        names = ("x", "roi", "scales", *(["sizes"] if name == "sizes" else []))
    attributes = {key: value for key, value in node.attributes.items() if key != "axes"}
    probe = replace(node, inputs=names, outputs=("y",), attributes=attributes)
    matrix: Array = evaluate(probe, inputs, program.graph.opset)["y"]
    if matrix.shape != (1, 1, after, before):
        raise node.unsupported(f"onnxruntime makes {matrix.shape[2]} of an axis' {before} numbers, not {after}")
    plane: Array = matrix[0, 0]
    return plane


def _taps(node: Node, matrix: Array) -> tuple[Array, Array]:
    """Return places and weights, [length][taps] each, ascending. A number that has fewer taps has its last one in
    several parts.
    """
    found = matrix != 0
    counts = found.sum(axis=1)
    most = int(counts.max())
    if counts.min() < 1 or most > MOST_TAPS or not np.isfinite(matrix).all():
        raise node.unsupported(f"sums of {counts.min()} to {most} numbers")
    order = np.argsort(~found, axis=1, kind="stable")[:, :most]
    weights = np.take_along_axis(matrix, order, 1)
    last = (counts - 1)[:, None]
    missing = np.arange(most) > last
    places = np.where(missing, np.take_along_axis(order, last, 1), order)
    parts = np.take_along_axis(weights, last, 1) / (most - last)
    weights = np.where(np.arange(most) >= last, parts, weights)
    if most == 1 and (weights != 1).any():
        raise node.unsupported("numbers are scaled")
    return places, weights.astype(np.float32)


@lowers("GridSample")
def grid_sample(program: Program, node: Node) -> None:
    """Bilinear, with zeros around an image; onnxruntime has the other kinds."""
    kind, grid = (program.type(name) for name in node.inputs)
    mode, padding = node.attributes.get("mode", b"linear"), node.attributes.get("padding_mode", b"zeros")
    if mode not in (b"bilinear", b"linear") or padding != b"zeros":
        raise node.unsupported(f"mode {mode.decode()}, padding_mode {padding.decode()}")
    if kind.dtype != "float32" or grid.dtype != "float32" or len(kind.shape) != 4:
        raise node.unsupported(f"an input {kind.dtype}{list(kind.shape)}")
    points, corners = math.prod(grid.shape[1:3]), bool(node.attributes.get("align_corners", 0))
    images, channels, height, width = kind.shape
    program.add(node, GridSampleSpec(images, channels, height, width, points, corners), node.inputs)
