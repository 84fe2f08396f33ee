"""The tensors of one inference: from random numbers, .npy files or a picture, into a request, and out of its answer.

On the wire they have Triton's datatype names and raw little-endian bytes.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from gangway.artifact.datatypes import DTYPES
from gangway.clients.connection import InputError, RefusedError
from gangway.protos import grpc_service_pb2 as pb

# Mean and standard deviation of ImageNet's red, green and blue in [0, 1], and the share of a picture's short side
# that the crop keeps: the preprocessing that published ImageNet classifiers were trained with.
IMAGENET_MEAN = np.array([0.485, 0.456, 0.406], dtype=np.float32)
IMAGENET_DEVIATION = np.array([0.229, 0.224, 0.225], dtype=np.float32)
CROP_SHARE = 224 / 256

Array = npt.NDArray[np.generic]
TensorMetadata = pb.ModelMetadataResponse.TensorMetadata


def random_tensors(tensors: Sequence[TensorMetadata], batch: int, seed: int) -> dict[str, Array]:
    """Return random values for every input; equal seeds give equal values."""
    generator = np.random.default_rng(seed)
    return {tensor.name: random_tensor(tensor, batch, generator) for tensor in tensors}


def random_tensor(tensor: TensorMetadata, batch: int, generator: np.random.Generator) -> Array:
    """Return standard normal floats, or coin flips, in the tensor's shape.

    Integers are 0 and 1: they may be masks, or indices, which are refused beyond the end of a table.
    """
    shape, dtype = concrete_shape(tensor, batch), dtype_of(tensor.datatype)
    if dtype.kind == "f":
        return generator.standard_normal(shape, dtype=np.float32).astype(dtype)
    return generator.integers(0, 2, shape).astype(dtype)


def npy_tensors(tensors: Sequence[TensorMetadata], files: Mapping[str, Path]) -> dict[str, Array]:
    """Read one .npy file for every input. Raises InputError if an input is missing or unknown, or its file is wrong."""
    expected = {tensor.name: tensor for tensor in tensors}
    if files.keys() != expected.keys():
        raise InputError(f"the model's inputs are {_names(expected)}; --input was given for {_names(files)}")
    return {name: _read_npy(path, expected[name]) for name, path in files.items()}


def image_tensor(tensors: Sequence[TensorMetadata], path: Path, batch: int) -> dict[str, Array]:
    """Read a picture for the model's only input, FP32 [N, 3, H, W]: resized, cropped, normalised like ImageNet."""
    if len(tensors) != 1 or len(tensors[0].shape) != 4 or tensors[0].shape[1] != 3 or tensors[0].datatype != "FP32":
        wanted = ", ".join(f"{t.name} {t.datatype} {list(t.shape)}" for t in tensors)
        raise InputError(f"--image needs a model with one FP32 input of shape [N, 3, H, W]; this one takes {wanted}")
    rows, _, height, width = concrete_shape(tensors[0], batch)
    pixels = _read_image(path, height, width)
    normalised = (pixels.astype(np.float32) / 255 - IMAGENET_MEAN) / IMAGENET_DEVIATION
    planes = np.ascontiguousarray(normalised.transpose(2, 0, 1))
    return {tensors[0].name: np.repeat(planes[np.newaxis], rows, axis=0)}


def concrete_shape(tensor: TensorMetadata, batch: int) -> tuple[int, ...]:
    """Return the tensor's shape with `batch` rows. Raises InputError if another dimension is variable."""
    first, *others = tensor.shape
    if any(size < 0 for size in others):
        raise InputError(f"input '{tensor.name}' has open dimensions {list(tensor.shape)}: give it as --input")
    if first >= 0 and batch != 1:
        raise InputError(
            f"input '{tensor.name}' has the fixed shape {list(tensor.shape)}: --batch {batch} does not apply"
        )
    return (batch if first < 0 else first, *others)


def dtype_of(datatype: str) -> np.dtype[np.generic]:
    """Return numpy's dtype for a Triton datatype. Raises InputError for those that have none (BYTES, BF16)."""
    if datatype not in DTYPES:
        raise InputError(f"datatype {datatype} is not supported by this client; it knows {', '.join(DTYPES)}")
    return DTYPES[datatype]


def infer_request(model: str, version: str, tensors: Mapping[str, tuple[str, Array]]) -> pb.ModelInferRequest:
    """Build a ModelInfer request from name -> (datatype, values); the values travel as raw bytes."""
    request = pb.ModelInferRequest(model_name=model, model_version=version)
    for name, (datatype, values) in tensors.items():
        request.inputs.add(name=name, datatype=datatype, shape=values.shape)
        request.raw_input_contents.append(np.ascontiguousarray(values).tobytes())
    return request


def outputs_of(response: pb.ModelInferResponse) -> dict[str, Array]:
    """Return the output tensors of a response by name, without a copy. Only raw contents are understood."""
    if len(response.raw_output_contents) != len(response.outputs):
        contents = len(response.raw_output_contents)
        raise RefusedError(f"the server sent {len(response.outputs)} outputs, but the contents of {contents}")
    return {
        output.name: np.frombuffer(raw, dtype=dtype_of(output.datatype)).reshape(tuple(output.shape))
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }


def _names(mapping: Mapping[str, object]) -> str:
    return ", ".join(f"'{name}'" for name in mapping)


def _read_npy(path: Path, tensor: TensorMetadata) -> Array:
    try:
        values: Array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"cannot read {path} as .npy: {error}") from error
    if not isinstance(values, np.ndarray):
        raise InputError(f"{path} is an archive of arrays, not one .npy array")
    if values.dtype != dtype_of(tensor.datatype):
        raise InputError(f"{path} holds {values.dtype}, but input '{tensor.name}' is {tensor.datatype}")
    return values


def _read_image(path: Path, height: int, width: int) -> Array:
    """Return pixels as uint8 [height][width][3]."""
    try:
        from PIL import Image, UnidentifiedImageError  # noqa: PLC0415 - optional dependency
    except ImportError as error:
        raise InputError("--image needs Pillow: pip install 'gangway-serve[client]'") from error
    try:
        with Image.open(path) as picture:
            rgb = picture.convert("RGB")
    except (OSError, UnidentifiedImageError) as error:
        raise InputError(f"cannot read {path} as a picture: {error}") from error
    scale = max(height, width) / CROP_SHARE / min(rgb.size)
    resized = rgb.resize(
        (max(width, round(rgb.width * scale)), max(height, round(rgb.height * scale))), Image.Resampling.BILINEAR
    )
    left, top = (resized.width - width) // 2, (resized.height - height) // 2
    return np.asarray(resized.crop((left, top, left + width, top + height)))
