"""ONNX operators, one small function each. Importing this package registers all of them."""

from gangway.compiler.operators import (
    activations,
    convolution,
    dense,
    elementwise,
    normalisation,
    pooling,
    shapes,
    views,
)
from gangway.compiler.operators.registry import has_lowering, lower, refusal

__all__ = [
    "activations",
    "convolution",
    "dense",
    "elementwise",
    "has_lowering",
    "lower",
    "normalisation",
    "pooling",
    "refusal",
    "shapes",
    "views",
]
