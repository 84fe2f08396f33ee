"""Why a model cannot be compiled. All errors carry a message for the model's owner."""


class ModelError(Exception):
    """The file is not a valid ONNX model: truncated, broken, or contradictory in its shapes."""


class UnreadableModelError(ModelError):
    """The file holds no ONNX graph at all: it is something else, truncated, or it changes while it is read."""


class UnsupportedModelError(ModelError):
    """A valid model that this compiler cannot compile; the message names node, operator and what is missing.

    `pipeline.compile_model` raises it only where onnxruntime cannot serve the model either.
    """


class CompilerMissingError(UnsupportedModelError):
    """Packages that compile a model are not installed."""


class MixedRowsError(UnsupportedModelError):
    """Rows of the model's batch influence each other, as its operators say: requests must not share a run."""


class OneEngineError(UnsupportedModelError):
    """A node that could be compiled, but not so that it always answers what onnxruntime answers."""
