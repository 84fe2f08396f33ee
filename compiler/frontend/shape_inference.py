"""What is known of tensors without a request: types, shapes, and values, by onnx and beyond it.

`infer_shapes` computes what depends on known shapes only and gives it to onnx's inference as constants, until nothing
new is found. Shapes also go backwards through operators that keep them, from outputs whose shape the model declares.
`evaluate` computes a node all of whose inputs are constants, by the meaning that it has in the model's operator set.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import onnx
from onnx import defs, helper, numpy_helper, shape_inference

from gangway.compiler.errors import ModelError
from gangway.compiler.frontend.control_flow.loops import loop_types
from gangway.compiler.frontend.graph import PRIVATE_DOMAIN, Node, TensorType
from gangway.compiler.frontend.shapes.rules import has_rule, shape_by_rule
from gangway.compiler.frontend.subgraphs import rename_captured
from gangway.compiler.kernels.specs import Array
from gangway.compiler.opsets import OWN_DOMAINS, add_import, imports, means_the_same, opset_of, restamp

RANDOM = {"RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"}
_MOST_ELEMENTS = 256  # of a constant that a shape can depend on
_SMALL_BYTES = 4096  # of an input whose content is compared
_MOST_HELD = 1 << 14  # answers that are held,
_MOST_HELD_BYTES = 256 << 20  # and all of them together
_ROUNDS = 64  # more than any exporter chains up; each finds everything that follows from known shapes at once
_FOLLOWED_NAMES = """
    Abs Add And Cast CastLike Ceil Clip Concat Constant ConstantOfShape Div Equal Expand Floor Gather Greater
    GreaterOrEqual Identity Less LessOrEqual Max Min Mod Mul Neg Not Or Range ReduceMax ReduceMin ReduceProd ReduceSum
    Reshape Slice Squeeze Sub Sum Tile Transpose Unsqueeze Where Xor
"""
_FOLLOWED = set(_FOLLOWED_NAMES.split())
_KEEP_SHAPE = {"Sqrt", "Log", "Exp", "Abs", "Neg", "Cast", "CastLike", "Identity", "Reciprocal"}


def infer_shapes(model: Any, strict: bool = True) -> Any:
    """Return the model with all types that can be known. Raises shape_inference.InferenceError if it contradicts."""
    result = _infer(model, strict)
    if not any(_open(result)):
        return result
    return _with_types(model, *_follow(model, result, strict))


def known_values(model: Any) -> dict[str, Array]:
    """Return the small tensors that shapes and constants determine. Raises shape_inference.InferenceError."""
    known = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    for node in model.graph.node:
        value = _evaluate(node, {}, {}, opset_of(model)) if node.op_type == "Constant" else None
        if value is not None:
            known[node.output[0]] = value
    return known | _follow(model, _infer(model, False), False)[1]


def _infer(model: Any, strict: bool) -> Any:
    """Return the model as onnx infers it and, where onnxruntime computes other shapes, as that does."""
    ruled = [index for index, node in enumerate(model.graph.node) if has_rule(node)]
    try:
        result = _infer_by_onnx(model, strict)
    except shape_inference.InferenceError:  # what the file declares may be right, and onnx's inference wrong
        if not ruled:
            raise
        result = None
    is_checked = all(node.domain in OWN_DOMAINS for node in model.graph.node)  # else nothing is an error to onnx
    if is_checked and result and not next(_contradictions(result, ruled), None):
        return result
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    add_import(probe, PRIVATE_DOMAIN, 1)
    inferred = _infer_by_onnx(_without_declarations(probe), False)
    while found := next(_contradictions(inferred, ruled), None):
        index, kinds = found
        probe.graph.node[index].domain = PRIVATE_DOMAIN  # so onnx takes what is declared
        _declare(probe.graph, kinds)
        inferred = _infer_by_onnx(_without_declarations(probe), False)
    _declare(probe.graph, tensor_types(inferred.graph.output))
    result = _infer_by_onnx(probe, strict)
    for index in ruled:
        result.graph.node[index].CopyFrom(model.graph.node[index])
    del result.opset_import[:]
    result.opset_import.extend(model.opset_import)
    return result


def _infer_by_onnx(model: Any, strict: bool) -> Any:
    return shape_inference.infer_shapes(model, check_type=True, strict_mode=strict, data_prop=True)


def _contradictions(model: Any, ruled: Sequence[int]) -> Iterator[tuple[int, dict[str, TensorType]]]:
    """Yield nodes, by number, whose outputs have other shapes by our rules; and the outputs' types, -1 if open."""
    graph = model.graph
    read = {name for index in ruled for name in graph.node[index].input}
    if not read:
        return
    stated = {value.name: value for value in (*graph.input, *graph.value_info, *graph.output)}
    values: dict[str, Array] = {}
    known = tensor_types(stated.values())
    for tensor in graph.initializer:
        known[tensor.name] = TensorType(tuple(tensor.dims), dtype_name(tensor.data_type))
        if tensor.name in read and math.prod(tensor.dims) <= _MOST_ELEMENTS:
            values[tensor.name] = numpy_helper.to_array(tensor)
    for node in graph.node:
        if (
            node.op_type == "Constant"
            and node.output[0] in read
            and node.attribute
            and node.attribute[0].name == "value"
        ):
            values[node.output[0]] = numpy_helper.to_array(node.attribute[0].t)
    for index in ruled:
        node = graph.node[index]
        if not has_rule(node) or node.output[0] not in stated:
            continue
        try:
            shape = shape_by_rule(node, known, values)
        except KeyError:  # an input is not known yet
            continue
        names = [name for name in node.output if name]
        if shape is None and node.output[0] in known:
            yield index, {name: TensorType((-1,) * len(known[name].shape), known[name].dtype) for name in names}
        elif shape is not None and (node.output[0] not in known or known[node.output[0]].shape != shape):
            elements = {name: stated[name].type.tensor_type.elem_type for name in names}
            yield index, {name: TensorType(shape, dtype_name(element)) for name, element in elements.items()}


