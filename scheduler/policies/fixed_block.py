"""Blocks of a fixed number of layers: VELTAIR's motivation (ASPLOS 2022, section 3.2, Fig. 3 to 5), with 6 and 11.

The paper says no more of it than the size. A block asks for the fewest cores that meet the sum of its layers' targets;
on a conflict it does what the layer-wise baseline does.
"""

from gangway.scheduler.blocks import Block, Demands
from gangway.scheduler.policies.spatial import SpatialPolicy

DEFAULT_LAYERS = 6


class FixedBlock(SpatialPolicy):
    """Units of `layers` layers, the last one of what is left."""

    def __init__(self, layers: int = DEFAULT_LAYERS) -> None:
        super().__init__()
        self._layers = layers
        self.name = f"fixed_block:{layers}"

    def unit(self, of: Demands, begin: int, core_count: int, active_cores: float) -> Block:
        """Return the next layers."""
        end = min(begin + self._layers, of.layers)
        return Block(begin, end, of.block_cores(begin, end))


def fixed_block(argument: str) -> FixedBlock:
    """Make the policy of the number of layers, as text; empty for 6. Raises ValueError."""
    if argument and not (argument.isascii() and argument.isdigit() and int(argument) > 0):
        raise ValueError(f"scheduler 'fixed_block' takes a number of layers, as in fixed_block:6, got {argument!r}")
    return FixedBlock(int(argument or DEFAULT_LAYERS))
