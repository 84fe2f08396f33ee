"""The base of all specs, activation functions as data, and the plans that templates make of specs."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, Self

import numpy.typing as npt

# Activation functions as data: what a kernel applies to each number before it is stored. Nothing here imports TVM.

ActivationName = Literal[
    "none",
    "clip",
    "leaky_relu",
    "sigmoid",
    "swish",
    "hard_sigmoid",
    "hard_swish",
    "tanh",
    "erf",
    "gelu",
    "gelu_tanh",
    "elu",
    "mish",
    "softplus",
    "quantise_int8",
    "quantise_uint8",
]


@dataclass(frozen=True)
class Activation:
    """A function of one number and two parameters; those that a function does not use are 0.

    none: x; clip: min(max(x, alpha), beta); leaky_relu: x if x >= 0 else alpha x; sigmoid: 1 / (1 + exp(-x)); swish: x
    sigmoid(x); hard_sigmoid: min(max(alpha x + beta, 0), 1); hard_swish: x hard_sigmoid(x); tanh; erf; gelu: x (1 +
    erf(x / sqrt 2)) / 2; gelu_tanh: x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2; elu: x if x > 0 else alpha
    (exp(x) - 1); softplus: log(1 + exp(x)); mish: x tanh(softplus(x)); quantise_int8, quantise_uint8:
    what is left of x once it was an integer of this type, of scale alpha and zero point beta.
    """

    name: ActivationName
    alpha: float = 0.0
    beta: float = 0.0


NONE: Final = Activation("none")
RELU: Final = Activation("clip", 0.0, math.inf)
RELU6: Final = Activation("clip", 0.0, 6.0)


Array = npt.NDArray[Any]
MOST_LANES = 16  # of any target

PackedWeights = tuple[Array, ...]  # in argument order, ready for weights.bin
Check = Literal["index", "zero", "least"]
"""Which number a kernel refuses: an index out of range, a divisor of 0, the least integer divided by -1."""

RawWeights = Mapping[str, Array]  # by the names that the spec states, as ONNX has them


@dataclass(frozen=True)
class KernelSpec:
    """Base of all specs. Specs are frozen and hashable: equal specs share one kernel."""

    @property
    def flops(self) -> int:
        """Arithmetic operations of one row; a multiply-add counts as two. Moving numbers is none."""
        return 0

    @property
    def text(self) -> str:
        """Shape for people, "64x56x56 -> 256x56x56 k1 s1"; empty if the output's shape says it all."""
        return ""

    @property
    def checks(self) -> tuple[Check, ...]:
        """What the kernel refuses. If anything, it has an argument more: two int64, see `artifact.format.Layer`."""
        return ()

    def with_halos(self, inputs: tuple[int, ...], output: int) -> Self:
        """The spec with the halos that its activations turned out to have, inputs in the order of the arguments."""
        return self


@dataclass(frozen=True)
class KernelPlan:
    """A spec with the template's knobs chosen: what will be compiled and how the executor must call it.

    `knobs` are the template's own (register tile, task blocking, loop order), sorted by name. Equal plans share one.
    """

    spec: KernelSpec
    knobs: tuple[tuple[str, int | str], ...]
    tasks: int
    description: str
    blocking_bytes: int
    parallelism: int


@dataclass(frozen=True)
class BatchPlan:
    """A second kernel that all plans of a spec share: up to `rows` rows in one call, in `tasks` tasks together."""

    spec: KernelSpec
    rows: int
    tasks: int
    description: str
