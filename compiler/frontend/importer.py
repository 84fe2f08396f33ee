"""Read an ONNX file: parse, check, infer shapes at batch 1. Everything that can be wrong with a file is found here.

Shape inference and the checker copy the whole model, so they are given one without its large weights: milliseconds
instead of seconds.
"""

import math
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import checker, defs, external_data_helper, helper, numpy_helper, shape_inference

from gangway.base.files import file_beside, file_stamp
from gangway.compiler.arguments import NO_DIMENSIONS
from gangway.compiler.errors import ModelError, UnreadableModelError, UnsupportedModelError
from gangway.compiler.frontend.control_flow.branches import has_branches, inline_branches
from gangway.compiler.frontend.control_flow.unrolling import has_loops, unroll_loops
from gangway.compiler.frontend.deciding_inputs import find_deciding_inputs, fix_values
from gangway.compiler.frontend.functions import inline_functions
from gangway.compiler.frontend.graph import PRIVATE_DOMAIN, WIDE_BATCH, Graph, Node, TensorType, without_empty_parts
from gangway.compiler.frontend.halves import widen_halves
from gangway.compiler.frontend.ml_operators import classes_of_zip_maps, drop_zip_maps
from gangway.compiler.frontend.onnx_file import Stretch
from gangway.compiler.frontend.other_domains import define_operators
from gangway.compiler.frontend.sequences import replace_sequences
from gangway.compiler.frontend.shape_inference import (
    copy_types_of_inputs,
    dtype_name,
    forget_declared,
    infer_shapes,
    value_proto,
)
from gangway.compiler.frontend.subgraphs import captured_tensors, graphs_of
from gangway.compiler.kernels.specs import Array
from gangway.compiler.locales import state_locales
from gangway.compiler.model_file import parse, put_in_order
from gangway.compiler.opsets import OWN_DOMAINS, call_own_domain_empty, opset_of, restamp, why_unknown

SMALL_CONSTANT_ELEMENTS = 256  # more than any shape, axes or limits; those must stay visible to shape inference
OLDEST_OPSET = 7  # before that, broadcasting followed attributes that are not read here
_LEAST_IR_VERSION = 4  # since then a weight need not be an input, too
_NO_NAME = re.compile(  # what exporters and people write into a dimension of which they only know that it varies
    r"[\W\d_]*|none|null|nan|any|unk|unknown|undefined|dynamic|unk__\d+|(p2o\.)?dynamicdimension\.\d+|.+_dynamic_axes_\d+",
    re.IGNORECASE,
)


def _tensors_in(message: Any) -> Iterator[Any]:
    """Yield every tensor of a message, however deep: also those of nodes, of graphs in them, and of functions."""
    if isinstance(message, onnx.TensorProto):
        yield message
        return
    for field, value in message.ListFields():
        if field.message_type is not None:
            for part in value if field.is_repeated else (value,):
                yield from _tensors_in(part)


def count_parameters(path: Path) -> int:
    """Return how many numbers the model's weights have. Raises ModelError, OSError."""
    return sum(math.prod(tensor.dims) for tensor in parse(path)[0].graph.initializer)


def deciding_inputs(path: Path) -> tuple[str, ...]:
    """Return the inputs of one integer that decide on branches and shapes. Raises ModelError, OSError."""
    model = parse(path)[0]
    put_in_order(model)
    return find_deciding_inputs(model)


def require_batch(path: Path) -> None:
    """Raise UnsupportedModelError if the first dimension of an input is fixed, so that it cannot be a batch.

    Raises ModelError, OSError.
    """
    model = parse(path)[0]
    initial = {tensor.name for tensor in model.graph.initializer}
    for value in model.graph.input:
        kind = value.type.tensor_type
        dims = kind.shape.dim
        if value.name not in initial and kind.HasField("shape") and not (dims and _is_symbolic(dims[0])):
            shape = [dim.dim_param or "?" if _is_symbolic(dim) else dim.dim_value for dim in dims]
            raise UnsupportedModelError(
                f"max_batch_size is above 0, but input '{value.name}' of the ONNX model has no symbolic first"
                f" dimension, its shape is {shape}: export it with a symbolic first dimension, or set"
                " max_batch_size: 0 and write the batch in dims"
            )


def require_sizes(path: Path) -> None:
    """Raise UnsupportedModelError if an input has a symbolic dimension that is no batch, without reading weights.

    Raises ModelError, OSError.
    """
    model = parse(path)[0]
    _check_scope(model, path)
    _fix_dimensions(model, {tensor.name for tensor in model.graph.initializer}, NO_DIMENSIONS)