def _without_declarations(model: Any) -> Any:
    """Return the model without the shapes that its file declares of its outputs, but for nodes of ours."""
    ours = {name for node in model.graph.node if node.domain == PRIVATE_DOMAIN for name in node.output}
    result = onnx.ModelProto()
    result.CopyFrom(model)
    for value in result.graph.output:
        if value.name not in ours:
            value.type.tensor_type.ClearField("shape")
    return result


def _declare(graph: Any, kinds: Mapping[str, TensorType]) -> None:
    """State the types of tensors in place of what was stated."""
    declared = {value.name: value for value in (*graph.value_info, *graph.output)}
    for name, kind in kinds.items():
        (declared.get(name) or graph.value_info.add()).CopyFrom(value_proto(name, kind))


def _follow(model: Any, result: Any, strict: bool) -> tuple[Any, dict[str, Array]]:
    """Return the model with all types that can be known, in which some nodes are the values beside it."""
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    folded: dict[str, Array] = {}
    for _ in range(_ROUNDS):
        known = tensor_types([*result.graph.input, *result.graph.value_info, *result.graph.output])
        found = _fold(probe, known)
        folded |= found
        stated = [_state_loops(probe, known), _state_private(probe, known)]
        if not _go_back(probe, result, known) and not found and not any(stated):
            break
        result = _infer(probe, strict)
    return result, folded


def _open(model: Any) -> Iterator[str]:
    """Outputs of nodes whose shape is not known."""
    known = tensor_types([*model.graph.value_info, *model.graph.output])
    return (name for node in model.graph.node for name in node.output if name and name not in known)


def _fold(model: Any, types: dict[str, TensorType]) -> dict[str, Array]:
    """Turn small nodes that depend on known shapes and constants only into initializers; return those by name.

    Not into Constant nodes: these hold floats only before opset 9.
    """
    values = {tensor.name: tensor for tensor in model.graph.initializer if math.prod(tensor.dims) <= _MOST_ELEMENTS}
    constants = {name: numpy_helper.to_array(tensor) for name, tensor in values.items()}
    opset, folded, kept = opset_of(model), {}, []
    for node in model.graph.node:
        found = _evaluate(node, constants, types, opset)
        if found is not None:
            constants[node.output[0]] = found
        if found is None or node.op_type == "Constant":
            kept.append(node)
        else:
            folded[node.output[0]] = found
    if folded:
        del model.graph.node[:]
        model.graph.node.extend(kept)
        model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in folded.items())
    return folded


