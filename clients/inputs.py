"""The tensors of one inference: from random numbers, files or a picture, into a request, and out of its answer.

On the wire they have Triton's datatype names and raw little-endian bytes.
"""

import argparse
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gangway.artifact.datatypes import DTYPES, numbers_of
from gangway.artifact.example_requests import ExampleTensor, chosen_size, is_open, plausible_values
from gangway.clients.errors import InputError, RefusedError
from gangway.protos import grpc_service_pb2 as pb

# Mean and standard deviation of ImageNet's red, green and blue in [0, 1], and the share of a picture's short side
# that the crop keeps: the preprocessing that published ImageNet classifiers were trained with.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_DEVIATION = (0.229, 0.224, 0.225)
CROP_SHARE = 224 / 256

Array = npt.NDArray[Any]
BYTES, BF16 = "BYTES", "BF16"
NO_CLASSES: Mapping[str, int] = MappingProxyType({})
TensorMetadata = pb.ModelMetadataResponse.TensorMetadata


def random_tensors(tensors: Sequence[TensorMetadata], batch: int, seed: int) -> dict[str, Array]:
    """Return random values for every input; equal seeds give equal values."""
    generator = np.random.default_rng(seed)
    return {tensor.name: random_tensor(tensor, batch, generator) for tensor in tensors}


def random_tensor(tensor: TensorMetadata, batch: int, generator: np.random.Generator) -> Array:
    """Return plausible values in the tensor's shape, with `batch` rows. Raises InputError."""
    example = concrete(tensor, batch)
    if tensor.datatype != BYTES:
        dtype_of(tensor.datatype)
    try:
        return plausible_values(example, generator)
    except (MemoryError, ValueError) as error:  # ValueError: more elements than an address can count
        raise InputError(f"input '{tensor.name}' of {list(example.shape)} is too large: {error}") from None


def zero_tensor(tensor: TensorMetadata, batch: int) -> Array:
    """Return zeros, or empty elements of BYTES, in the tensor's shape."""
    shape = concrete_shape(tensor, batch)
    return np.full(shape, b"", object) if tensor.datatype == BYTES else np.zeros(shape, dtype_of(tensor.datatype))


@dataclass(frozen=True)
class OpenDimensions:
    """What a server's configuration says of a model's open dimensions.

    `declared_size`: the least that it declares, None if it declares none. `names`: of each input's dimensions, empty
    where they are fixed; inputs of which it says nothing are missing.
    """

    declared_size: int | None = None
    names: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def names_of(self, tensor: TensorMetadata) -> Sequence[str]:
        """Return a name for each dimension of an input, "" if it has none."""
        names = self.names.get(tensor.name, ())
        return names if len(names) == len(tensor.shape) else ("",) * len(tensor.shape)


NO_DIMENSIONS: Final = OpenDimensions()


def shaped(
    tensors: Sequence[TensorMetadata],
    shapes: Mapping[str, Sequence[int]],
    dimensions: Callable[[], OpenDimensions] = lambda: NO_DIMENSIONS,
) -> list[TensorMetadata]:
    """Give inputs these sizes, of all dimensions but the first; a name that is no input's is that of a dimension.

    `dimensions` is asked only if there is such a name. Raises InputError where a model's do not admit them.
    """
    named = {name: sizes for name, sizes in shapes.items() if name not in {tensor.name for tensor in tensors}}
    known = dimensions() if named else NO_DIMENSIONS
    if unknown := named.keys() - (there_are := later_names(tensors, known)):
        others = f", its dimensions {', '.join(sorted(there_are))}" if there_are else ""
        raise InputError(
            f"--shape: the model has no input '{min(unknown)}'; its inputs are {_described(tensors)}{others}"
        )
    if several := [name for name, sizes in named.items() if len(sizes) > 1]:
        raise InputError(f"--shape: '{several[0]}' is one dimension, and has one size")
    found = []
    for tensor in tensors:
        pairs = zip(known.names_of(tensor), tensor.shape, strict=True)
        by_name = [named[name][0] if name in named else size for name, size in pairs]
        sizes = [*tensor.shape[:1], *shapes.get(tensor.name, by_name[1:])]
        fits = len(sizes) == len(tensor.shape)
        if not fits or any(size not in (-1, given) for size, given in zip(tensor.shape, sizes, strict=True)):
            example = ",".join([str(max(size, 1)) for size in tensor.shape[1:]])
            wanted = f"say the sizes of all dimensions but the first, such as {tensor.name}:{example}"
            wanted = wanted if example else "there is no size to say"
            raise InputError(f"--shape: input '{tensor.name}' is {list(tensor.shape)}; {wanted}")
        found.append(TensorMetadata(name=tensor.name, datatype=tensor.datatype, shape=sizes))
    return found


