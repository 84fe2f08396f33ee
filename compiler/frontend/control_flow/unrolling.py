"""Put the steps of a Loop or a Scan one after the other, where shapes and constants alone decide how many there are.

So converters from TensorFlow write recurrent layers that they do not know as operators: each step is a product and some
elementwise operators. A loop's condition is computed step by step, from counters and sizes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import helper, numpy_helper, shape_inference

from gangway.compiler.errors import UnsupportedModelError
from gangway.compiler.frontend.control_flow.branches import rename, varying
from gangway.compiler.frontend.shape_inference import infer_shapes, known_values, tensor_types
from gangway.compiler.frontend.subgraphs import all_nodes, copy_of, graphs_of
from gangway.compiler.kernels.specs import Array
from gangway.compiler.opsets import OWN_DOMAINS, imports, opset_of, restamp

MOST_NODES = 4096  # of all steps of a loop
_PRODUCTS = {"MatMul", "Gemm", "Conv", "Einsum"}  # of which a step has one, or an island suits it as well
_FIRST_STATE = 2  # inputs of a loop, and of its body, before the tensors that it changes
_AXES_BY_INPUT = 13  # of Unsqueeze


def has_loops(model: Any) -> bool:
    """Whether the model has a Loop or a Scan, in no other node, whose steps are products."""
    return any(_is_recurrent(node) for node in model.graph.node)


def unroll_loops(*models: Any) -> bool:
    """Replace them in the first model, in place; return whether there were any to replace.

    The models differ in their batch only. A loop stays if numbers of a request, or rows, decide when it ends.
    """
    model = models[0]
    try:
        known = [known_values(each) for each in models]
        lengths = [_lengths(each) for each in models]
    except (shape_inference.InferenceError, UnsupportedModelError):  # which says more about the whole model, later
        return False
    open_values = varying(model.graph, known)
    values = {name: value for name, value in known[0].items() if name not in open_values}
    taken = {name for node in all_nodes(model.graph.node) for name in (*node.input, *node.output)}
    nodes: list[Any] = []
    changed = False
    for node in model.graph.node:
        steps = None
        if _is_recurrent(node):
            steps = _count(node, values, model) if node.op_type == "Loop" else _length(node, lengths)
        if not steps:
            nodes.append(copy_of(node))
            continue
        inside, initial = _Unrolled(node, opset_of(model), taken).written(steps)
        nodes += inside
        model.graph.initializer.extend(initial)
        changed = True
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return changed


def _is_recurrent(node: Any) -> bool:
    if node.op_type not in ("Loop", "Scan") or node.domain not in OWN_DOMAINS:
        return False
    (body,) = graphs_of(node)
    is_plain = not body.sparse_initializer and not any(True for inner in body.node for _ in graphs_of(inner))
    return is_plain and any(inner.op_type in _PRODUCTS for inner in body.node)


def _lengths(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what a Scan goes through."""
    if not any(node.op_type == "Scan" for node in model.graph.node):
        return {}
    graph = infer_shapes(model, strict=False).graph
    types = tensor_types([*graph.input, *graph.value_info, *graph.output])
    initial = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    return {name: kind.shape for name, kind in types.items()} | initial


def _length(node: Any, lengths: Sequence[Mapping[str, tuple[int, ...]]]) -> int | None:
    """Return how many steps a Scan has, None if that is not known, or depends on the batch, or they are too many."""
    (body,), name = graphs_of(node), node.input[-1]
    axis = _each(node, "scan_input_axes")[-1]
    found = {shapes[name][axis] if name in shapes else 0 for shapes in lengths}
    steps = min(found) if len(found) == 1 else 0
    return steps if 0 < steps * len(body.node) <= MOST_NODES else None


def _each(node: Any, name: str) -> Sequence[int]:
    """Return an attribute of a Scan that has a number for each of its scanned inputs, or outputs."""
    (body,) = graphs_of(node)
    count = next(item.i for item in node.attribute if item.name == "num_scan_inputs")
    given = next((tuple(item.ints) for item in node.attribute if item.name == name), ())
    return given or (0,) * (count if "input" in name else len(body.output) - len(node.input) + count)


