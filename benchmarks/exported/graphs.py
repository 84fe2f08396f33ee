"""Graphs without weights: what git keeps of exported files, and the files that they become again.

A large initializer whose content does not compress is left out; numbers drawn from its name take its place. So a file
has the graph, the sizes and the small constants of the exporter's, but other weights.
"""

import io
import json
import lzma
import tarfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import external_data_helper, helper, numpy_helper

from gangway.compiler.frontend.importer import dimension_name

ARCHIVES = Path(__file__).parent / "graphs"
LEAST_BYTES, LEAST_FLOAT_BYTES = 512, 64  # of an initializer that may be left out
MOST_KEPT = 0.2  # of its bytes, compressed, of the first ones: a table or a mask is kept
MOST_COMPRESSED = 1 << 16
MOST_DRAWN = 1 << 16  # numbers of an initializer; they are repeated
LEFT_OUT = "left out"
LEAST_VARIED, MOST_VARIED = 4, 1e3  # numbers of a weight, and the largest of them
LEAST_SCALE = 1e-2  # a smaller number switches a layer off
Request = Mapping[str, Any]


@dataclass(frozen=True)
class Exported:
    """A file with its description (`exporters/files.py`)."""

    name: str
    path: Path
    described: Mapping[str, Any]

    @property
    def asks(self) -> Sequence[Mapping[str, int]]:
        """The sizes of each request, by the names of the description."""
        asks: Sequence[Mapping[str, int]] = self.described["asks"]
        return asks

    def inputs(self) -> dict[str, tuple[Mapping[str, Any], Sequence[str]]]:
        """Return the description of each input by the file's name for it, and what the file calls its dimensions.

        Keras writes some constants as inputs that no description has. A converter may have made numbers float16.
        """
        model = onnx.load(self.path, load_external_data=False)
        initial = {tensor.name for tensor in model.graph.initializer}
        inputs = [value for value in model.graph.input if value.name not in initial]
        described = list(self.described["inputs"].values())
        found: dict[str, tuple[Mapping[str, Any], Sequence[str]]] = {}
        for number, value in enumerate(inputs):
            dims = value.type.tensor_type.shape.dim
            names = ["" if dim.HasField("dim_value") else dim.dim_param for dim in dims]
            shape = [dim.dim_value for dim in dims]
            other = {"shape": shape, "dtype": "float32", "draw": "uniform", "low": 0.5, "high": 1.5}
            element = value.type.tensor_type.elem_type
            dtype = (
                {} if element == onnx.TensorProto.STRING else {"dtype": helper.tensor_dtype_to_np_dtype(element).name}
            )
            found[value.name] = ({**(described[number] if number < len(described) else other), **dtype}, names)
        return found

    def sizes(self, ask: Mapping[str, int]) -> dict[str, int]:
        """Return the sizes of a request by the names that the file has for them, without that of the batch."""
        return {
            dimension_name(name, axis, called or None): int(ask.get(size, size))
            for name, (described, names) in self.inputs().items()
            for axis, (called, size) in enumerate(zip(names, described["shape"], strict=True))
            if isinstance(size, str) and size != "B"
        }

    def requests(self) -> Iterator[dict[str, Any]]:
        """Yield the arrays of each request."""
        inputs = self.inputs()
        for number, ask in enumerate(self.asks):
            random = np.random.default_rng([zlib.crc32(self.name.encode()), number])
            yield {name: _drawn(random, described, ask) for name, (described, _) in inputs.items()}


def exported_files(folder: Path) -> list[Exported]:
    """Return the files below a folder that have a description."""
    return [
        Exported(path.stem, path.with_suffix(".onnx"), json.loads(path.read_text()))
        for path in sorted(folder.rglob("*.json"))
        if path.with_suffix(".onnx").exists()
    ]


def pack(files: Sequence[Exported], archive: Path) -> None:
    """Write the graphs of files to an archive."""
    archive.parent.mkdir(exist_ok=True)
    with lzma.open(archive, "wb", preset=6) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for file in files:
            model = onnx.load(file.path)  # with its external data
            for tensor in _weights(model):
                _leave_out(tensor)
            del model.graph.value_info[:]
            for node in (*model.graph.node, *(node for each in model.functions for node in each.node)):
                del node.metadata_props[:]  # where in Python it comes from
            _add(tar, f"{file.name}.onnx", model.SerializeToString())
            _add(tar, f"{file.name}.json", json.dumps(file.described).encode())


def vary(path: Path, target: Path) -> None:
    """Write a file in which weights that are one number, again and again, differ.

    Networks begin with biases of 0, variances of 1, and layers that a scale or a head of 0 switches off. Answers would
    not show what is wrong there. Scales of quantised numbers stay.
    """
    model = onnx.load(path)
    kept = {name for node in model.graph.node if _is_quantised(node.op_type) for name in node.input}
    for name, tensor in _named_weights(model):
        array = numpy_helper.to_array(tensor)
        if name in kept or array.dtype.kind != "f" or array.size < LEAST_VARIED or np.ptp(array):
            continue
        value = float(array.flat[0])
        if not abs(value) <= MOST_VARIED:  # what is masked, and what is no number
            continue
        random = np.random.default_rng(zlib.crc32(f"{name} {tensor.dims}".encode()))
        drawn = random.uniform(-0.5, 0.5, array.shape)
        drawn = drawn / max(1.0, np.sqrt(np.prod(array.shape[1:]))) if abs(value) < LEAST_SCALE else value * (1 + drawn)
        tensor.CopyFrom(numpy_helper.from_array(drawn.astype(array.dtype), tensor.name))
    onnx.save(model, target)


