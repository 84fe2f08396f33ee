"""LSTM, GRU and RNN, one step after the other: a dense layer for all inputs, then one for the state of each step.

Formulas are those of ONNX's operators, with its default activations.
"""

from collections.abc import Callable

import numpy as np

from gangway.compiler.bodies.base import Body, defines
from gangway.compiler.specs import Array

LONGEST = 256  # steps; each is a few layers

State = tuple[str, ...]
Cell = Callable[[Body, str, State, "_Direction"], State]


class _Direction:
    """One direction of a layer: its constants, and its input's products of all steps."""

    def __init__(self, body: Body, index: int, gates: int) -> None:
        weights, recurrent, biases = (body.value(n) for n in (1, 2, 3))
        assert weights is not None and recurrent is not None
        self.hidden = recurrent.shape[2]
        size = gates * self.hidden
        both = np.zeros(2 * size, np.float32) if biases is None else biases[index]
        self.recurrent_bias: Array = both[size:]
        self.input_bias: Array = both[:size]
        self.recurrent = recurrent[index].T
        self._weights = weights[index].T

    def products(self, body: Body, separate: bool) -> str:
        """x W + b of all steps, [steps, batch, gates x hidden]; with the recurrent bias, unless that is `separate`."""
        product = body.op("MatMul", body.node.inputs[0], body.constant(np.ascontiguousarray(self._weights)))
        bias = self.input_bias if separate else self.input_bias + self.recurrent_bias
        return body.op("Add", product, body.constant(bias))

    def of_state(self, body: Body, state: str, begin: int = 0, end: int | None = None, bias: bool = False) -> str:
        """h R of some gates."""
        columns = slice(begin * self.hidden, None if end is None else end * self.hidden)
        product = body.op("MatMul", state, body.constant(np.ascontiguousarray(self.recurrent[:, columns])))
        return body.op("Add", product, body.constant(self.recurrent_bias[columns])) if bias else product

    def gate(self, body: Body, gates: str, index: int) -> str:
        """One of the gates that lie side by side."""
        return body.slice(gates, 1, index * self.hidden, (index + 1) * self.hidden)


def _lstm(body: Body, x: str, state: State, direction: _Direction) -> State:
    """Gates i, o, f, c."""
    hidden, cell = state
    gates = body.op("Add", direction.of_state(body, hidden), x)
    i, o, f, c = (direction.gate(body, gates, index) for index in range(4))
    kept = body.op("Mul", body.op("Sigmoid", f), cell)
    cell = body.op("Add", kept, body.op("Mul", body.op("Sigmoid", i), body.op("Tanh", c)))
    return body.op("Mul", body.op("Sigmoid", o), body.op("Tanh", cell)), cell


def _gru(body: Body, x: str, state: State, direction: _Direction) -> State:
    """Gates z, r, h; the state is reset before or after it is multiplied."""
    (hidden,) = state
    after = bool(body.attribute("linear_before_reset", 0))
    if after:
        products = direction.of_state(body, hidden, bias=True)
        z, r, own = (direction.gate(body, products, index) for index in range(3))
    else:
        products = direction.of_state(body, hidden, 0, 2, bias=True)
        z, r = (direction.gate(body, products, index) for index in range(2))
    update = body.op("Sigmoid", body.op("Add", z, direction.gate(body, x, 0)))
    reset = body.op("Sigmoid", body.op("Add", r, direction.gate(body, x, 1)))
    if after:
        own = body.op("Mul", reset, own)
    else:
        own = direction.of_state(body, body.op("Mul", reset, hidden), 2, 3, bias=True)
    candidate = body.op("Tanh", body.op("Add", own, direction.gate(body, x, 2)))
    # (1 - z) h' + z h
    return (body.op("Add", candidate, body.op("Mul", update, body.op("Sub", hidden, candidate))),)


def _rnn(body: Body, x: str, state: State, direction: _Direction) -> State:
    return (body.op("Tanh", body.op("Add", direction.of_state(body, state[0]), x)),)


_CELLS: dict[str, tuple[Cell, int, list[bytes]]] = {
    "LSTM": (_lstm, 4, [b"Sigmoid", b"Tanh", b"Tanh"]),
    "GRU": (_gru, 3, [b"Sigmoid", b"Tanh"]),
    "RNN": (_rnn, 1, [b"Tanh"]),
}


@defines("LSTM", "GRU", "RNN")
def recurrent(body: Body) -> None:
    """Either or both directions; all sequences have the full length."""
    cell, gates, activations = _CELLS[body.node.operator]
    steps, batch, _ = body.type(0).shape
    directions = 2 if body.attribute("direction", b"forward") == b"bidirectional" else 1
    _check(body, steps, activations * directions)
    runs = [_run(body, cell, gates, index, steps, batch) for index in range(directions)]
    outputs = [*body.node.outputs, "", "", ""][:3]
    if outputs[0]:
        rows = [[body.reshape(row, [1, 1, -1, runs[0][2]]) for row in run[0]] for run in runs]
        sides = [body.op("Concat", *side, axis=0) for side in rows]
        _join(body, sides, 1, outputs[0])
    for output, index in zip(outputs[1:], range(2), strict=True):
        if output:
            last = [body.reshape(run[1][index], [1, -1, run[2]]) for run in runs]
            _join(body, last, 0, output)


def _check(body: Body, steps: int, activations: list[bytes]) -> None:
    unusual = [name for name in ("clip", "input_forget", "layout") if body.attribute(name, 0)]
    if body.attribute("activations", activations) != activations or unusual:
        raise body.node.unsupported(f"other activations than the default ones, or {unusual}")
    lengths = body.value(4)
    if (lengths is not None and (lengths != steps).any()) or any(body.node.inputs[7:]):
        raise body.node.unsupported("sequences of different lengths, or peepholes")
    if steps > LONGEST or body.type(0).dtype != "float32":
        raise body.node.unsupported(f"{steps} steps of {body.type(0).dtype}; {LONGEST} of float32 are possible")


def _run(body: Body, cell: Cell, gates: int, index: int, steps: int, batch: int) -> tuple[list[str], State, int]:
    """One direction: the hidden state after each step, in order of the sequence, all last states, and their size."""
    direction = _Direction(body, index, gates)
    products = direction.products(body, separate=body.node.operator == "GRU")
    state = tuple(_start(body, n, index, direction.hidden) for n in ((5, 6) if gates == 4 else (5,)))
    backward = index == 1 or body.attribute("direction", b"forward") == b"reverse"
    rows = [""] * steps
    for step in reversed(range(steps)) if backward else range(steps):
        x = body.reshape(body.slice(products, 0, step, step + 1), [-1, gates * direction.hidden])
        state = cell(body, x, state, direction)
        rows[step] = state[0]
    return rows, state, direction.hidden


def _start(body: Body, n: int, index: int, hidden: int) -> str:
    """The first state of a direction: an input, or zeros."""
    if len(body.node.inputs) > n and body.node.inputs[n]:
        part = body.slice(body.node.inputs[n], 0, index, index + 1)
        return body.reshape(part, [-1, hidden])
    if body.type(0).shape[1] != 1 and body.graph.batched:
        raise body.node.unsupported("zeros for a batch")
    return body.constant(np.zeros((body.type(0).shape[1], hidden), np.float32))


def _join(body: Body, parts: list[str], axis: int, output: str) -> None:
    if len(parts) > 1:
        body.op("Concat", *parts, axis=axis, output=output)
    else:
        body.op("Identity", parts[0], output=output)
