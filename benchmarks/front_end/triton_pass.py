"""The model.py, for Triton, of models that hand back their input, or every so-manyth element of it.

It is copied into a Triton repository and runs there, in an environment that has nothing of ours.
"""

import json

import numpy as np
import triton_python_backend_utils as backend  # pyright: ignore[reportMissingImports] - Triton's own


class TritonPythonModel:
    """One instance."""

    def initialize(self, arguments):
        """Read from the configuration how large the steps are; those of the batch are 1."""
        config = json.loads(arguments["model_config"])
        (source,), (result,) = config["input"], config["output"]
        self._input, self._output = source["name"], result["name"]
        steps = [int(size) // int(kept) for size, kept in zip(source["dims"], result["dims"], strict=True)]
        self._part = (slice(None), *(slice(None, None, step) for step in steps))

    def execute(self, requests):
        """Answer each request by itself."""
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        values = backend.get_input_tensor_by_name(request, self._input).as_numpy()
        return backend.InferenceResponse([backend.Tensor(self._output, np.ascontiguousarray(values[self._part]))])