def zipped_outputs(path: Path) -> dict[str, tuple[str, ...]]:
    """Return the outputs that are made by a ZipMap, which the served model lacks, with the names of their classes.

    Raises ModelError, OSError.
    """
    return _zipped_outputs(path, file_stamp(path))


@lru_cache(maxsize=1)
def _zipped_outputs(path: Path, stamp: tuple[int, ...]) -> dict[str, tuple[str, ...]]:
    return classes_of_zip_maps(parse(path)[0])


def batch_symbols(path: Path) -> dict[str, str]:
    """Return what the first dimension of each input is called. Raises ModelError, OSError."""
    return _batch_symbols(path, file_stamp(path))


@lru_cache(maxsize=1)
def _batch_symbols(path: Path, stamp: tuple[int, ...]) -> dict[str, str]:
    graph = parse(path)[0].graph
    return {value.name: _name_of(value, 0) for value in graph.input if value.type.tensor_type.shape.dim}


def input_symbols(path: Path) -> dict[str, tuple[str, ...]]:
    """Return what the dimensions of each input are called, fixed ones by nothing. Raises ModelError, OSError."""
    model = parse(path)[0]
    _check_scope(model, path)
    initial = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in initial]
    return {
        value.name: tuple(_name_of(value, axis) for axis in range(len(value.type.tensor_type.shape.dim)))
        for value in inputs
    }


def read_graph(path: Path, dimensions: Mapping[str, int] = NO_DIMENSIONS) -> Graph:
    """Return the model in the ONNX file `path`, with these values for symbolic dimensions (see `dimension_name`).

    Raises ModelError for a broken file, UnsupportedModelError for ONNX outside of the compiler's scope, and OSError.
    """
    try:
        return _read(path, dimensions)
    except (ModelError, OSError, MemoryError):
        raise
    except Exception as error:  # damaged bytes surface as any exception in the Python half of onnx
        raise ModelError(f"{path.name} is damaged: {_first_lines(error)}") from error


def _read(path: Path, dimensions: Mapping[str, int]) -> Graph:
    model, constants = _opened_again(path) if dimensions else open_file(path)
    model.ir_version = max(model.ir_version, _LEAST_IR_VERSION)
    dimensions, values = _without_values(model, constants, dimensions)
    constants |= fix_values(model, values)
    batched = _fix_dimensions(model, constants, dimensions)
    if has_branches(model) and inline_branches(model, *([_many_rows(model, constants)] if batched else [])):
        constants |= _take_constants(model, path, {})
    if has_loops(model) and unroll_loops(model, *([_many_rows(model, constants)] if batched else [])):
        constants |= _take_constants(model, path, {})
    define_operators(model, constants, batched)
    wide_shapes = _shapes_of_many(model, constants) if batched else {}
    unknown = [
        node
        for node in model.graph.node
        if node.domain != PRIVATE_DOMAIN and not defs.has(node.op_type, domain=node.domain)
    ]
    if unknown:
        _state_types(model, unknown)
    try:
        # Inference comes first, since the checker wants shapes of outputs, which exporters may leave out.
        model = _infer(model)
        _check_ranks(model.graph.output)
        checker.check_model(model)
    except (checker.ValidationError, shape_inference.InferenceError) as error:
        raise ModelError(f"invalid ONNX model: {_first_lines(error)}") from error
    graph = model.graph
    types = _types([*graph.input, *graph.value_info, *graph.output], constants)
    made = Graph(
        inputs=tuple(value.name for value in graph.input if value.name not in constants),
        outputs=tuple(value.name for value in graph.output),
        batched=batched,
        nodes=tuple(graph_node(node) for node in graph.node),
        constants=constants,
        types=types,
        wide_shapes=wide_shapes,
        opset=opset_of(model),
        domains={item.domain: item.version for item in model.opset_import if item.domain not in OWN_DOMAINS},
        open_types=_open_types(graph.output, types),
    )
    for node in made.nodes:
        _refuse_parts(node, made.types)
    made = without_empty_parts(made)
    if batched:
        _refuse_empty(made)
    return made


