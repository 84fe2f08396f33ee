"""What a client is told whose request has a number that a kernel refuses: onnxruntime's words, where it has any."""

from gangway.compiler.layers import Layer
from gangway.compiler.specs import Check, GatherPlacesSpec, GatherSpec, KernelSpec, ScatterSpec

_OUTSIDE = "indices element out of data bounds"
_INDEX = {
    "GatherElements": "GatherElements op: Out of range value in index tensor",
    "GatherND": "invalid index found, index = {}",
    "ScatterND": "invalid indice found, indice = {}",
}


def refusal_texts(layer: Layer, spec: KernelSpec) -> tuple[str, ...]:
    """Return a text for each check of a layer's kernel, with {} for the number."""
    named = layer.name != layer.output  # a node without a name is called by its output
    node = f"{layer.operator} node '{layer.name}'" if named else layer.operator
    return tuple(f"{_literal(node)}: {_sentence(check, layer.operator, spec)}" for check in spec.checks)


def _sentence(check: Check, operator: str, spec: KernelSpec) -> str:
    match check:
        case "zero":
            return f"Integer {'modulo' if operator == 'Mod' else 'division'} by zero"
        case "least":
            return "the least integer divided by -1 is no integer of its type"
        case "index":
            length = _length(spec)
            bounds = f"[{-length},{length - 1}]"
            return _INDEX.get(operator, f"{_OUTSIDE}, idx={{}} must be within the inclusive range {bounds}")


def _length(spec: KernelSpec) -> int:
    """How many items the first axis has that indices point into."""
    if isinstance(spec, ScatterSpec | GatherPlacesSpec):
        return spec.picked[0].length
    assert isinstance(spec, GatherSpec)
    return spec.length


def _literal(text: str) -> str:
    """The text without a place for the number: names of nodes are anybody's."""
    return text.replace("{}", "")
