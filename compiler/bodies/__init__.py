"""Operators that are defined here by simpler ones, since ONNX does not. Importing this package registers all bodies."""

from gangway.compiler.bodies import images, movements, normalisation, recurrent, selection, transposed
from gangway.compiler.bodies.base import own_body

__all__ = ["images", "movements", "normalisation", "own_body", "recurrent", "selection", "transposed"]
