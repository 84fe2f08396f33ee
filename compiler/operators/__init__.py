"""ONNX operators, one small function each. Importing this package registers all of them."""

from gangway.compiler.operators import (
    activations,
    attention,
    convolution,
    dense,
    elementwise,
    gather,
    normalisation,
    pointwise,
    pooling,
    quantisation,
    reductions,
    remaps,
    scatter,
    shapes,
    views,
)
from gangway.compiler.operators.registry import has_lowering, lower, refusal

__all__ = [
    "activations",
    "attention",
    "convolution",
    "dense",
    "elementwise",
    "gather",
    "has_lowering",
    "lower",
    "normalisation",
    "pointwise",
    "pooling",
    "quantisation",
    "reductions",
    "refusal",
    "remaps",
    "scatter",
    "shapes",
    "views",
]