def later_names(tensors: Sequence[TensorMetadata], known: OpenDimensions) -> set[str]:
    """Return the names of all dimensions but first ones, which are the rows of a request."""
    return {name for tensor in tensors for name in known.names_of(tensor)[1:] if name}


def with_chosen_sizes(
    tensors: Sequence[TensorMetadata], dimensions: Callable[[], OpenDimensions]
) -> tuple[list[TensorMetadata], str]:
    """Give each open dimension but the first one a size; return what was chosen as flags, empty if nothing was.

    Dimensions of one name get one size. `dimensions` is asked only if a dimension is open.
    """
    known = dimensions() if any(map(is_open, tensors)) else NO_DIMENSIONS
    found, said = [], []
    by_name: dict[str, int] = {}
    for tensor in tensors:
        chosen, names = chosen_size(tensor, known.declared_size), known.names_of(tensor)
        sizes = list(tensor.shape)
        for axis in range(1, len(sizes)):
            if sizes[axis] < 0:
                sizes[axis] = by_name.setdefault(names[axis], chosen) if names[axis] else chosen
        opened = [axis for axis, size in enumerate(tensor.shape) if axis and size < 0]
        if all(names[axis] for axis in opened):
            said += [f"{names[axis]}:{sizes[axis]}" for axis in opened]
        else:
            said.append(f"{tensor.name}:{','.join(map(str, sizes[1:]))}")
        found.append(TensorMetadata(name=tensor.name, datatype=tensor.datatype, shape=sizes))
    return found, " ".join(f"--shape {each}" for each in dict.fromkeys(said))


def shape_argument(text: str) -> tuple[str, tuple[int, ...]]:
    """Return what NAME:SIZE,SIZE,... says, as perf_analyzer's --shape. Raises argparse.ArgumentTypeError."""
    name, _, sizes = text.rpartition(":")
    try:
        numbers = tuple(int(size) for size in sizes.split(","))
    except ValueError:
        numbers = ()
    if not name or not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected NAME:SIZE,SIZE, got '{text}'")
    return name, numbers


def file_tensors(tensors: Sequence[TensorMetadata], files: Mapping[str, Path]) -> dict[str, Array]:
    """Read one file for every input: an array in .npy, or any other file as the one element of BYTES.

    Raises InputError if an input is missing or unknown, or its file is wrong.
    """
    expected = {tensor.name: tensor for tensor in tensors}
    if files.keys() != expected.keys():
        raise InputError(f"the model's inputs are {_names(expected)}; --input was given for {_names(files)}")
    return {name: _read_file(path, expected[name]) for name, path in files.items()}


@dataclass(frozen=True)
class Normalisation:
    """How colours from 0 to 1 become numbers: less `mean`, over `deviation`, one for each channel or for all."""

    mean: tuple[float, ...] = IMAGENET_MEAN
    deviation: tuple[float, ...] = IMAGENET_DEVIATION

    def apply(self, pixels: Array) -> Array:
        """Return numbers of [height, width, channels] colours. Raises InputError for wrong numbers."""
        mean, deviation = (_of_channels(each, pixels.shape[2]) for each in (self.mean, self.deviation))
        numbers: Array = (pixels.astype(np.float32) / 255 - mean) / deviation
        return numbers


def _of_channels(numbers: Sequence[float], channels: int) -> Array:
    """Return a number for each channel: one for all, or for grey the mean of those of the colours."""
    if len(numbers) not in (1, 3):
        raise InputError(f"--mean and --std need one number, or three: {len(numbers)} are given")
    return (
        np.full(channels, np.mean(numbers), np.float32)
        if channels == 1 or len(numbers) == 1
        else np.array(numbers, np.float32)
    )