def _count(node: Any, values: Mapping[str, Array], model: Any) -> int | None:
    """Return how many steps a loop has; None if it is not known, or they are too many."""
    (body,) = graphs_of(node)
    trips, condition = (values.get(name) for name in node.input[:_FIRST_STATE])
    if any(name and value is None for name, value in zip(node.input, (trips, condition), strict=False)):
        return None
    most = MOST_NODES // len(body.node)
    if trips is not None:
        most = min(most + 1, int(trips.reshape(())))
    counter = _Counter.of(body, model)
    state = {name: values[outer] for name, outer in counter.states(body, node).items() if outer in values}
    outside = {name: values[name] for name in counter.captured if name in values}
    if len(state) < len(counter.states(body, node)) or len(outside) < len(counter.captured):
        return None
    goes_on, steps = condition is None or bool(condition.reshape(())), 0
    try:
        step = counter.step(outside)
        while goes_on and steps < most:
            goes_on, state = step(steps, state)
            steps += 1
    except Exception:  # whatever onnxruntime raises: the number stays unknown
        return None
    return steps if steps * len(body.node) <= MOST_NODES else None


@dataclass(frozen=True)
class _Counter:
    """The part of a body that its condition depends on. `needed`: states, and the condition, that it computes."""

    body: Any
    nodes: Sequence[Any]
    needed: Sequence[str]
    captured: Sequence[str]
    opset: int

    @staticmethod
    def of(body: Any, model: Any) -> "_Counter":
        """Return the part: all that the condition is computed from, and states that it is computed from later."""
        makers = {name: inner for inner in body.node for name in inner.output if name}
        after = {given.name: made.name for given, made in zip(body.input[1:], body.output, strict=False)}
        found: dict[str, None] = {}
        waiting = [body.output[0].name]
        while waiting:
            name = waiting.pop()
            if name and name not in found:
                found[name] = None
                waiting += [*makers[name].input] if name in makers else [after[name]] if name in after else []
        nodes = [inner for inner in body.node if not found.keys().isdisjoint(inner.output)]
        given = {value.name for value in body.input}
        own = {tensor.name for tensor in body.initializer}
        captured = [name for name in found if name not in makers and name not in given and name not in own]
        return _Counter(body, nodes, [*found], captured, opset_of(model))

    def states(self, body: Any, node: Any) -> dict[str, str]:
        """Return what the tensors that change are called inside, and what they begin with outside."""
        pairs = zip(body.input[_FIRST_STATE:], node.input[_FIRST_STATE:], strict=True)
        return {value.name: outer for value, outer in pairs if value.name in self.needed}

    def step(self, outside: Mapping[str, Array]) -> Any:
        """Return the function that computes a step: of its number and the states, whether another one follows."""
        from gangway.artifact.onnx_session import open_session  # noqa: PLC0415 - few models have such loops

        body, number, again = self.body, self.body.input[0].name, self.body.input[1].name
        follows = {given.name: made.name for given, made in zip(body.input[1:], body.output, strict=False)}
        states = [value.name for value in body.input[_FIRST_STATE:] if value.name in self.needed]
        made = {name for inner in self.nodes for name in inner.output}
        wanted = dict.fromkeys(name for name in (body.output[0].name, *(follows[each] for each in states)))
        names = [name for name in wanted if name in made]
        constants = [tensor for tensor in body.initializer if tensor.name in self.needed]
        constants += [numpy_helper.from_array(value, name) for name, value in outside.items()]
        known = {tensor.name: numpy_helper.to_array(tensor) for tensor in constants}
        inputs = [value for value in body.input if value.name in {number, again, *states}]
        outputs = [helper.make_empty_tensor_value_info(name) for name in names]
        graph = helper.make_graph(self.nodes, "step", inputs, outputs, constants)
        model = helper.make_model(graph, opset_imports=imports(self.nodes, self.opset), ir_version=8)
        restamp(model)
        session = open_session(model.SerializeToString(), optimise=False) if names else None

        def step(count: int, state: Mapping[str, Array]) -> tuple[bool, dict[str, Array]]:
            feeds = {number: np.array(count, np.int64), again: np.array(True), **state}
            fed = {value.name: feeds[value.name].reshape(_shape(value, feeds[value.name])) for value in inputs}
            found = {**known, **feeds}
            if session is not None:
                found |= dict(zip(names, session.run(names, fed), strict=True))
            return bool(found[body.output[0].name].reshape(())), {name: found[follows[name]] for name in states}

        return step