def _state_types(model: Any, nodes: Sequence[Any]) -> None:
    """Declare what nodes compute that onnx does not know, as onnxruntime infers it.

    Raises UnsupportedModelError for an operator that onnxruntime does not know, or that is in no domain but ONNX's own.
    """
    from gangway.artifact.onnx_session import element_type, open_session  # noqa: PLC0415 - few models need it

    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    outputs = {value.name: value for value in model.graph.output}
    wanted = [name for node in nodes for name in node.output if name]
    probe.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in wanted if name not in outputs)
    odd = next((node for node in nodes if node.domain in OWN_DOMAINS), nodes[0])
    refusal = UnsupportedModelError(f"node '{_name(odd)}' ({odd.op_type}): no such ONNX operator")
    if odd.domain in OWN_DOMAINS:
        raise refusal
    try:
        restamp(probe)
        found = open_session(probe.SerializeToString(), optimise=False).get_outputs()
    except Exception as error:  # onnxruntime's own exceptions have no common base
        raise refusal from error
    for value in found:
        if value.name in wanted and value.type.startswith("tensor(") and all(isinstance(n, int) for n in value.shape):
            kind = TensorType(tuple(value.shape), element_type(value.type))
            (outputs.get(value.name) or model.graph.value_info.add()).CopyFrom(value_proto(value.name, kind))


def open_file(path: Path) -> tuple[Any, dict[str, Array]]:
    """Return the model with all sizes open, without functions and halves, and its initializers.

    The large ones are inputs of the graph, too. Raises ModelError, OSError.
    """
    model, weights = parse(path)
    _check_scope(model, path)
    call_own_domain_empty(model)
    put_in_order(model)
    state_locales(model)
    drop_zip_maps(model)
    constants = _take_constants(model, path, weights)
    model = inline_functions(model)
    replace_sequences(model, constants)
    widen_halves(model, constants)
    return model, constants


def _opened_again(path: Path) -> tuple[Any, dict[str, Array]]:
    """Return the same, quickly if this process did so last: for one size of a model after the other."""
    model, constants = _last_opened(path, file_stamp(path))
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy, dict(constants)


@lru_cache(maxsize=1)
def _last_opened(path: Path, stamp: tuple[int, ...]) -> tuple[Any, dict[str, Array]]:
    return open_file(path)


def _infer(model: Any) -> Any:
    """Return the model with inferred types. Raises shape_inference.InferenceError if it contradicts itself.

    Wrongly declared shapes of outputs are no reason to refuse it: onnxruntime computes it, with a warning.
    """
    copy_types_of_inputs(model)
    try:
        return infer_shapes(model)
    except shape_inference.InferenceError:
        forget_declared(model)
    return infer_shapes(model)


def _check_ranks(outputs: Iterable[Any]) -> None:
    """Raise UnsupportedModelError for an output of unknown rank: the file may be right all the same."""
    for value in outputs:
        if value.type.HasField("tensor_type") and not value.type.tensor_type.HasField("shape"):
            raise UnsupportedModelError(f"the rank of output '{value.name}' depends on data or cannot be inferred")


def _shapes_of_many(model: Any, constants: dict[str, Array]) -> dict[str, tuple[int, ...]]:
    """Return the shapes that can be inferred in a batch of WIDE_BATCH."""
    try:
        wide = infer_shapes(_many_rows(model, constants))
    except shape_inference.InferenceError as error:
        raise UnsupportedModelError(f"a batch of {WIDE_BATCH} is impossible: {_first_lines(error)}") from error
    values = [*wide.graph.input, *wide.graph.value_info, *wide.graph.output]
    return {name: kind.shape for name, kind in _types(values, constants).items()}


