"""The table of ONNX operators that have layers of their own, one small function each."""

from gangway.compiler.lower.layers import LOWERINGS
from gangway.compiler.lower.operators import (
    dense,
    elementwise,
    images,
    movements,
    quantised,
    recurrent,
    resize,
    top,
    trees,
)

__all__ = [
    "LOWERINGS",
    "dense",
    "elementwise",
    "images",
    "movements",
    "quantised",
    "recurrent",
    "resize",
    "top",
    "trees",
]