def image_tensor(
    tensors: Sequence[TensorMetadata], path: Path, batch: int, normalisation: Normalisation = Normalisation()
) -> dict[str, Array]:
    """Read a picture for the model's only input.

    Of pixels [N, C, H, W], [N, H, W, C] or without N, C = 1 or 3: resized and cropped to H x W, or as large as it is if
    both are open. Floats are normalised, UINT8 are colours. A line of bytes [-1] UINT8, or one string (BYTES), gets the
    file as it is. Raises InputError.
    """
    if len(tensors) != 1:
        raise InputError(f"--image needs a model with one input; this one takes {_described(tensors)}")
    tensor = tensors[0]
    if (content := _file_content(tensor, path)) is not None:
        return {tensor.name: content}
    has_rows = len(tensor.shape) == 4
    sizes = tuple(tensor.shape[1:] if has_rows else tensor.shape)
    channel_axis = next((axis for axis in (0, 2) if len(sizes) == 3 and sizes[axis] in (1, 3)), None)
    if channel_axis is None or tensor.datatype not in ("FP32", "FP16", "FP64", "UINT8"):
        raise InputError(
            "--image needs an input of floats or UINT8 of shape [N, C, H, W] or [N, H, W, C], C being 1 or 3, or of"
            f" BYTES; this model takes {_described(tensors)}"
        )
    height, width = (size for axis, size in enumerate(sizes) if axis != channel_axis)
    crop_share = 1.0 if tensor.datatype == "UINT8" else CROP_SHARE
    pixels = _read_image(path, height, width, crop_share, grey=sizes[channel_axis] == 1)
    if tensor.datatype != "UINT8":
        pixels = normalisation.apply(pixels).astype(dtype_of(tensor.datatype))
    values = np.ascontiguousarray(pixels.transpose(2, 0, 1)) if channel_axis == 0 else pixels
    if not has_rows:
        return {tensor.name: values}
    return {tensor.name: np.repeat(values[np.newaxis], _rows(tensor, batch), axis=0)}


def _file_content(tensor: TensorMetadata, path: Path) -> Array | None:
    """Return a file as the value of a tensor that holds whole files; None for any other tensor."""
    sizes = list(tensor.shape)
    is_text = tensor.datatype == BYTES and all(size in (-1, 1) for size in sizes)
    if not is_text and not (tensor.datatype == "UINT8" and sizes in ([-1], [-1, -1])):
        return None
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error}") from error
    if is_text:
        return np.array(content, object).reshape([1] * len(sizes))
    return np.frombuffer(content, np.uint8).reshape([1] * (len(sizes) - 1) + [-1])


def _described(tensors: Sequence[TensorMetadata]) -> str:
    return ", ".join(f"{tensor.name} {tensor.datatype} {list(tensor.shape)}" for tensor in tensors)


def concrete(tensor: TensorMetadata, batch: int) -> ExampleTensor:
    """Return the tensor with `batch` rows. Raises InputError if another dimension is open."""
    return ExampleTensor(tensor.name, tensor.datatype, concrete_shape(tensor, batch))


def concrete_shape(tensor: TensorMetadata, batch: int) -> tuple[int, ...]:
    """Return the tensor's shape with `batch` rows. Raises InputError if another dimension is open."""
    if is_open(tensor):
        raise InputError(f"input '{tensor.name}' has open dimensions {list(tensor.shape)}: give sizes or values")
    rows = _rows(tensor, batch)
    return (rows, *tensor.shape[1:]) if tensor.shape else ()


def _rows(tensor: TensorMetadata, batch: int) -> int:
    """Return the size of the first dimension. Raises InputError if it is fixed and a batch is wanted."""
    first = tensor.shape[0] if tensor.shape else 1
    if first >= 0 and batch != 1:
        raise InputError(
            f"input '{tensor.name}' has the fixed shape {list(tensor.shape)}: --batch {batch} does not apply"
        )
    return batch if first < 0 else int(first)


def dtype_of(datatype: str) -> np.dtype[np.generic]:
    """Return the dtype of a Triton datatype's values here, of BF16 float32. Raises InputError for one that has none."""
    if datatype == BF16:
        return np.dtype(np.float32)
    if datatype not in DTYPES:
        raise InputError(f"datatype {datatype} is not supported by this client; it knows {', '.join(DTYPES)}")
    return DTYPES[datatype]


