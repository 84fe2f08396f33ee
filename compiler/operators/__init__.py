"""ONNX operators, one small function each. Importing this package registers all of them."""

from gangway.compiler.operators import convolution, dense, elementwise, pooling, views
from gangway.compiler.operators.registry import lower

__all__ = ["convolution", "dense", "elementwise", "lower", "pooling", "views"]
