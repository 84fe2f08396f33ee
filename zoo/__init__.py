"""Example models: true architectures with seeded random weights, written as ONNX files with a config.pbtxt."""

from gangway.zoo.repository import MODELS, NAMES, ZooModel, write_model

__all__ = ["MODELS", "NAMES", "ZooModel", "write_model"]