def _many_rows(model: Any, constants: Container[str]) -> Any:
    """Return the model for a batch of WIDE_BATCH."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    for value in wide.graph.input:
        if value.name not in constants:
            value.type.tensor_type.shape.dim[0].dim_value = WIDE_BATCH
    forget_declared(wide)
    return wide


def _check_scope(model: Any, path: Path) -> None:
    if any(0 < opset_of(importer) < OLDEST_OPSET for importer in (model, *model.functions)):
        raise UnsupportedModelError(f"{path.name} uses an operator set older than {OLDEST_OPSET}")
    if why := why_unknown(model):
        raise UnreadableModelError(why)
    if model.graph.sparse_initializer:
        raise UnsupportedModelError("sparse weights are not supported")


def _take_constants(model: Any, path: Path, weights: Mapping[str, Stretch]) -> dict[str, Array]:
    """Return the initializers as arrays; the large ones become inputs of the graph, which have only a shape."""
    constants: dict[str, Array] = {}
    declared = {value.name for value in model.graph.input}
    kept = []
    with path.open("rb") as file:
        for tensor in model.graph.initializer:
            constants[tensor.name] = value = _array(tensor, path.parent, file, weights.get(tensor.name))
            if value.size <= SMALL_CONSTANT_ELEMENTS:
                kept.append(numpy_helper.from_array(value, tensor.name))
            elif tensor.name not in declared:
                model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, value.shape))
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)
    return constants


def _array(tensor: Any, folder: Path, file: BufferedReader, stretch: Stretch | None) -> Array:
    try:
        if stretch is None or tensor.raw_data:  # the latter: another tensor of the same name
            alone = onnx.TensorProto()  # to_array keeps external data in the message that it is given
            alone.CopyFrom(tensor)
            if external_data_helper.uses_external_data(tensor):
                alone.raw_data = _external_content(tensor, folder)
                alone.data_location = onnx.TensorProto.DEFAULT
            return numpy_helper.to_array(alone)
        array = np.empty(tuple(tensor.dims), helper.tensor_dtype_to_np_dtype(tensor.data_type))
        if array.nbytes != stretch.size_bytes:
            raise ValueError(f"{stretch.size_bytes} bytes instead of {array.nbytes}")
        file.seek(stretch.begin)
        if file.readinto(array.reshape(-1).view(np.uint8).data) != stretch.size_bytes:
            raise ValueError("the file became shorter")
        return array
    except (ValueError, TypeError, OSError, KeyError, checker.ValidationError) as error:
        raise ModelError(f"weights '{tensor.name}': {_first_lines(error)}") from error


def _external_content(tensor: Any, folder: Path) -> bytes:
    """Return the bytes of a tensor that lie in another file, which may be a link. Raises ValueError, OSError."""
    place = external_data_helper.ExternalDataInfo(tensor)
    with file_beside(folder, place.location).open("rb") as file:
        file.seek(place.offset or 0)
        return file.read(place.length if place.length else -1)


def _fix_dimensions(model: Any, constants: Container[str], dimensions: Mapping[str, int]) -> bool:
    """Give symbolic dimensions their values, 1 to the batch; return whether the model has a symbolic batch.

    Forgets what the file says of intermediate shapes and of symbols in outputs: both are inferred.
    """
    inputs = [value for value in model.graph.input if value.name not in constants]
    _give_values(inputs, dimensions)
    batched = bool(inputs) and all(_has_open_batch(value) for value in inputs)
    for value in inputs:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if _is_symbolic(dim) and (axis or not batched):
                why = "only the first one, the batch, may be" if axis else "no batch, since not all inputs have it"
                name = _name_of(value, axis)
                raise UnsupportedModelError(f"input '{value.name}': dimension {axis} is dynamic, '{name}'; {why}")
    for value in [*inputs, *model.graph.output]:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if _is_symbolic(dim) and axis == 0 and batched:
                dim.dim_value = 1
            elif _is_symbolic(dim):
                dim.Clear()
    del model.graph.value_info[:]
    return batched


def _without_values(
    model: Any, constants: Container[str], dimensions: Mapping[str, int]
) -> tuple[Mapping[str, int], Mapping[str, int]]:
    """Return the sizes of dimensions, and the values of inputs, which are called by the inputs' names."""
    inputs = [value for value in model.graph.input if value.name not in constants]
    names = {_name_of(value, axis) for value in inputs for axis in range(len(value.type.tensor_type.shape.dim))}
    values = {value.name: dimensions[value.name] for value in inputs if value.name in dimensions.keys() - names}
    return {name: size for name, size in dimensions.items() if name not in values}, values


def _give_values(inputs: Sequence[Any], dimensions: Mapping[str, int]) -> None:
    names: list[str] = []
    for value in inputs:
        if not value.type.HasField("tensor_type") or not value.type.tensor_type.HasField("shape"):
            raise UnsupportedModelError(f"input '{value.name}' is not a tensor of known rank")
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            name = _name_of(value, axis)
            names.append(name)
            if dimensions.get(name, 0) < 0:
                raise UnsupportedModelError(f"dimension '{name}' cannot have the size {dimensions[name]}")
            if name in dimensions:
                dim.dim_value = dimensions[name]
    if unknown := set(dimensions).difference(names):
        known = ", ".join(f"'{name}'" for name in dict.fromkeys(filter(None, names))) or "none"
        raise UnsupportedModelError(f"no input has a symbolic dimension '{min(unknown)}'; there are: {known}")


