"""Example models: true architectures with seeded random weights, written as ONNX files with a config.pbtxt."""

from gangway.zoo.catalog import DEFAULT_NAMES, MODELS, ZooModel, build
from gangway.zoo.cost import Counts, count
from gangway.zoo.repository import write_model

__all__ = ["DEFAULT_NAMES", "MODELS", "Counts", "ZooModel", "build", "count", "write_model"]