def _evaluate(node: Any, constants: dict[str, Array], types: dict[str, TensorType], opset: int) -> Array | None:
    """Return the value of a node if it is known and small."""
    if node.op_type in ("Shape", "Size") and (node.input[0] in types or node.input[0] in constants):
        measured = constants if node.input[0] in constants else types
        shape = np.array(measured[node.input[0]].shape, np.int64)
        if node.op_type == "Size":
            return np.array(shape.prod(), np.int64)
        span = {item.name: item.i for item in node.attribute}
        return np.asarray(shape[span.get("start", 0) : span.get("end")])
    if len(node.output) != 1 or any(name and name not in constants for name in node.input):
        return None
    kind = types.get(node.output[0])
    if kind and (node.op_type not in _FOLLOWED or math.prod(kind.shape) > _MOST_ELEMENTS):
        return None
    try:
        array = evaluate_proto(node, constants, opset)[node.output[0]]
    except Exception:  # whatever onnxruntime raises: the value stays unknown
        return None
    return array if array.size <= _MOST_ELEMENTS else None


def _state_loops(model: Any, known: dict[str, TensorType]) -> bool:
    """Declare what is known of the results of loops; return whether there were any to declare."""
    found = {
        name: kind
        for node in model.graph.node
        if node.op_type == "Loop" and node.domain in OWN_DOMAINS and known.keys().isdisjoint(node.output)
        for name, kind in loop_types(node, model, known, _types_in).items()
    }
    model.graph.value_info.extend(value_proto(name, kind) for name, kind in found.items())
    return bool(found)


def _types_in(model: Any) -> dict[str, TensorType]:
    graph = infer_shapes(model, strict=False).graph
    return tensor_types([*graph.input, *graph.value_info, *graph.output])


def _state_private(model: Any, known: Mapping[str, TensorType]) -> bool:
    """Declare the outputs of private operators with known inputs; return whether there were any to declare."""
    declared = {value.name for value in model.graph.value_info}
    changed = False
    for node in model.graph.node:
        if node.domain == PRIVATE_DOMAIN and node.input[0] in known and node.output[0] not in declared:
            (width,) = (item.i for item in node.attribute if item.name == "outputs")
            kind = known[node.input[0]]
            model.graph.value_info.append(
                value_proto(node.output[0], TensorType((*kind.shape[:-1], width), kind.dtype))
            )
            changed = True
    return changed


def _go_back(model: Any, inferred: Any, known: dict[str, TensorType]) -> bool:
    """Declare the shapes of inputs of shape-keeping operators with known outputs; return whether there were any."""
    elements = {value.name: value.type.tensor_type.elem_type for value in inferred.graph.value_info}
    declared = {value.name for value in model.graph.value_info}
    initial = {tensor.name for tensor in model.graph.initializer}
    changed = False
    for node in reversed(model.graph.node):
        source = node.input[0] if node.op_type in _KEEP_SHAPE else ""
        element = elements.get(source, 0)
        if not element or source in known or source in declared or source in initial or node.output[0] not in known:
            continue
        dtype = dtype_name(element)
        known[source] = TensorType(known[node.output[0]].shape, dtype)
        model.graph.value_info.append(value_proto(source, known[source]))
        changed = True
    return changed


