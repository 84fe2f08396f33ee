"""What Triton's public examples of sequences ask for, and an accumulator. Controls and states are ordinary tensors.

INPUT and OUTPUT are INT32 [N, 1], as is each control but CORRID; READY is a factor, so that a row that is not ready
gives 0.
"""

from onnx import TensorProto

from gangway.zoo.blueprint import Blueprint
from gangway.zoo.builder import GraphBuilder

SHAPE = (1,)
INTEGERS = TensorProto.INT32


def simple_sequence(seed: int) -> Blueprint:
    """INPUT, START, READY -> OUTPUT = INPUT, and 1 more at the start of a sequence. It has no state."""
    net = GraphBuilder("simple_sequence", seed)
    total = net.node("Add", ["INPUT", "START"], "total")
    net.node("Mul", [total, "READY"], "OUTPUT")
    return _finish(net, ("INPUT", "START", "READY"), ("OUTPUT",))


def simple_dyna_sequence(seed: int) -> Blueprint:
    """INPUT, START, END, READY, CORRID UINT64 -> OUTPUT = INPUT, and 1 more at the start, the id more at the end."""
    net = GraphBuilder("simple_dyna_sequence", seed)
    number = net.node("Cast", ["CORRID"], "number", to=INTEGERS)
    at_end = net.node("Mul", ["END", number], "at_end")
    total = net.node("Add", ["INPUT", "START"], "total")
    net.node("Mul", [net.node("Add", [total, at_end], "with_id"), "READY"], "OUTPUT")
    return _finish(net, ("INPUT", "START", "END", "READY", "CORRID"), ("OUTPUT",), {"CORRID": TensorProto.UINT64})


def simple_string_dyna_sequence(seed: int) -> Blueprint:
    """INPUT, END, CORRID STRING, state SUM_IN -> OUTPUT = SUM_OUT = sum of all inputs, the id more at the end.

    Ids must be decimal numbers.
    """
    net = GraphBuilder("simple_string_dyna_sequence", seed)
    number = net.node("Cast", ["CORRID"], "number", to=INTEGERS)
    at_end = net.node("Mul", ["END", number], "at_end")
    total = net.node("Add", ["INPUT", "SUM_IN"], "total")
    result = net.node("Add", [total, at_end], "OUTPUT")
    net.node("Identity", [result], "SUM_OUT")
    inputs = ("INPUT", "END", "CORRID", "SUM_IN")
    return _finish(net, inputs, ("OUTPUT", "SUM_OUT"), {"CORRID": TensorProto.STRING})


def accumulator(seed: int) -> Blueprint:
    """INPUT, state SUM_IN -> OUTPUT = SUM_OUT = the sum of the sequence's inputs so far."""
    net = GraphBuilder("accumulator", seed)
    net.node("Add", ["INPUT", "SUM_IN"], "OUTPUT")
    net.node("Add", ["SUM_IN", "INPUT"], "SUM_OUT")
    return _finish(net, ("INPUT", "SUM_IN"), ("OUTPUT", "SUM_OUT"))


def _finish(
    net: GraphBuilder, inputs: tuple[str, ...], outputs: tuple[str, ...], others: dict[str, int] | None = None
) -> Blueprint:
    datatypes = {**dict.fromkeys((*inputs, *outputs), INTEGERS), **(others or {})}
    return net.finish(dict.fromkeys(inputs, SHAPE), dict.fromkeys(outputs, SHAPE), datatypes, datatypes)
