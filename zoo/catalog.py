"""The zoo's models and ensembles: what each is, which module builds it, and its part of config.pbtxt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from types import MappingProxyType
from typing import cast
from zlib import crc32

from gangway.zoo.digits import DIGITS, PICTURE_SIZE
from gangway.zoo.examples import COLOURS, IMAGE_SIZE, SIMPLE_ELEMENTS
from gangway.zoo.graph import ModelGraph


@dataclass(frozen=True)
class ZooModel:
    """One model. `gangway.zoo.<module>` has a function of the model's name that builds it."""

    summary: str
    module: str
    max_batch_size: int = 8
    paper_qos_ms: str | None = None  # latency target in VELTAIR's (64 cores), else in Layerweaver+'s evaluation (NPU)
    sequence: int | None = None  # the default number of tokens; None: takes no tokens
    max_sequence: int | None = None  # None: no limit
    labels: tuple[str, ...] = ()  # of the classes of its only output
    input_format: str = ""  # of its inputs, in config.pbtxt


MODELS: Mapping[str, ZooModel] = MappingProxyType(
    {
        "resnet18": ZooModel("ResNet-18, 11.7 M parameters, 224 x 224 images", "resnet"),
        "resnet34": ZooModel("ResNet-34, 21.8 M parameters, 224 x 224 images", "resnet"),
        "resnet50": ZooModel("ResNet-50 v1.5, 25.6 M parameters, 224 x 224 images", "resnet", paper_qos_ms="15"),
        "resnet101": ZooModel("ResNet-101 v1.5, 44.5 M parameters, 224 x 224 images", "resnet"),
        "googlenet": ZooModel(
            "GoogLeNet with batch norm, 7.0 M parameters, 224 x 224 images", "inception", paper_qos_ms="15"
        ),
        "inception_v3": ZooModel("Inception v3, 23.8 M parameters, 299 x 299 images", "inception", paper_qos_ms="15"),
        "mobilenetv2": ZooModel("MobileNetV2 1.0, 3.5 M parameters, 224 x 224 images", "mobile", paper_qos_ms="10"),
        "efficientnet_b0": ZooModel("EfficientNet-B0, 5.3 M parameters, 224 x 224 images", "mobile", paper_qos_ms="10"),
        "alexnet": ZooModel("AlexNet, 61 M parameters, 224 x 224 images", "plain"),
        "vgg16": ZooModel("VGG-16, 138 M parameters, 224 x 224 images", "plain"),
        "ssd_resnet34": ZooModel(
            "SSD on ResNet-34 without NMS, 20.0 M parameters, 300 x 300 images", "resnet", paper_qos_ms="100"
        ),
        "tiny_yolov2": ZooModel(
            "Tiny YOLOv2 without decoding, 15.9 M parameters, 416 x 416 images", "plain", paper_qos_ms="10"
        ),
        "bert_base": ZooModel(
            "BERT-base uncased, 109 M parameters",
            "transformers",
            paper_qos_ms="130",
            sequence=128,
            max_sequence=512,
        ),
        "bert_large": ZooModel(
            "BERT-large uncased, 335 M parameters",
            "transformers",
            paper_qos_ms="130",
            sequence=128,
            max_sequence=512,
        ),
        "xlnet_base": ZooModel("XLNet-base, 117 M parameters", "transformers", paper_qos_ms="130", sequence=128),
        "gpt2": ZooModel("GPT-2 small, next token, 124 M parameters", "transformers", sequence=64, max_sequence=1024),
        "mlp": ZooModel("multilayer perceptron, 16 floats to 10", "plain", max_batch_size=64),
        "simple": ZooModel("Triton's example: sum and difference of 16 INT32 numbers", "examples"),
        "simple_string": ZooModel("Triton's example on decimal numbers as strings", "examples"),
        "simple_int8": ZooModel("Triton's example on INT8 numbers", "examples"),
        "simple_identity": ZooModel("Triton's example that answers with the strings it gets", "examples"),
        "simple_pixels": ZooModel("makes the bytes of a 64 x 64 image ready for `simple_image`", "examples"),
        "simple_sequence": ZooModel("Triton's example of a sequence: its input, and 1 more at the start", "examples"),
        "simple_dyna_sequence": ZooModel(
            "Triton's example of a sequence: its input, 1 more at the start, the sequence's id more at the end",
            "examples",
        ),
        "simple_string_dyna_sequence": ZooModel(
            "Triton's example of a sequence with state: the sum of its inputs, the sequence's id more at the end",
            "examples",
        ),
        "accumulator": ZooModel("a sequence with state: the sum of its inputs", "examples"),
        "simple_image": ZooModel(
            "classifier with labels: the brightest channel of a 64 x 64 image",
            "examples",
            labels=COLOURS,
            input_format="FORMAT_NCHW",
        ),
        "digits_pixels": ZooModel("makes the pixels of a 64 x 64 picture ready for `digits_network`", "digits"),
        "digits_network": ZooModel("trained: names the handwritten digit, 9.6 K parameters", "digits", labels=DIGITS),
    }
)
DEFAULT_NAMES = ("resnet50", "mobilenetv2", "mlp", "simple")  # quick to write and compile, 120 MB
TRITON_EXAMPLES = (  # what Triton's public client examples ask for
    "simple",
    "simple_string",
    "simple_int8",
    "simple_identity",
    "simple_sequence",
    "simple_dyna_sequence",
    "simple_string_dyna_sequence",
    "simple_image",
)


