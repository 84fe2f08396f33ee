"""The model.py of a model that does nothing: what a server adds to a Python model. For both servers."""

import triton_python_backend_utils as backend  # pyright: ignore[reportMissingImports] - the server's own


class TritonPythonModel:
    """Y is X: [16] of FP32."""

    def execute(self, requests):
        """Answer each request."""
        return [backend.InferenceResponse([backend.Tensor("Y", _input(request))]) for request in requests]


def _input(request):
    return backend.get_input_tensor_by_name(request, "X").as_numpy()