def _with_types(model: Any, inferred: Any, folded: dict[str, Array]) -> Any:
    """Return the model with the types of another one, which has the same tensors, and of those folded there."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    values = {name: value_proto(name, TensorType(array.shape, array.dtype.name)) for name, array in folded.items()}
    stated = {value.name: value for value in inferred.graph.value_info}
    found = {**{value.name: stated.get(value.name, value) for value in inferred.graph.output}, **values}
    for value in result.graph.output:
        value.CopyFrom(found[value.name])
        values.pop(value.name, None)
    del result.graph.value_info[:]
    result.graph.value_info.extend([*inferred.graph.value_info, *values.values()])
    return result


def forget_declared(model: Any) -> None:
    """Leave the shapes of outputs to inference; nothing infers those of inputs and weights."""
    given = {each.name for each in (*model.graph.input, *model.graph.initializer)}
    for value in model.graph.output:
        if value.name not in given:
            value.type.tensor_type.ClearField("shape")
    copy_types_of_inputs(model)


def copy_types_of_inputs(model: Any) -> None:
    """Give outputs that are inputs the types of these, which onnx would read from the outputs."""
    inputs = {value.name: value.type for value in model.graph.input}
    for value in model.graph.output:
        if value.name in inputs:
            value.type.CopyFrom(inputs[value.name])


def evaluate(node: Node, constants: Mapping[str, Array], opset: int) -> dict[str, Array]:
    """Return the outputs of a node whose inputs are all constant. Raises ModelError if it cannot be computed."""
    if node.operator == "MatMul" and not all(constants[name].size for name in node.inputs):
        # onnxruntime leaves the empty sums of a vector unwritten.
        return {node.outputs[0]: np.matmul(*(constants[name] for name in node.inputs))}
    if node.attributes.get("wraps", 0):  # an attribute of definitions, which onnxruntime does not know
        value, *given = (constants[name] for name in node.inputs)
        axes = tuple(given[0].tolist() if given else node.attributes["axes"])
        keeps = bool(node.attributes["keepdims"])
        return {node.outputs[0]: np.sum(value, axis=axes, keepdims=keeps, dtype=value.dtype)}
    try:
        return evaluate_proto(node_proto(node, opset), constants, opset)
    except Exception as error:  # whatever onnxruntime and numpy raise on hostile shapes
        message = " ".join(str(error).split())[:300]
        raise ModelError(f"node '{node.name}' ({node.operator}) of constants: {message}") from error


def evaluate_proto(node: Any, constants: Mapping[str, Array], opset: int) -> dict[str, Array]:
    """Return the outputs of a node, as a message, by name. Raises what onnxruntime, onnx and numpy raise."""
    if node.op_type == "Constant" and node.attribute[0].name == "value":
        return {node.output[0]: numpy_helper.to_array(node.attribute[0].t)}
    if node.op_type == "Identity":
        return {node.output[0]: constants[node.input[0]]}  # which may be large
    feeds = {name: constants[name] for name in node.input if name}
    if node.op_type in ("Div", "Mod"):
        _require_quotients(*(constants[name] for name in node.input))
    names = [name for name in node.output if name]
    key = _question(node, feeds, opset)
    values = None if key is None else _answers.get(key)
    if values is None:
        newest = means_the_same(node.op_type, opset, defs.onnx_opset_version())
        found = _run(_model_of(node, feeds, opset), feeds, newest)
        if not all(isinstance(value, np.ndarray | np.generic) for value in found):
            raise ValueError("its outputs are no tensors")
        values = [np.asarray(value) for value in found]
        if key is not None:
            _answers.keep(key, values, feeds)
    return dict(zip(names, values, strict=True))


class _Answers:
    """What nodes of constants have computed: layers of a model, and its sizes, ask the same again and again.

    A small input counts by its content, a large one by its identity, so it is held as long as what was made of it.
    """

    def __init__(self) -> None:
        self._held: OrderedDict[object, tuple[list[Array], tuple[Array, ...]]] = OrderedDict()
        self._size_bytes = 0

    def get(self, key: object) -> list[Array] | None:
        """Return the outputs, if they are known."""
        if key not in self._held:
            return None
        self._held.move_to_end(key)
        return self._held[key][0]

    def keep(self, key: object, values: list[Array], feeds: Mapping[str, Array]) -> None:
        """Hold outputs, and forget those that were not asked for longest if they take too much memory."""
        self._held[key] = values, tuple(feeds.values())
        self._size_bytes += _held_bytes(values)
        while self._size_bytes > _MOST_HELD_BYTES or len(self._held) > _MOST_HELD:
            self._size_bytes -= _held_bytes(self._held.popitem(last=False)[1][0])


_answers = _Answers()


def _held_bytes(values: Iterable[Array]) -> int:
    return sum(value.nbytes for value in values)


def _question(node: Any, feeds: Mapping[str, Array], opset: int) -> object | None:
    """Return what decides the outputs of a node; None: it is not known, or differs each time."""
    has_graphs = any(item.HasField("g") or item.graphs for item in node.attribute)
    if node.op_type in RANDOM or has_graphs or any(value.dtype.hasobject for value in feeds.values()):
        return None
    attributes = tuple(sorted(item.SerializeToString(deterministic=True) for item in node.attribute))
    places = {name: place for place, name in enumerate(feeds)}
    inputs = tuple(places.get(name, -1) for name in node.input)
    contents = tuple(
        (value.dtype.str, value.shape, value.tobytes() if value.nbytes <= _SMALL_BYTES else id(value))
        for value in feeds.values()
    )
    return node.op_type, node.domain, opset, attributes, inputs, contents, tuple(map(bool, node.output))


def _run(model: Any, feeds: Mapping[str, Array], newest: bool) -> list[Any]:
    """Return the model's outputs; `newest`: its operator means what the newest definition says.

    onnxruntime computes them, since that knows every operator set from 7 on. ONNX's own evaluator knows types that
    onnxruntime has no kernels for, such as bfloat16, but follows the newest definition of most operators.
    """
    from gangway.artifact.onnx_session import open_session, reason_of  # noqa: PLC0415 - most models fold nothing

    try:
        readable = onnx.ModelProto()
        readable.CopyFrom(model)
        restamp(readable)
        values: list[Any] = open_session(readable.SerializeToString(), optimise=False).run(None, feeds)
        return values
    except Exception as error:  # onnxruntime's own exceptions have no common base
        refusal = ValueError(reason_of(error))
        if not newest:
            raise refusal from error
    from onnx.reference import ReferenceEvaluator  # noqa: PLC0415

    try:
        return list(ReferenceEvaluator(model).run(None, dict(feeds)))
    except Exception:
        raise refusal from None


def _model_of(node: Any, feeds: Mapping[str, Array], opset: int) -> Any:
    """Return a model of one node, with inputs of any shape and outputs of whatever type they become."""
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), None)
        for name, value in feeds.items()
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output if name]
    graph = helper.make_graph([node], "node", inputs, outputs)
    return helper.make_model(graph, opset_imports=imports([node], opset), ir_version=8)


def _require_quotients(dividends: Array, divisors: Array) -> None:
    """Raise ValueError for integers without a quotient: onnxruntime's process dies of the least one divided by -1."""
    if divisors.dtype.kind not in "iu":
        return
    if not divisors.all():
        raise ValueError("integer division by zero")
    is_least = dividends == np.iinfo(dividends.dtype).min
    if divisors.dtype.kind == "i" and divisors.dtype.itemsize >= 4 and (is_least & (divisors == -1)).any():
        raise ValueError("the least integer divided by -1 is no integer of its type")


