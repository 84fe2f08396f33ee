"""Inputs and outputs of a model as clients see them: types, shapes, and the shapes of one request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

from gangway.artifact.format import ITEM_BYTES, TensorSpec
from gangway.protos.model_config_pb2 import DataType, ModelConfig, ModelInput, ModelOutput


def datatype_name(data_type: int) -> str:
    """Return the protocol's name of an element type: TYPE_FP32 is "FP32"."""
    return "BYTES" if data_type == DataType.TYPE_STRING else DataType.Name(data_type).removeprefix("TYPE_")


def datatype_value(name: str) -> DataType:
    """Return the config's element type for the protocol's name."""
    return cast("DataType", DataType.Value("TYPE_STRING" if name == "BYTES" else f"TYPE_{name}"))


def item_bytes(datatype: str) -> int:
    """Return the size of one element, 0 for strings."""
    return ITEM_BYTES[datatype]


@dataclass(frozen=True)
class Tensor:
    """An input or output as clients see it. `index` is its place in the model, -1 in `shape` is any size.

    `symbols` names the dimensions that are any size, if it is not empty; those of one name must be equal.
    `own_shape`: the model's, if the config has the server reshape the tensor; () of a scalar. `optional`: a request may
    leave it out.
    `value_symbol`, `example_texts`: as in TensorSpec.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    index: int
    symbols: tuple[str, ...] = ()
    own_shape: tuple[int, ...] | None = None
    optional: bool = False
    value_symbol: str = ""
    example_texts: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def of(cls, tensor: ModelInput | ModelOutput, batch: bool, spec: TensorSpec, index: int) -> "Tensor":
        """Return the tensor of a config; `batch`: its dims leave out the batch dimension."""
        shape = (-1, *tensor.dims) if batch else tuple(tensor.dims)
        own_shape = spec.shape if tensor.HasField("reshape") or not spec.shape else None
        symbols = () if own_shape else spec.symbols
        datatype = datatype_name(tensor.data_type)
        shown = (spec.optional, spec.value_symbol, spec.example_texts)
        return cls(tensor.name, datatype, shape, index, symbols, own_shape, *shown)

    def may_have(self, shape: Sequence[int], least_rows: int) -> bool:
        """Whether a tensor may have this shape. Symbolic dimensions may be 0, the first one `least_rows` at least.

        A scalar may also be [] or [1], as Triton's clients send it, which has no scalars.
        """
        if self.own_shape == () and tuple(shape) in ((), (1,)):
            return True
        least = [0 if axis else least_rows for axis in range(len(self.shape))]
        return len(shape) == len(self.shape) and all(
            size >= at_least if expected == -1 else size == expected
            for size, expected, at_least in zip(shape, self.shape, least, strict=True)
        )

    def model_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape that the model gets from a client's."""
        return tuple(shape) if self.own_shape is None else _with_sizes(self.own_shape, self.shape, shape)

    def client_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape that a client gets from the model's.

        An output whose rank nobody knows is declared as a scalar.
        """
        if self.own_shape is None or (self.own_shape == () and len(shape)):
            return tuple(shape)
        return _with_sizes(self.shape, self.own_shape, shape)

    def known_shape(self, sizes: Mapping[str, int], rows: int | None) -> tuple[int, ...] | None:
        """Return the shape for these sizes of symbols and this batch (None: no batch); None if that does not tell."""
        shape = []
        for axis, size in enumerate(self.shape):
            symbol = self.symbols[axis] if self.symbols else ""
            known = size if size >= 0 else rows if axis == 0 and rows is not None else sizes.get(symbol)
            if known is None:
                return None
            shape.append(known)
        return tuple(shape)


def _with_sizes(shape: tuple[int, ...], declared: tuple[int, ...], sizes: Sequence[int]) -> tuple[int, ...]:
    """Return a shape whose dimensions of any size have those that the other shape, as it is `declared`, has there."""
    given = (size for expected, size in zip(declared, sizes, strict=False) if expected == -1)
    return tuple(next(given, -1) if size == -1 else size for size in shape)


@dataclass(frozen=True)
class Shapes:
    """The shapes of one request: rows of the batch, each input's as the client has it, sizes of named dimensions.

    `is_empty`: it has no row; `rows` is 1 even so, for what counts and computes them. `whole_rows`: of a batch that is
    computed in one piece, where `rows` is 1.
    """

    rows: int
    inputs: tuple[tuple[Tensor, tuple[int, ...]], ...]
    sizes: Mapping[str, int]
    is_empty: bool = False
    whole_rows: int = 1

    @cached_property
    def counted_rows(self) -> int:
        """The inferences that statistics count."""
        return max(self.rows, self.whole_rows)


def spec_of(tensor: ModelInput | ModelOutput, config: ModelConfig) -> TensorSpec:
    """Return what a configuration says of a tensor of a model that is not compiled."""
    dims = tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims
    shape = (-1, *dims) if config.max_batch_size > 0 else tuple(dims)
    optional = isinstance(tensor, ModelInput) and tensor.optional
    return TensorSpec(tensor.name, datatype_name(tensor.data_type), shape, 0, optional=optional)
