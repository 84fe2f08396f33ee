"""Let convolutions and dense layers add a residual, and elementwise layers, too, apply the activation after them."""

from collections import Counter
from dataclasses import replace

from gangway.compiler.activations import NONE
from gangway.compiler.layers import Layer, Program
from gangway.compiler.specs import ConvSpec, ElementwiseSpec


def fuse(program: Program) -> list[Layer]:
    """Return the program's layers, Add and activations merged into the layer before them where possible.

    A merged layer stands where its last part stood: there everything it reads has been computed, whichever side of an
    Add the convolution is on. It does not matter whether the last part reads a view of what the first one computes.
    """
    uses = Counter(program.home(name) for layer in program.layers for name in layer.inputs)
    uses.update(program.home(name) for name in program.graph.outputs)
    done: dict[str, Layer] = {}  # by output, in order of execution
    for layer in program.layers:
        # The latest convolution first: the other operand is computed earlier, so its memory is in use anyway.
        homes = [program.home(name) for name in layer.inputs]
        sources = [source for source in reversed(done.values()) if source.output in homes]
        merged = None
        for source in sources:
            merged = _merge(source, layer, program) if uses[source.output] == 1 else None
            if merged:
                del done[source.output]
                break
        done[layer.output] = merged or layer
    return list(done.values())


def _merge(source: Layer, layer: Layer, program: Program) -> Layer | None:
    """Return one layer that computes what `layer` makes of the output of `source`, None if there is no such kernel."""
    if not isinstance(source.spec, ConvSpec | ElementwiseSpec) or not isinstance(layer.spec, ElementwiseSpec):
        return None
    if source.spec.activation != NONE:
        return None
    spec, inputs = source.spec, source.inputs
    if layer.spec.operator == "copy":
        spec = replace(spec, activation=layer.spec.activation)
    elif layer.spec.operator == "add" and isinstance(spec, ConvSpec) and not spec.residual:
        (residual,) = (name for name in layer.inputs if program.home(name) != source.output)
        (summand,) = (name for name in layer.inputs if program.home(name) == source.output)
        types = [program.graph.types.get(name) for name in (residual, summand, layer.output)]
        if residual in program.constants or types[0] != types[2] or types[1] != types[2]:
            return None
        spec, inputs = replace(spec, residual=True, activation=layer.spec.activation), (*inputs, residual)
    else:
        return None
    operator = f"{source.operator}+{layer.operator}"
    return replace(source, operator=operator, spec=spec, inputs=inputs, output=layer.output)