def _shape(value: Any, array: Array) -> tuple[int, ...]:
    """Scalars may be declared as vectors of one."""
    kind = value.type.tensor_type
    return (1,) * len(kind.shape.dim) if array.size == 1 and kind.HasField("shape") else array.shape


class _Unrolled:
    """The nodes of all steps."""

    def __init__(self, node: Any, opset: int, taken: set[str]) -> None:
        self._node, self._opset = node, opset
        (self._body,) = graphs_of(node)
        self._prefix = f"{next(filter(None, node.output))}/"
        while any(name.startswith(self._prefix) for name in taken):
            self._prefix += "/"
        self._nodes: list[Any] = []
        self._initial: list[Any] = []

    def written(self, steps: int) -> tuple[list[Any], list[Any]]:
        """Return the nodes, which compute the outputs, and the weights that they read."""
        body, node = self._body, self._node
        weights = {tensor.name: f"{self._prefix}{tensor.name}" for tensor in body.initializer}
        for tensor in body.initializer:
            self._initial.append(copy_of(tensor))
            self._initial[-1].name = weights[tensor.name]
        is_loop = node.op_type == "Loop"
        going_on = self._constant(np.array(True), "going on") if is_loop else ""
        scanned = [] if is_loop else list(node.input[len(node.input) - len(_each(node, "scan_input_axes")) :])
        states = list(node.input[_FIRST_STATE * is_loop : len(node.input) - len(scanned)])
        collected: list[list[str]] = []
        for step in range(steps):
            if is_loop:
                given = [self._constant(np.array(step, np.int64), f"{step}/number"), going_on, *states]
            else:
                given = [*states, *self._items(scanned, step, steps)]
            results = self._step(step, given, weights)[int(is_loop) :]
            states = results[: len(states)]
            collected.append(results[len(states) :])
        for name, output in zip(states, node.output, strict=False):
            if output:
                self._add("Identity", [name], output)
        others = [0] * len(collected[0])
        axes, turned = (others if is_loop else _each(node, f"scan_output_{name}") for name in ("axes", "directions"))
        for index, output in enumerate(node.output[len(states) :]):
            if output:
                parts = [
                    self._with_axis(names[index], axes[index], f"{output}/{step}")
                    for step, names in enumerate(collected)
                ]
                self._add("Concat", parts[::-1] if turned[index] else parts, output, axis=axes[index])
        return self._nodes, self._initial

    def _items(self, scanned: Sequence[str], step: int, steps: int) -> list[str]:
        """What a step gets of each tensor that a Scan goes through."""
        found = []
        axes, turned = (_each(self._node, f"scan_input_{name}") for name in ("axes", "directions"))
        for index, name in enumerate(scanned):
            place = steps - 1 - step if turned[index] else step
            number = self._constant(np.array(place, np.int64), f"{step}/{index}/place")
            found.append(self._add("Gather", [name, number], f"{self._prefix}{step}/{index}/item", axis=axes[index]))
        return found

    def _step(self, step: int, given: Sequence[str], weights: Mapping[str, str]) -> list[str]:
        """Add the nodes of a step; return what its results are called."""
        body = self._body
        inside = [copy_of(inner) for inner in body.node]
        made = (name for inner in inside for name in inner.output if name)
        names: dict[str, str] = {**weights, **{name: f"{self._prefix}{step}/{name}" for name in made}}
        names |= {value.name: name for value, name in zip(body.input, given, strict=True)}
        rename(inside, names)
        for inner in inside:
            inner.name = f"{self._prefix}{step}/{inner.name}" if inner.name else ""
        self._nodes += inside
        outputs: list[str] = [value.name for value in body.output]
        return [names.get(name, name) for name in outputs]

    def _with_axis(self, name: str, axis: int, output: str) -> str:
        """A part of what all steps make together."""
        if self._opset >= _AXES_BY_INPUT:
            return self._add("Unsqueeze", [name, self._constant(np.array([axis], np.int64), f"{output}/axis")], output)
        return self._add("Unsqueeze", [name], output, axes=[axis])

    def _add(self, operator: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self._nodes.append(helper.make_node(operator, inputs, [output], name=output, **attributes))
        return output

    def _constant(self, value: Array, name: str) -> str:
        self._initial.append(numpy_helper.from_array(value, f"{self._prefix}{name}"))
        return f"{self._prefix}{name}"