@dataclass(frozen=True)
class ZooTensor:
    """An input or output, without the batch."""

    name: str
    data_type: str
    dims: Sequence[int]


@dataclass(frozen=True)
class ZooStep:
    """A model of the zoo; maps go from its names to those of the ensemble."""

    model: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


@dataclass(frozen=True)
class ZooEnsemble:
    """The content of its config.pbtxt."""

    summary: str
    inputs: Sequence[ZooTensor]
    outputs: Sequence[ZooTensor]
    steps: Sequence[ZooStep]
    max_batch_size: int = 8
    has_samples: bool = False  # pictures of `digits.sample_pictures`, in its folder `samples`

    @property
    def models(self) -> tuple[str, ...]:
        """The models that it is made of, each once."""
        return tuple(dict.fromkeys(step.model for step in self.steps))


ENSEMBLES: Mapping[str, ZooEnsemble] = MappingProxyType(
    {
        "digits": ZooEnsemble(
            "ensemble, trained: a 64 x 64 picture of a handwritten digit, white on black, to its name",
            [ZooTensor("PIXELS", "TYPE_UINT8", (PICTURE_SIZE, PICTURE_SIZE, 3))],
            [ZooTensor("DIGIT", "TYPE_FP32", (len(DIGITS),))],
            [
                ZooStep("digits_pixels", {"PIXELS": "PIXELS"}, {"CELLS": "cells"}),
                ZooStep("digits_network", {"CELLS": "cells"}, {"DIGIT": "DIGIT"}),
            ],
            has_samples=True,
        ),
        "simple_ensemble": ZooEnsemble(
            "ensemble: the bytes of a 64 x 64 image, made ready and classified",
            [ZooTensor("PIXELS", "TYPE_UINT8", (IMAGE_SIZE, IMAGE_SIZE, len(COLOURS)))],
            [ZooTensor("COLOUR", "TYPE_FP32", (len(COLOURS),))],
            [
                ZooStep("simple_pixels", {"PIXELS": "PIXELS"}, {"IMAGE": "image"}),
                ZooStep("simple_image", {"IMAGE": "image"}, {"COLOUR": "COLOUR"}),
            ],
        ),
        "simple_diamond": ZooEnsemble(
            "ensemble: `simple` on its own results, 2 A and 2 B of A and B, then their sum and difference",
            [ZooTensor(name, "TYPE_INT32", (SIMPLE_ELEMENTS,)) for name in ("INPUT0", "INPUT1")],
            [ZooTensor(name, "TYPE_INT32", (SIMPLE_ELEMENTS,)) for name in ("OUTPUT0", "OUTPUT1")],
            [
                ZooStep(
                    "simple", {"INPUT0": "INPUT0", "INPUT1": "INPUT1"}, {"OUTPUT0": "sum", "OUTPUT1": "difference"}
                ),
                ZooStep("simple", {"INPUT0": "sum", "INPUT1": "difference"}, {"OUTPUT0": "twice_a"}),
                ZooStep("simple", {"INPUT0": "sum", "INPUT1": "difference"}, {"OUTPUT1": "twice_b"}),
                ZooStep(
                    "simple", {"INPUT0": "twice_a", "INPUT1": "twice_b"}, {"OUTPUT0": "OUTPUT0", "OUTPUT1": "OUTPUT1"}
                ),
            ],
        ),
    }
)


def build(name: str, sequence: int | None = None) -> ModelGraph:
    """Build a model's structure; always with the same weights. `sequence` is its number of tokens.

    Raises ValueError if the zoo has no such model, it takes no tokens, or not that many.
    """
    if name not in MODELS:
        raise ValueError(f"the zoo has no model '{name}'; it has {', '.join(MODELS)}")
    entry = MODELS[name]
    function = getattr(import_module(f"gangway.zoo.{entry.module}"), name)
    seed = crc32(name.encode())
    if entry.sequence is None:
        if sequence is not None:
            raise ValueError(f"{name} takes no tokens, so it has no sequence length")
        return cast(ModelGraph, function(seed=seed))
    length = entry.sequence if sequence is None else sequence
    if length < 1 or (entry.max_sequence is not None and length > entry.max_sequence):
        raise ValueError(f"{name} takes 1 to {entry.max_sequence or 'any number of'} tokens, not {length}")
    return cast(ModelGraph, function(seed=seed, sequence=length))
