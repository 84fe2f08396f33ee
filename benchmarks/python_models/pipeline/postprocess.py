"""The model.py of the last step: logits to the best five labels and their probabilities. For both servers."""

from pathlib import Path

import numpy as np
import triton_python_backend_utils as backend  # pyright: ignore[reportMissingImports] - the server's own

BEST = 5


class TritonPythonModel:
    """LOGITS: [1, K] of FP32. LABELS and PROBABILITIES: [1, 5], the best first. labels.txt has the labels, by line."""

    def initialize(self, arguments):
        """Read the labels."""
        lines = Path(__file__).with_name("labels.txt").read_text().splitlines()
        self._labels = np.array([line.encode() for line in lines], dtype=object)

    def execute(self, requests):
        """Answer each request."""
        responses = []
        for request in requests:
            best, probabilities = ranked(backend.get_input_tensor_by_name(request, "LOGITS").as_numpy())
            labels = backend.Tensor("LABELS", self._labels[best])
            responses.append(backend.InferenceResponse([labels, backend.Tensor("PROBABILITIES", probabilities)]))
        return responses


def ranked(logits):
    """Return places of the best logits of each row, and their probabilities."""
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
    best = np.argsort(-probabilities, axis=1, kind="stable")[:, :BEST]
    return best, np.take_along_axis(probabilities, best, axis=1)
