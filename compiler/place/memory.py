"""Where every activation lies while layers are placed, its copies in other layouts, and texts of refusals."""

from gangway.artifact.format import Space
from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.frontend.graph import TensorType
from gangway.compiler.kernels.plain_specs import ELEMENT_TYPES, GatherPlacesSpec, GatherSpec, ScatterSpec
from gangway.compiler.kernels.specs import Check, KernelSpec, PackSpec, SequencePackSpec, UnpackSpec
from gangway.compiler.lower.layers import Geometry, Layer, Program, geometry_of
from gangway.compiler.place.steps import Buffer, FormatName, Step

# The error of a request with a number that a kernel refuses, in onnxruntime's words where it has any.

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
    """The text without a place for the number: names of nodes may contain anything."""
    return text.replace("{}", "")


class Memory:
    """Grows step by step: asking for a tensor in some layout may append the step that packs or unpacks it."""

    def __init__(self, program: Program, lanes: int) -> None:
        self.program = program
        self.lanes = lanes
        self.steps: list[Step] = []
        self.homes: dict[str, Buffer] = {}  # where each tensor is computed
        self._copies: dict[tuple[Buffer, FormatName, Geometry | None], Buffer] = {}
        for index, name in enumerate(program.graph.inputs):
            kind = program.type(name)
            self.homes[name] = Buffer(kind, "plain", geometry_of(kind), Space.INPUT, index)

    def append(
        self,
        layer: Layer,
        spec: KernelSpec,
        inputs: tuple[Buffer, ...],
        layout: FormatName,
        geometry: Geometry | None = None,
    ) -> None:
        """Add the step that computes a layer into memory of its own, from now on the home of the layer's output.

        `geometry` is what the kernel writes, if that is not the image which the output's shape suggests.
        """
        kind = self.program.type(layer.output)
        output = Buffer(kind, layout, geometry or geometry_of(kind))
        self.homes[layer.output] = output
        self.steps.append(
            Step(layer.name, layer.operator, spec, inputs, output, layer.weights, (), refusal_texts(layer, spec))
        )

    def tensor(self, name: str) -> Buffer:
        """Give a tensor plain memory of its own, from now on its home."""
        kind = self.program.type(name)
        self.homes[name] = Buffer(kind, "plain", geometry_of(kind))
        return self.homes[name]

    def home(self, name: str) -> Buffer:
        """Return where a tensor was computed, or what it is a view of."""
        home = self.program.home(name)
        if home not in self.homes:
            if home not in self.program.graph.constants:
                raise UnsupportedModelError(f"tensor '{home}' is constant where an activation is needed")
            value = self.program.graph.constants[home]
            kind = TensorType(value.shape, value.dtype.name)
            self.homes[home] = Buffer(kind, "plain", None, Space.WEIGHTS, constant=value)
        return self.homes[home]

    def image(self, name: str) -> Geometry:
        """Return a tensor that lowering has found to be an image as such."""
        image = geometry_of(self.program.type(name))
        assert image is not None, name  # lowering has checked it
        return image

    def plain(self, name: str) -> Buffer:
        """Return a tensor in row-major order."""
        home = self.home(name)
        if home.layout == "plain" or home.image is None or home.is_vector:
            return home
        return self._copy(home, "plain", home.image, "Unpack", unpack_spec(home.image))

    def blocked(self, name: str, geometry: Geometry | None = None, haloed: bool = False) -> Buffer:
        """Return a tensor in blocked layout, as an image or as `geometry` says; a vector may lie in plain memory,
        unless it needs a halo.
        """
        image, home = geometry or self.image(name), self.home(name)
        if image.is_vector and not haloed:
            plain = self.plain(name)
            # The surplus is not kept zero in a client's memory, nor behind a part of a larger tensor.
            in_place = (plain.space == Space.ARENA and not plain.parent) or image.channels % self.lanes == 0
            return plain if in_place else self._pack(plain, image, "blocked")
        if home.is_blocked(image) and not image.is_vector:
            return home
        return self._pack(self.plain(name), image, "blocked")

    def planar(self, name: str) -> Buffer:
        """Return an image in planar layout."""
        return self._pack(self.plain(name), self.image(name), "planar")

    def _pack(self, plain: Buffer, image: Geometry, layout: FormatName) -> Buffer:
        spec: KernelSpec = PackSpec(image.channels, image.height, image.width, layout == "planar")
        if image.channels_last:
            spec = SequencePackSpec(image.width, image.channels, image.channels)
        return self._copy(plain, layout, image, "Pack", spec)

    def _copy(self, source: Buffer, layout: FormatName, image: Geometry, operator: str, spec: KernelSpec) -> Buffer:
        """Return the buffer that holds `source` in another layout; the step that fills it is added once."""
        key = (source, layout, image)
        if key not in self._copies:
            kind = TensorType((1, image.channels, image.height, image.width), source.kind.dtype)
            self._copies[key] = Buffer(kind, layout, image)
            name = f"{operator.lower()}{len(self._copies)}"
            self.steps.append(Step(name, operator, spec, (source,), self._copies[key]))
        return self._copies[key]


def datatype(name: str, kind: TensorType) -> str:
    """Return the element type of a tensor. Raises UnsupportedModelError if kernels do not know it."""
    if kind.dtype not in ELEMENT_TYPES:
        raise UnsupportedModelError(f"tensor '{name}' has the element type {kind.dtype}")
    return kind.dtype


def unpack_spec(image: Geometry) -> KernelSpec:
    """Return how an image or a sequence is unpacked; halos are settled later."""
    if image.channels_last:
        return SequencePackSpec(image.width, image.channels, image.channels, unpack=True)
    return UnpackSpec(image.channels, image.height, image.width)
