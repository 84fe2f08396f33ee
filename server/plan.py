"""From a request's header to what is to be done: everything that can be wrong with a request is found here.

The order of the checks and, where clients may depend on them, the texts of the messages are Triton's.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gangway.protos import grpc_service_pb2 as pb
from gangway.server.errors import invalid, unsupported
from gangway.server.models import Models, ServedModel, Tensor
from gangway.server.response import ResponseTemplate
from gangway.server.typed_contents import to_bytes
from google.protobuf.message import DecodeError

MAX_CACHED_PLANS = 1024
MAX_CACHED_HEADER_BYTES = 4096

SEQUENCE_PARAMETERS = ("sequence_id", "sequence_start", "sequence_end")
MAX_INT64 = 2**63 - 1

InputTensor = pb.ModelInferRequest.InferInputTensor
OutputTensor = pb.ModelInferRequest.InferRequestedOutputTensor


@dataclass(frozen=True)
class Plan:
    """A checked request. `inputs` are in the request's order, `typed` their contents if these came in the header."""

    model: ServedModel
    rows: int
    inputs: tuple[Tensor, ...]
    typed: tuple[bytes, ...] | None
    response: ResponseTemplate
    timeout_us: int  # 0: none
    priority: int

    def contents(self, raws: list[memoryview]) -> Iterable[bytes | memoryview]:
        """Return the bytes of each input, their sizes checked. Raises RequestError."""
        if self.typed is not None:
            return self.typed
        name = self.model.name
        if len(raws) != len(self.inputs):
            invalid(f"expected {len(self.inputs)} raw_input_contents but got {len(raws)} for model '{name}'")
        for tensor, raw in zip(self.inputs, raws, strict=True):
            expected = self.rows * tensor.row_bytes
            if len(raw) != expected:
                invalid(
                    f"input byte size mismatch for input '{tensor.name}' for model '{name}'."
                    f" Expected {expected}, got {len(raw)}"
                )
        return raws


class Planner:
    """Plans for one set of models. Equal headers (a client's requests differ only in id and tensors) are read once."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self._plans: dict[tuple[bytes, bool], Plan] = {}

    def plan(self, header: bytes, has_raws: bool) -> Plan:
        """Return what the header asks for. Raises RequestError."""
        plan = self._plans.get((header, has_raws))
        if plan is None:
            plan = make_plan(self.models, header, has_raws)
            if plan.typed is None and len(header) <= MAX_CACHED_HEADER_BYTES:
                if len(self._plans) >= MAX_CACHED_PLANS:
                    self._plans.clear()
                self._plans[header, has_raws] = plan
        return plan


def make_plan(models: Models, header: bytes, has_raws: bool) -> Plan:
    """Check a header. `has_raws`: the request has raw_input_contents, so typed contents are refused."""
    try:
        request = pb.ModelInferRequest.FromString(header)
    except DecodeError as error:
        invalid(f"the request is not a ModelInferRequest: {error}")
    model = models.find(request.model_name, request.model_version)
    for parameter in SEQUENCE_PARAMETERS:
        if parameter in request.parameters:
            invalid(f"model '{model.name}' keeps no state between requests: parameter '{parameter}' is not supported")
    timeout_us = _count(request, "timeout", model)
    priority = _count(request, "priority", model)
    inputs = _named_inputs(request, model)
    rows = _rows(inputs, model)
    typed = None if has_raws else _typed(inputs, rows, model)
    if has_raws and any(given.HasField("contents") for given, _ in inputs):
        name = next(given.name for given, _ in inputs if given.HasField("contents"))
        invalid(
            f"contents field must not be specified when using raw_input_contents for '{name}' for model '{model.name}'"
        )
    outputs = _requested_outputs(request, model)
    response = ResponseTemplate.of(model, outputs, rows)
    return Plan(model, rows, tuple(tensor for _, tensor in inputs), typed, response, timeout_us, priority)


def _count(request: pb.ModelInferRequest, name: str, model: ServedModel) -> int:
    """Return a request parameter that is a number, 0 without it."""
    if name not in request.parameters:
        return 0
    choice = request.parameters[name].WhichOneof("parameter_choice")
    if choice not in ("int64_param", "uint64_param"):
        invalid(f"parameter '{name}' for model '{model.name}': expected int64_param, got {choice}")
    value = int(getattr(request.parameters[name], choice))
    if not 0 <= value <= MAX_INT64:
        invalid(f"parameter '{name}' for model '{model.name}': expected 0 to {MAX_INT64}, got {value}")
    return value


def _named_inputs(request: pb.ModelInferRequest, model: ServedModel) -> list[tuple[InputTensor, Tensor]]:
    """Pair each tensor of the request with the model's."""
    pairs: dict[str, tuple[InputTensor, Tensor]] = {}
    for given in request.inputs:
        tensor = model.inputs.get(given.name)
        if tensor is None:
            expected = ", ".join(f"'{name}'" for name in model.inputs)
            invalid(f"unexpected inference input '{given.name}' for model '{model.name}'. Expected input(s) {expected}")
        if given.name in pairs:
            invalid(f"input '{given.name}' for model '{model.name}' is given twice")
        _refuse_parameters(given, f"input '{given.name}' for model '{model.name}'")
        pairs[given.name] = (given, tensor)
    if len(pairs) < len(model.inputs):
        missing = [name for name in model.inputs if name not in pairs]
        invalid(
            f"expected {len(model.inputs)} inputs but got {len(pairs)} inputs for model '{model.name}'."
            f" Got input(s) {list(pairs)}, but missing required input(s) {missing}."
            " Please provide all required input(s)."
        )
    return list(pairs.values())