def node_proto(node: Node, opset: int) -> Any:
    """Return the node as a message. Raises defs.SchemaError if this opset has no such operator of ONNX's own."""
    operator, own = node.operator.removeprefix(f"{node.domain}."), len(node.inputs) - len(node.captured)
    proto = helper.make_node(operator, node.inputs[:own], node.outputs, name=node.name, domain=node.domain)
    known: Any = {} if node.domain else defs.get_schema(operator, opset, "").attributes
    for name, value in node.attributes.items():
        kind = known[name].type.value if name in known else None
        if kind is not None or value != []:  # an empty list has no type, and says what its absence says
            proto.attribute.append(helper.make_attribute(name, value, attr_type=kind))
    if node.captured:
        rename_captured(proto, dict(zip(node.captured, node.inputs[own:], strict=True)))
    return proto


def value_proto(name: str, kind: TensorType) -> Any:
    """Return a typed name; a size of -1 is open."""
    shape = [size if size >= 0 else None for size in kind.shape]
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(kind.dtype)), shape)


def model_proto(
    nodes: Iterable[Any],
    inputs: Mapping[str, TensorType],
    outputs: Mapping[str, TensorType | None],
    constants: Mapping[str, Array],
    opset: int,
    domains: Mapping[str, int] = MappingProxyType({}),
) -> Any:
    """Return a model of these nodes; outputs without a type are left to inference. `domains`: versions, if not 1."""
    nodes = list(nodes)
    graph = helper.make_graph(
        nodes,
        "part",
        [value_proto(name, kind) for name, kind in inputs.items()],
        [
            value_proto(name, kind) if kind else helper.make_empty_tensor_value_info(name)
            for name, kind in outputs.items()
        ],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=imports(nodes, opset, domains), ir_version=8)


@cache
def dtype_name(element: int) -> str:
    """Return numpy's name of ONNX's type of elements."""
    return np.dtype(helper.tensor_dtype_to_np_dtype(element)).name


def tensor_types(values: Iterable[Any]) -> dict[str, TensorType]:
    """Return the types that are fully known."""
    types = {}
    for value in values:
        tensor = value.type.tensor_type
        dims = [dim.dim_value if dim.HasField("dim_value") else -1 for dim in tensor.shape.dim]
        if tensor.elem_type and tensor.HasField("shape") and min(dims, default=0) >= 0:
            types[value.name] = TensorType(tuple(dims), dtype_name(tensor.elem_type))
    return types
