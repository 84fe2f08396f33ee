"""The model.py of every model that Triton serves for us: its Python backend runs the ONNX file by onnxruntime.

It is copied into a Triton repository and runs there, in an environment that has nothing of ours.
"""

import json

import numpy as np
import onnxruntime
import triton_python_backend_utils as backend  # pyright: ignore[reportMissingImports] - Triton's own


class TritonPythonModel:
    """One instance: a session with so many threads, which spin if the configuration says so."""

    def initialize(self, arguments):
        """Load the model that the configuration names."""
        config = json.loads(arguments["model_config"])
        parameters = {name: value["string_value"] for name, value in config["parameters"].items()}
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = int(parameters["threads"])
        options.inter_op_num_threads = 1
        options.add_session_config_entry("session.intra_op.allow_spinning", parameters["spinning"])
        for name in filter(None, parameters["batch_dimensions"].split(",")):
            options.add_free_dimension_override_by_name(name, 1)
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(
            parameters["onnx_file"], options, providers=["CPUExecutionProvider"]
        )
        self._inputs = [node.name for node in self._session.get_inputs()]
        self._outputs = [node.name for node in self._session.get_outputs()]

    def execute(self, requests):
        """Answer the requests: several at once are a batch, which Triton's dynamic batching has made."""
        asked = [self._feeds(request) for request in requests]
        if len(asked) == 1:
            return [self._response(self._session.run(self._outputs, asked[0]))]
        feeds = {name: np.concatenate([one[name] for one in asked]) for name in self._inputs}
        begins = np.cumsum([len(one[self._inputs[0]]) for one in asked])[:-1]
        parts = [np.split(np.asarray(value), begins) for value in self._session.run(self._outputs, feeds)]
        return [self._response(values) for values in zip(*parts, strict=True)]

    def _feeds(self, request):
        return {name: backend.get_input_tensor_by_name(request, name).as_numpy() for name in self._inputs}

    def _response(self, values):
        tensors = [
            backend.Tensor(name, np.ascontiguousarray(value)) for name, value in zip(self._outputs, values, strict=True)
        ]
        return backend.InferenceResponse(tensors)