def _is_quantised(operator: str) -> bool:
    return "Quant" in operator or "NBits" in operator or operator.startswith("QLinear")


def names_in(archive: Path) -> list[str]:
    """Return the names of the files of an archive."""
    with lzma.open(archive) as packed, tarfile.open(fileobj=packed) as tar:
        return [Path(name).stem for name in tar.getnames() if name.endswith(".onnx")]


def unpack(archive: Path, folder: Path, part: slice = slice(None)) -> list[Exported]:
    """Return the files of an archive, or a part of them, written to a folder."""
    with lzma.open(archive) as packed, tarfile.open(fileobj=packed) as tar:
        members = tar.getmembers()
        pairs = list(zip(members[::2], members[1::2], strict=True))[part]
        tar.extractall(folder, [member for pair in pairs for member in pair], filter="data")
    for path in folder.glob("*.onnx"):
        model = onnx.load(path)
        for tensor in _weights(model):
            if tensor.doc_string == LEFT_OUT:
                _fill(tensor)
        onnx.save(model, path)
    return exported_files(folder)


def _weights(model: Any) -> Iterator[Any]:
    return (tensor for _, tensor in _named_weights(model))


def _named_weights(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the initializers, and the tensors of constants, which some exporters write instead."""
    yield from ((tensor.name, tensor) for tensor in model.graph.initializer)
    for node in model.graph.node:
        if node.op_type == "Constant":
            yield from ((node.output[0], item.t) for item in node.attribute if item.name == "value")


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def _leave_out(tensor: Any) -> None:
    """Take the content out of a large initializer."""
    if external_data_helper.uses_external_data(tensor) or tensor.data_type == onnx.TensorProto.STRING:
        return
    array = numpy_helper.to_array(tensor)
    if not array.any():  # weights times a scale of 0: their signs would be kept
        tensor.CopyFrom(numpy_helper.from_array(np.zeros_like(array), tensor.name))
        return
    content = array.tobytes()
    sample = content[:MOST_COMPRESSED]
    least_bytes = LEAST_FLOAT_BYTES if array.dtype.kind == "f" else LEAST_BYTES
    if len(content) < least_bytes or len(zlib.compress(sample)) < MOST_KEPT * len(sample):
        return
    kind, dims, name = tensor.data_type, list(tensor.dims), tensor.name
    limits = (int(array.min()), int(array.max())) if array.dtype.kind in "iu" else ()
    tensor.Clear()
    tensor.name, tensor.data_type, tensor.doc_string = name, kind, LEFT_OUT
    tensor.dims.extend(dims)
    if limits:  # of indices, and of weights that are integers
        tensor.metadata_props.add(key="limits", value=json.dumps(limits))


def _fill(tensor: Any) -> None:
    """Draw the content of an initializer that was left out."""
    random = np.random.default_rng(zlib.crc32(f"{tensor.name} {tensor.dims}".encode()))
    shape, dtype = tuple(tensor.dims), helper.tensor_dtype_to_np_dtype(tensor.data_type)
    count = min(int(np.prod(shape)), MOST_DRAWN)
    if tensor.metadata_props:
        low, high = json.loads(tensor.metadata_props[0].value)
        drawn = random.integers(low, high + 1, count)
    elif dtype == np.bool_:
        drawn = random.integers(0, 2, count)
    else:
        drawn = random.standard_normal(count) / max(1.0, np.sqrt(np.prod(shape[1:])))
        drawn = np.abs(drawn) if len(shape) < 2 else drawn  # a variance is positive
    tensor.CopyFrom(numpy_helper.from_array(np.resize(drawn.astype(dtype), shape), tensor.name))


def _drawn(random: np.random.Generator, described: Request, ask: Mapping[str, int]) -> Any:
    shape = [ask.get(size, size) for size in described["shape"]]
    low, high = described.get("low", 0), described.get("high", 1)
    match described["draw"]:
        case "words":
            return np.asarray(random.choice(described["choices"], shape), object)
        case "normal":
            drawn: Any = random.standard_normal(shape)
        case "uniform":
            drawn = random.uniform(low, high, shape)
        case "integers":
            drawn = random.integers(int(low), max(int(low) + 1, int(high)), shape)
        case "ones":
            drawn = np.ones(shape)
        case "mask":  # rows are padded, but for the first
            drawn = np.arange(shape[1]) < np.maximum(1, shape[1] - 2 * np.arange(shape[0]))[:, None]
        case other:
            raise ValueError(other)
    return np.asarray(drawn).astype(described["dtype"])