def infer_request(
    model: str, version: str, tensors: Mapping[str, tuple[str, Array]], classes: Mapping[str, int] = NO_CLASSES
) -> pb.ModelInferRequest:
    """Build a ModelInfer request from name -> (datatype, values); the values travel as raw bytes.

    `classes`: of these outputs so many classes are wanted in place of numbers (the classification extension). Outputs
    that it does not name come, too, if it is empty.
    """
    request = pb.ModelInferRequest(model_name=model, model_version=version)
    for name, (datatype, values) in tensors.items():
        request.inputs.add(name=name, datatype=datatype, shape=values.shape)
        request.raw_input_contents.append(_raw_of(datatype, values))
    for name, count in classes.items():
        request.outputs.add(name=name).parameters["classification"].int64_param = count
    return request


def outputs_of(response: pb.ModelInferResponse) -> dict[str, Array]:
    """Return the output tensors of a response by name; strings are bytes. Only raw contents are understood."""
    if len(response.raw_output_contents) != len(response.outputs):
        contents = len(response.raw_output_contents)
        raise RefusedError(f"the server sent {len(response.outputs)} outputs, but the contents of {contents}")
    return {
        output.name: _values_of(output.datatype, raw).reshape(tuple(output.shape))
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def _raw_of(datatype: str, values: Array) -> bytes:
    """Return values as they travel: strings behind their lengths, of BF16 the upper halves, rounded to even."""
    if datatype == BYTES:
        return _joined(values)
    if datatype == BF16:
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        rounded = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
        return np.where(np.isnan(values), bits >> 16 | 0x40, rounded).astype(np.uint16).tobytes()
    return values.tobytes()


def _values_of(datatype: str, raw: bytes) -> Array:
    if datatype == BYTES:
        return np.array(_split(raw), object)
    dtype_of(datatype)  # raises for one that has no values here
    return numbers_of(raw, datatype)


def _joined(strings: Array) -> bytes:
    """Return strings as they travel, each behind its length."""
    return b"".join(struct.pack("<I", len(each)) + each for each in strings.flat)


def _split(raw: bytes) -> list[bytes]:
    strings, place = [], 0
    while place < len(raw):
        (length,) = struct.unpack_from("<I", raw, place)
        strings.append(raw[place + 4 : place + 4 + length])
        place += 4 + length
    return strings


def _names(mapping: Mapping[str, object]) -> str:
    return ", ".join(f"'{name}'" for name in mapping)


def _read_file(path: Path, tensor: TensorMetadata) -> Array:
    if tensor.datatype == BYTES and path.suffix != ".npy":
        content = _file_content(tensor, path)
        if content is None:
            raise InputError(f"{path} is one element, but input '{tensor.name}' is BYTES {list(tensor.shape)}")
        return content
    try:
        values: Array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"cannot read {path} as .npy: {error}") from error
    if not isinstance(values, np.ndarray):
        raise InputError(f"{path} is an archive of arrays, not one .npy array")
    if tensor.datatype == BYTES and values.dtype.kind in "SU":
        elements = [each.encode() if isinstance(each, str) else each for each in values.ravel().tolist()]
        return np.array([*elements, None], object)[:-1].reshape(values.shape)
    if tensor.datatype == BYTES or values.dtype != dtype_of(tensor.datatype):
        raise InputError(f"{path} holds {values.dtype}, but input '{tensor.name}' is {tensor.datatype}")
    return values


def _read_image(path: Path, height: int, width: int, crop_share: float, grey: bool) -> Array:
    """Return pixels as uint8 [height][width][3], or [1] if `grey`; of the picture's own size if both are open."""
    try:
        from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 - optional dependency
    except ImportError as error:
        raise InputError("--image needs Pillow: pip install 'gangway-serve[client]'") from error
    try:
        with Image.open(path) as opened:
            picture = opened.convert("L" if grey else "RGB")
    except (OSError, UnidentifiedImageError) as error:
        raise InputError(f"cannot read {path} as a picture: {error}") from error
    if (height < 0) != (width < 0):
        raise InputError("--image needs both height and width, or neither; this model has one of them open")
    if height > 0 and picture.size != (width, height):
        scale = max(height, width) / crop_share / min(picture.size)
        wide, high = (
            max(least, round(size * scale)) for least, size in zip((width, height), picture.size, strict=True)
        )
        left, top = (wide - width) // 2, (high - height) // 2
        picture = picture.resize((wide, high), Image.Resampling.BILINEAR)
        picture = picture.crop((left, top, left + width, top + height))
    return np.asarray(picture).reshape(picture.height, picture.width, -1)
