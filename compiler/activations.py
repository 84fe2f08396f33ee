"""Activation functions as data: what a kernel applies to each number before it is stored. Nothing here imports TVM."""

import math
from dataclasses import dataclass
from typing import Final, Literal

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