def _has_open_batch(value: Any) -> bool:
    dims = value.type.tensor_type.shape.dim
    return bool(dims) and _is_symbolic(dims[0])


def _name_of(value: Any, axis: int) -> str:
    dim = value.type.tensor_type.shape.dim[axis]
    return dimension_name(value.name, axis, (dim.dim_param or None) if _is_symbolic(dim) else dim.dim_value)


def dimension_name(tensor: str, axis: int, size: int | str | None) -> str:
    """Return what a dimension is called: its symbol, the place of a nameless one (`x.1`), nothing for a fixed size."""
    return "" if isinstance(size, int) and size >= 0 else symbol_of(size) or f"{tensor}.{axis}"


def symbol_of(size: int | str | None) -> str:
    """Return the name that a file gives to a dimension; empty if it is fixed, or only said to vary."""
    return size if isinstance(size, str) and not _NO_NAME.fullmatch(size) else ""


def _is_symbolic(dim: Any) -> bool:
    return not dim.HasField("dim_value") or dim.dim_value < 0


def graph_node(node: Any) -> Node:
    """Return a node of a file. Raises UnsupportedModelError for weights in another file in a graph inside."""
    attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    captured = captured_tensors(node)
    inside = (tensor for graph in graphs_of(node) for tensor in _tensors_in(graph))
    if any(external_data_helper.uses_external_data(tensor) for tensor in inside):
        raise UnsupportedModelError(
            f"node '{_name(node)}' ({node.op_type}): a graph inside has weights in another file"
        )
    domain = "" if node.domain in OWN_DOMAINS else node.domain
    operator = node.op_type if domain in ("", PRIVATE_DOMAIN) else f"{domain}.{node.op_type}"
    return Node(_name(node), operator, (*node.input, *captured), tuple(node.output), attributes, domain, captured)


def _name(node: Any) -> str:
    return str(node.name or next(iter(node.output), node.op_type))


def _types(values: Iterable[Any], constants: dict[str, Array]) -> dict[str, TensorType]:
    """Return the types that are fully known; a shape that depends on data is left out."""
    types = {}
    for value in values:
        tensor = value.type.tensor_type
        dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim]
        if value.name in constants or not tensor.HasField("shape") or min(dims, default=0) < 0:
            continue
        types[value.name] = TensorType(tuple(dims), dtype_name(tensor.elem_type))
    return types


def _open_types(outputs: Iterable[Any], types: Container[str]) -> dict[str, TensorType]:
    """Return the types of outputs whose rank is known, but not their shape; sizes that are not known are -1."""
    found = {}
    for value in outputs:
        tensor = value.type.tensor_type
        if value.name not in types and tensor.elem_type and tensor.HasField("shape"):
            shape = tuple(-1 if _is_symbolic(dim) else dim.dim_value for dim in tensor.shape.dim)
            found[value.name] = TensorType(shape, dtype_name(tensor.elem_type))
    return found


def _refuse_empty(graph: Graph) -> None:
    """Raise ModelError if a tensor that is computed from a batch has no numbers.

    Inputs without numbers, such as a decoder's past at the first step, are possible where only their shapes are read.
    """
    read = {name for node in graph.nodes if node.operator not in ("Shape", "Size") for name in node.inputs}
    for name, kind in graph.types.items():
        may_be_empty = name in graph.inputs and name not in (*read, *graph.outputs)
        if 0 in kind.shape and kind.shape != (0,) and not may_be_empty:  # a vector may be the shape of a number
            raise ModelError(f"tensor '{name}' is empty: shape {list(kind.shape)}")


def _refuse_parts(node: Node, types: Mapping[str, TensorType]) -> None:
    """Raise ModelError if a Split has another number of parts than outputs, or more than there are numbers to give."""
    parts = node.attributes.get("num_outputs", 0)
    if node.operator != "Split" or not parts:
        return
    if parts != len(node.outputs):
        raise ModelError(f"node '{node.name}' (Split): num_outputs is {parts}, but it has {len(node.outputs)} outputs")
    kind, axis = types.get(node.inputs[0]), node.attributes.get("axis", 0)
    if kind is None:
        return
    length = kind.shape[axis]
    each = -(-length // parts)
    if (parts - 1) * each >= length:
        raise ModelError(
            f"node '{node.name}' (Split): {length} along axis {axis} cannot be {parts} parts of {max(each, 1)},"
            " of which the last one may be smaller, but not empty"
        )


def _first_lines(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
