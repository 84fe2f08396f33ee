"""Tensors of a request that are not in the block of memory that the server has for it."""

from typing import Final


class Elsewhere:
    """Which tensors are elsewhere, and what the slot says of them: by their place in the model. This one has none."""

    def __init__(self) -> None:
        self.inputs: dict[int, int] = {}
        self.outputs: dict[int, int] = {}

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self.inputs) + len(self.outputs)

    def spoiled(self) -> bool:
        """Whether what has been computed from them, or written to them, may be wrong."""
        return False

    def let_go(self) -> None:
        """The executor touches them no more. Called once."""


NOWHERE: Final = Elsewhere()