def _refuse_parameters(given: InputTensor | OutputTensor, where: str) -> None:
    for parameter in given.parameters:
        if parameter.startswith("shared_memory_"):
            unsupported(f"{where}: shared memory is not supported by this server")
        if parameter == "classification":
            unsupported(f"{where}: the classification extension is not supported by this server")


def _rows(inputs: list[tuple[InputTensor, Tensor]], model: ServedModel) -> int:
    """Check types and shapes; return the number of rows, which all inputs share."""
    rows = 0
    for given, tensor in inputs:
        if given.datatype != tensor.datatype:
            invalid(
                f"inference input '{tensor.name}' data-type is '{given.datatype}', but model '{model.name}'"
                f" expects '{tensor.datatype}'"
            )
        shape = list(given.shape)
        fits = len(shape) == len(tensor.shape) and all(
            size > 0 if expected == -1 else size == expected for size, expected in zip(shape, tensor.shape, strict=True)
        )
        if not fits:
            invalid(
                f"unexpected shape for input '{tensor.name}' for model '{model.name}'."
                f" Expected {list(tensor.shape)}, got {shape}"
            )
        if not model.batched:
            continue
        if shape[0] > model.max_rows:
            invalid(f"inference request batch-size must be <= {model.max_rows} for '{model.name}', got {shape[0]}")
        if rows not in (0, shape[0]):
            invalid(
                f"input '{tensor.name}' batch size does not match other inputs for '{model.name}'."
                f" Expected {rows}, got {shape[0]}"
            )
        rows = shape[0]
    return rows or 1


def _typed(inputs: list[tuple[InputTensor, Tensor]], rows: int, model: ServedModel) -> tuple[bytes, ...]:
    contents = []
    for given, tensor in inputs:
        elements = math.prod(given.shape)
        contents.append(to_bytes(given.contents, tensor.name, tensor.datatype, elements, model.name))
        if len(contents[-1]) != rows * tensor.row_bytes:
            invalid(
                f"input byte size mismatch for input '{tensor.name}' for model '{model.name}'."
                f" Expected {rows * tensor.row_bytes}, got {len(contents[-1])}"
            )
    return tuple(contents)


def _requested_outputs(request: pb.ModelInferRequest, model: ServedModel) -> list[Tensor]:
    """Return the outputs that are asked for, in that order; all of the model's if none is."""
    wanted: dict[str, Tensor] = {}
    for output in request.outputs:
        if output.name not in model.outputs:
            expected = ", ".join(f"'{name}'" for name in model.outputs)
            invalid(
                f"unexpected inference output '{output.name}' for model '{model.name}'. Expected output(s) {expected}"
            )
        if output.name in wanted:
            invalid(f"output '{output.name}' for model '{model.name}' is requested twice")
        _refuse_parameters(output, f"output '{output.name}' for model '{model.name}'")
        wanted[output.name] = model.outputs[output.name]
    return list(wanted.values()) or list(model.outputs.values())
