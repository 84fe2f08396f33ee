"""What a tensor expression of our own gives to the compiler."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gangway.compiler.specs import Array


@dataclass(frozen=True)
class Expression:
    """A function of TIR, the names of its operands, and examples for those that cannot be any number."""

    function: Any
    operands: tuple[str, ...]
    examples: Mapping[str, Array]
