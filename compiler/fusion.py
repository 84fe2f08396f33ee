"""Let convolutions and dense layers add a residual and apply the activation that follow them."""

from collections import Counter
from dataclasses import replace

from gangway.compiler.layers import Layer, Program
from gangway.compiler.specs import ConvSpec, ElementwiseSpec


def fuse(program: Program) -> list[Layer]:
    """Return the program's layers, Add and Relu/Clip merged into the convolution before them where possible.

    A merged layer stands where its last part stood: there everything it reads has been computed, whichever side of an
    Add the convolution is on.
    """
    uses = Counter(name for layer in program.layers for name in layer.inputs)
    uses.update([*program.views.values(), *program.graph.outputs])
    done: dict[str, Layer] = {}  # by output, in order of execution
    for layer in program.layers:
        # The latest convolution first: the other operand is computed earlier, so its memory is in use anyway.
        sources = [source for source in reversed(done.values()) if source.output in layer.inputs]
        merged = None
        for source in sources:
            merged = _merge(source, layer, program) if uses[source.output] == 1 else None
            if merged:
                del done[source.output]
                break
        done[layer.output] = merged or layer
    return list(done.values())


def _merge(conv: Layer, layer: Layer, program: Program) -> Layer | None:
    """Return one layer that computes what `layer` makes of the output of `conv`, or None if there is no such kernel."""
    if not isinstance(conv.spec, ConvSpec) or not isinstance(layer.spec, ElementwiseSpec):
        return None
    if conv.spec.activation != "none":
        return None
    spec, inputs = conv.spec, conv.inputs
    match layer.spec.operator:
        case "add" if not spec.residual:
            (residual,) = (name for name in layer.inputs if name != conv.output)
            if residual in program.constants:
                return None
            spec, inputs = replace(spec, residual=True), (*inputs, residual)
        case "relu" | "relu6" as activation:
            spec = replace(spec, activation=activation)
        case _:
            return None
    operator = f"{conv.operator}+{layer.operator}"
    return replace(conv, operator=operator, spec=spec, inputs=inputs, output=layer.output)
