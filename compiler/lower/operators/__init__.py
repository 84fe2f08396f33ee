"""ONNX operators, one small function each. Importing this package registers all of them."""

from gangway.compiler.lower.operators import dense, elementwise, images, movements, pointwise
from gangway.compiler.lower.operators.registry import has_lowering, lower, refusal

__all__ = ["dense", "elementwise", "has_lowering", "images", "lower", "movements", "pointwise", "refusal"]
