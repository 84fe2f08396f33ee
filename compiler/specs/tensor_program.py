"""Spec of a kernel that TVM wrote itself: a loop nest over plain tensors."""

from dataclasses import dataclass
from typing import Literal

from gangway.compiler.specs.base import KernelSpec

Role = Literal["input", "weight", "scratch", "output"]


@dataclass(frozen=True)
class TensorProgramSpec(KernelSpec):
    """A function of TVM's TIR over plain, contiguous tensors.

    `function` is TVM's JSON of it; its parameters have these `roles`. Arguments: the first input, the weights (raw
    weights "0", "1", ...), other inputs, scratch memory, outputs but the first, the first output. Scratch memory holds
    anything before and after. `tasks` is the length of the function's outermost loop if that is parallel, else 1.
    """

    function: str
    roles: tuple[Role, ...]
    scratch: tuple[tuple[int, str], ...]  # elements and type
    tasks: int
    operations: int

    @property
    def flops(self) -> int:
        """Statements that the loops execute."""
        return self.operations

    @property
    def order(self) -> tuple[int, ...]:
        """Which parameter of the function each argument is."""
        places: dict[str, list[int]] = {"input": [], "weight": [], "scratch": [], "output": []}
        for index, role in enumerate(self.roles):
            places[role].append(index)
        first, *others = places["input"]
        result, *more = places["output"]
        return (first, *places["weight"], *others, *places["scratch"], *more, result)
