"""Which function gives which kind of layer its memory. A new kind of layer is one function with `@places(Spec)`."""

from collections.abc import Callable

from gangway.compiler.layers import Layer, LayerSpec
from gangway.compiler.memory import Memory

Placing = Callable[[Memory, Layer], None]

_placings: dict[type[LayerSpec], Placing] = {}


def places(*kinds: type[LayerSpec]) -> Callable[[Placing], Placing]:
    """Register the decorated function for layers with these specs. It appends the layer."""

    def register(function: Placing) -> Placing:
        _placings.update(dict.fromkeys(kinds, function))
        return function

    return register


def place_layer(memory: Memory, layer: Layer) -> None:
    """Append the steps of one layer. Raises UnsupportedModelError."""
    _placings[type(layer.spec)](memory, layer)
