"""Ensembles of the zoo's models: nothing but a configuration and an empty version folder each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from onnx import TensorProto

from gangway.zoo.blueprint import Blueprint
from gangway.zoo.builder import GraphBuilder
from gangway.zoo.examples import COLOURS, IMAGE_SIZE, SIMPLE_ELEMENTS

# What stands in front of a classifier: from the bytes of an image to what the network was trained on.


def simple_pixels(seed: int) -> Blueprint:
    """PIXELS UINT8 [N, 64, 64, 3] -> IMAGE FP32 [N, 3, 64, 64]: the colours first, and 0 to 1."""
    net = GraphBuilder("simple_pixels", seed)
    numbers = net.node("Cast", ["PIXELS"], "numbers", to=TensorProto.FLOAT)
    shares = net.node("Div", [numbers, net.scalar("most", 255.0)], "shares")
    net.node("Transpose", [shares], "IMAGE", perm=[0, 3, 1, 2])
    size = IMAGE_SIZE
    inputs, outputs = {"PIXELS": (size, size, len(COLOURS))}, {"IMAGE": (len(COLOURS), size, size)}
    return net.finish(inputs, outputs, TensorProto.UINT8, TensorProto.FLOAT)


@dataclass(frozen=True)
class Tensor:
    """An input or output, without the batch."""

    name: str
    data_type: str
    dims: Sequence[int]


@dataclass(frozen=True)
class Step:
    """A model of the zoo; maps go from its names to those of the ensemble."""

    model: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True)
class ZooEnsemble:
    """What its config.pbtxt says."""

    summary: str
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    steps: Sequence[Step]
    max_batch_size: int = 8

    @property
    def models(self) -> tuple[str, ...]:
        """The models that it is made of, each once."""
        return tuple(dict.fromkeys(step.model for step in self.steps))


ENSEMBLES: Mapping[str, ZooEnsemble] = MappingProxyType(
    {
        "simple_ensemble": ZooEnsemble(
            "ensemble: the bytes of a 64 x 64 image, made ready and classified",
            [Tensor("PIXELS", "TYPE_UINT8", (IMAGE_SIZE, IMAGE_SIZE, len(COLOURS)))],
            [Tensor("COLOUR", "TYPE_FP32", (len(COLOURS),))],
            [
                Step("simple_pixels", {"PIXELS": "PIXELS"}, {"IMAGE": "image"}),
                Step("simple_image", {"IMAGE": "image"}, {"COLOUR": "COLOUR"}),
            ],
        ),
        "simple_diamond": ZooEnsemble(
            "ensemble: `simple` on its own results, 2 A and 2 B of A and B, then their sum and difference",
            [Tensor(name, "TYPE_INT32", (SIMPLE_ELEMENTS,)) for name in ("INPUT0", "INPUT1")],
            [Tensor(name, "TYPE_INT32", (SIMPLE_ELEMENTS,)) for name in ("OUTPUT0", "OUTPUT1")],
            [
                Step("simple", {"INPUT0": "INPUT0", "INPUT1": "INPUT1"}, {"OUTPUT0": "sum", "OUTPUT1": "difference"}),
                Step("simple", {"INPUT0": "sum", "INPUT1": "difference"}, {"OUTPUT0": "twice_a"}),
                Step("simple", {"INPUT0": "sum", "INPUT1": "difference"}, {"OUTPUT1": "twice_b"}),
                Step(
                    "simple", {"INPUT0": "twice_a", "INPUT1": "twice_b"}, {"OUTPUT0": "OUTPUT0", "OUTPUT1": "OUTPUT1"}
                ),
            ],
        ),
    }
)


def write_ensemble(directory: Path, name: str) -> Path:
    """Write DIRECTORY/NAME/config.pbtxt and the version folder; return DIRECTORY/NAME. Its models are not written."""
    folder = directory / name
    (folder / "1").mkdir(parents=True, exist_ok=True)
    (folder / "config.pbtxt").write_text(config_text(name))
    return folder


def config_text(name: str) -> str:
    """Return an ensemble's config.pbtxt."""
    ensemble = ENSEMBLES[name]
    steps = ",\n".join(map(_step, ensemble.steps))
    return (
        f'# {ensemble.summary}\nname: "{name}"\nplatform: "ensemble"\nmax_batch_size: {ensemble.max_batch_size}\n'
        f"input [\n{_tensors(ensemble.inputs)}\n]\noutput [\n{_tensors(ensemble.outputs)}\n]\n"
        f"ensemble_scheduling {{\n  step [\n{steps}\n  ]\n}}\n"
        "# The latency target of the whole: 3x = three times what the steps take alone, one after the other.\n"
        'parameters {\n  key: "qos_ms"\n  value: { string_value: "3x" }\n}\n'
    )


def _tensors(tensors: Sequence[Tensor]) -> str:
    return ",\n".join(
        f'  {{\n    name: "{tensor.name}"\n    data_type: {tensor.data_type}\n'
        f"    dims: [ {', '.join(map(str, tensor.dims))} ]\n  }}"
        for tensor in tensors
    )


def _step(step: Step) -> str:
    maps = [
        f'      {side}_map {{ key: "{name}" value: "{tensor}" }}\n'
        for side, pairs in (("input", step.inputs), ("output", step.outputs))
        for name, tensor in pairs.items()
    ]
    return f'    {{\n      model_name: "{step.model}"\n      model_version: -1\n{"".join(maps)}    }}'
