"""A model of one node while a rule draws it: types its schema allows, shapes, and numbers that are often odd ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from onnx import TensorProto, defs, helper, numpy_helper

from benchmarks.fuzz.differential.numbers import Array, numbers

NEWEST_OPSET = 26  # of ONNX, that onnxruntime opens; its kernels know older ones
OLDEST_OPSET = 7
DOMAINS = {"": "", "ml": "ai.onnx.ml", "ms": "com.microsoft"}
_BASE_OPSET = 17  # of ONNX, beside operators of other domains
_IR_VERSION = 8  # before it was raised for newer operator sets
_NEWER_IR = {19: 9, 21: 10, 23: 11, 24: 12, 25: 12, 26: 13}
_ELEMENTS = {
    f"tensor({name})": dtype
    for name, dtype in {
        "float": "float32",
        "float16": "float16",
        "double": "float64",
        "bool": "bool",
        "string": "object",
        **{name: name for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")},
    }.items()
}
_WEIGHTS = {"float32": 6, "int64": 2, "int32": 2, "uint8": 2, "int8": 2, "object": 0.3, "float64": 0.5}


Kind = tuple[str, Sequence[int | str] | None]  # type and shape of an output, if that is known


class LeftOutError(Exception):
    """A draw that no model can be made of, or that is no fair question."""


@dataclass
class Draft:
    """One node, its inputs and constants. Raises LeftOutError where a draw turns out to be impossible."""

    operator: str
    domain: str
    opset: int  # of the node's domain
    random: np.random.Generator
    inputs: dict[str, Array] = field(default_factory=dict)
    constants: dict[str, Array] = field(default_factory=dict)
    node: Any = None
    batch: int = 0  # rows, if the first dimension of all inputs is symbolic
    relative: float = 2e-5  # tolerance of floats
    absolute: float = 1e-6
    of_largest: float = 0.0  # of the largest finite expected number: for sums

    @property
    def schema(self) -> Any:
        """The operator's definition in this operator set; None of operators that onnx does not have."""
        if not defs.has(self.operator, domain=self.domain):
            return None
        return defs.get_schema(self.operator, self.opset, self.domain)

    def chance(self, share: float) -> bool:
        """Whether something happens that does in such a share of drafts."""
        return bool(self.random.random() < share)

    def pick(self, *values: Any) -> Any:
        """One of these."""
        return values[int(self.random.integers(len(values)))]

    def whole(self, low: int, high: int) -> int:
        """A whole number in [low, high]."""
        return int(self.random.integers(low, high + 1))

    def type_of(self, parameter: str = "T", *wanted: str) -> str:
        """One of the types that the schema allows for a type parameter, out of `wanted` if any are given."""
        allowed = (
            next(
                (
                    [_ELEMENTS[name] for name in item.allowed_type_strs if name in _ELEMENTS]
                    for item in self.schema.type_constraints
                    if item.type_param_str == parameter
                ),
                [],
            )
            if self.schema
            else list(wanted)
        )
        allowed = [name for name in allowed if not wanted or name in wanted]
        if not allowed:
            raise LeftOutError("none of the types")
        weights = np.array([_WEIGHTS.get(name, 1) for name in allowed], float)
        return str(self.random.choice(allowed, p=weights / weights.sum()))

    def shape(
        self, least: int = 0, most: int = 4, sizes: Sequence[int] = (1, 1, 2, 3, 4, 5, 7), empty: float = 0.03
    ) -> list[int]:
        """A shape of so many axes; seldom one of them has no elements."""
        shape = [int(self.random.choice(sizes)) for _ in range(self.whole(least, most))]
        if shape and self.chance(empty):
            shape[self.whole(0, len(shape) - 1)] = 0
        return shape

    def like(self, shape: Sequence[int]) -> list[int]:
        """A shape that can be broadcast to another: with axes of one element, or without the first ones."""
        other = [1 if self.chance(0.3) else size for size in shape]
        return other[self.whole(0, len(other)) if self.chance(0.3) else 0 :]

    def axis(self, rank: int, first: int = 0) -> int:
        """An axis, counted from either end."""
        if rank <= first:
            raise LeftOutError("there is no axis")
        axis = self.whole(first, rank - 1)
        return axis - rank if self.chance(0.4) else axis

    def numbers(self, shape: Sequence[int], dtype: str, kind: str = "") -> Array:
        """Numbers of a type; `kind` as of `numbers.numbers`."""
        return numbers(self.random, shape, dtype, kind)

    def tensor(self, shape: Sequence[int], dtype: str, kind: str = "", constant: float = 0.15) -> str:
        """Add an input, or a constant in such a share of drafts; return its name."""
        return self.given(self.numbers(shape, dtype, kind), constant)

    def given(self, value: Any, constant: float = 0.15, dtype: str = "") -> str:
        """Add these numbers as an input, or a constant in such a share of drafts; return the name."""
        array = np.asarray(value, dtype or None)
        name = f"x{len(self.inputs) + len(self.constants)}"
        (self.constants if self.inputs and self.chance(constant) else self.inputs)[name] = array
        return name

    def weight(self, value: Any, dtype: str = "") -> str:
        """Add what models mostly have as a constant."""
        return self.given(value, 0.8, dtype)

    def finish(self, *inputs: str, outputs: int = 1, **attributes: Any) -> None:
        """Make the node."""
        given = list(inputs)
        while given and not given[-1]:
            given.pop()
        names = [f"y{number}" for number in range(outputs)]
        known = {name: value for name, value in attributes.items() if value is not None}
        self.node = helper.make_node(self.operator, given, names, domain=self.domain, **known)

    def sums(self, relative: float = 1e-4, of_largest: float = 1e-5) -> None:
        """Let answers differ as sums in another order do."""
        self.relative, self.of_largest = relative, of_largest

    def model(self, results: Mapping[str, Kind] | None = None) -> bytes:
        """Return the model's file; `results`: types and shapes of outputs, as far as they are known."""
        base = self.opset if not self.domain else _BASE_OPSET
        opsets = [helper.make_opsetid("", base)]
        if self.domain:
            opsets.append(helper.make_opsetid(self.domain, self.opset))
        inputs = [_declared(name, _element(value), self._open(value.shape)) for name, value in self.inputs.items()]
        outputs = [
            _declared(name, _NUMBERS[results[name][0]], results[name][1])
            if results and name in results
            else helper.make_empty_tensor_value_info(name)
            for name in self.node.output
        ]
        tensors = [numpy_helper.from_array(value, name) for name, value in self.constants.items()]
        graph = helper.make_graph([self.node], "one", inputs, outputs, tensors)
        newest = max((version for number, version in _NEWER_IR.items() if base >= number), default=_IR_VERSION)
        made: bytes = helper.make_model(graph, opset_imports=opsets, ir_version=newest).SerializeToString()
        return made

    def _open(self, shape: Sequence[int]) -> list[int | str]:
        return ["N", *shape[1:]] if self.batch else list(shape)


_NUMBERS = {dtype: getattr(TensorProto, name[7:-1].upper()) for name, dtype in _ELEMENTS.items()}


def _element(value: Array) -> int:
    return int(_NUMBERS[value.dtype.name])


def _declared(name: str, element: int, shape: Sequence[int | str] | None) -> Any:
    return helper.make_tensor_value_info(name, element, shape)
