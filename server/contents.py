"""The contents of a request's inputs, wherever they are: in the message, in its header, in regions of shared memory."""

import math
from collections.abc import Mapping, Sequence

import grpc

from gangway.executor.frames import split_strings
from gangway.server.calls import Content, Contents
from gangway.server.errors import RequestError, invalid
from gangway.server.models import item_bytes
from gangway.server.region_ranges import RegionPart, RegionRange
from gangway.server.regions import Region
from gangway.server.tensor import Tensor

MAX_REGION_BYTES = 256 << 20  # of all inputs of a request: as much as one message may have

Inputs = Sequence[tuple[Tensor, tuple[int, ...]]]  # in the request's order, with the shapes that it gives them
Sources = Sequence[RegionRange | None]  # where they are, in the same order; None: in the message


def check_contents(tensor: Tensor, shape: tuple[int, ...], content: Content, model: str) -> None:
    """Raise RequestError (INVALID_ARGUMENT) unless the contents are as large as the shape says."""
    if tensor.datatype == "BYTES":
        assert not isinstance(content, RegionPart), "strings are read before they are checked"
        try:
            split_strings(content, math.prod(shape))
        except ValueError as error:
            invalid(f"input '{tensor.name}' for model '{model}': {error}")
        return
    expected = math.prod(shape) * item_bytes(tensor.datatype)
    if len(content) != expected:
        invalid(
            f"input byte size mismatch for input '{tensor.name}' for model '{model}'."
            f" Expected {expected}, got {len(content)}"
        )


def raw_contents(inputs: Inputs, raws: Contents, model: str) -> Contents:
    """Return the contents of inputs that are all in the message, checked. Raises RequestError."""
    _check_count(len(raws), len(inputs), model)
    for (tensor, shape), raw in zip(inputs, raws, strict=True):
        check_contents(tensor, shape, raw, model)
    return raws


def mixed_contents(
    inputs: Inputs, sources: Sources, others: Contents, regions: Mapping[str, Region], model: str
) -> Contents:
    """Return the contents of inputs, checked; those that have no source are `others`, in their order.

    Raises RequestError.
    """
    _check_count(len(others), sum(source is None for source in sources), model)
    rest = iter(others)
    contents: list[Content] = []
    for (tensor, shape), source in zip(inputs, sources, strict=True):
        content = next(rest) if source is None else _from_region(source, tensor, regions)
        check_contents(tensor, shape, content, model)
        contents.append(content)
    return contents


def check_sources(sources: Sources, model: str) -> None:
    """Raise RequestError (RESOURCE_EXHAUSTED) for more than a message may have: a request shall not take all memory."""
    size_bytes = sum(source.size_bytes for source in sources if source is not None)
    if size_bytes > MAX_REGION_BYTES:
        message = f"inputs of {size_bytes} bytes for model '{model}', {MAX_REGION_BYTES} are possible"
        raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, message)


def _from_region(source: RegionRange, tensor: Tensor, regions: Mapping[str, Region]) -> Content:
    """Strings are looked into before they are used, so the client must not be able to change them in between."""
    part = source.within(regions)
    return part.read() if tensor.datatype == "BYTES" else part


def _check_count(count: int, expected: int, model: str) -> None:
    if count != expected:
        invalid(f"expected {expected} raw_input_contents but got {count} for model '{model}'")
