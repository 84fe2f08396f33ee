"""Models for Triton's public client examples, and what ensembles and sequences are tried with.

Of the models for sequences, controls and states are ordinary tensors. INPUT and OUTPUT are INT32 [N, 1], as is each
control but CORRID; READY is a factor, so that a row that is not ready gives 0.
"""

from onnx import TensorProto

from gangway.zoo.graph import GraphBuilder, ModelGraph

SIMPLE_ELEMENTS = 16
SIMPLE_OPERATORS = {"OUTPUT0": "Add", "OUTPUT1": "Sub"}
IMAGE_SIZE = 64
COLOURS = ("red", "green", "blue")

SEQUENCE_SHAPE = (1,)
SEQUENCE_TYPE = TensorProto.INT32


def simple(seed: int) -> ModelGraph:
    """INPUT0, INPUT1 INT32 [N, 16] -> OUTPUT0 = their sum, OUTPUT1 = their difference. It has no weights."""
    net = GraphBuilder("simple", seed)
    for output, operator in SIMPLE_OPERATORS.items():
        net.node(operator, ["INPUT0", "INPUT1"], output)
    return _finish_simple(net, TensorProto.INT32)


def simple_string(seed: int) -> ModelGraph:
    """`simple` on decimal numbers as strings; what is not a number makes the query fail."""
    return _simple_cast("simple_string", seed, TensorProto.STRING)


def simple_int8(seed: int) -> ModelGraph:
    """`simple` on INT8; sums wrap around."""
    return _simple_cast("simple_int8", seed, TensorProto.INT8)


def _simple_cast(name: str, seed: int, datatype: int) -> ModelGraph:
    """Neither type can be added in ONNX Runtime: INT32 in between, as Triton's examples have it."""
    net = GraphBuilder(name, seed)
    numbers = [net.node("Cast", [side], f"{side}.int32", to=TensorProto.INT32) for side in ("INPUT0", "INPUT1")]
    for output, operator in SIMPLE_OPERATORS.items():
        result = net.node(operator, numbers, f"{output}.int32")
        net.node("Cast", [result], output, to=datatype)
    return _finish_simple(net, datatype)


def _finish_simple(net: GraphBuilder, datatype: int) -> ModelGraph:
    shape = (SIMPLE_ELEMENTS,)
    return net.finish({"INPUT0": shape, "INPUT1": shape}, dict.fromkeys(SIMPLE_OPERATORS, shape), datatype, datatype)


def simple_identity(seed: int) -> ModelGraph:
    """INPUT0 BYTES [N, any] -> OUTPUT0, the same strings."""
    net = GraphBuilder("simple_identity", seed)
    net.node("Identity", ["INPUT0"], "OUTPUT0")
    datatype = TensorProto.STRING
    return net.finish({"INPUT0": ("length",)}, {"OUTPUT0": ("length",)}, datatype, datatype)


def simple_pixels(seed: int) -> ModelGraph:
    """PIXELS UINT8 [N, 64, 64, 3] -> IMAGE FP32 [N, 3, 64, 64]: the colours first, and 0 to 1."""
    net = GraphBuilder("simple_pixels", seed)
    numbers = net.node("Cast", ["PIXELS"], "numbers", to=TensorProto.FLOAT)
    shares = net.node("Div", [numbers, net.scalar("most", 255.0)], "shares")
    net.node("Transpose", [shares], "IMAGE", perm=[0, 3, 1, 2])
    size = IMAGE_SIZE
    inputs, outputs = {"PIXELS": (size, size, len(COLOURS))}, {"IMAGE": (len(COLOURS), size, size)}
    return net.finish(inputs, outputs, TensorProto.UINT8, TensorProto.FLOAT)


def simple_image(seed: int) -> ModelGraph:
    """IMAGE FP32 [N, 3, 64, 64] -> COLOUR [N, 3]: which channel of the image is the brightest, as probabilities."""
    net = GraphBuilder("simple_image", seed)
    means = net.node("Flatten", [net.node("GlobalAveragePool", ["IMAGE"], "means")], "flat", axis=1)
    net.node("Softmax", [means], "COLOUR", axis=1)
    return net.finish({"IMAGE": (len(COLOURS), IMAGE_SIZE, IMAGE_SIZE)}, {"COLOUR": (len(COLOURS),)})


def simple_sequence(seed: int) -> ModelGraph:
    """INPUT, START, READY -> OUTPUT = INPUT, and 1 more at the start of a sequence. It has no state."""
    net = GraphBuilder("simple_sequence", seed)
    total = net.node("Add", ["INPUT", "START"], "total")
    net.node("Mul", [total, "READY"], "OUTPUT")
    return _finish_sequence(net, ("INPUT", "START", "READY"), ("OUTPUT",))


def simple_dyna_sequence(seed: int) -> ModelGraph:
    """INPUT, START, END, READY, CORRID UINT64 -> OUTPUT = INPUT, and 1 more at the start, the id more at the end."""
    net = GraphBuilder("simple_dyna_sequence", seed)
    number = net.node("Cast", ["CORRID"], "number", to=SEQUENCE_TYPE)
    at_end = net.node("Mul", ["END", number], "at_end")
    total = net.node("Add", ["INPUT", "START"], "total")
    net.node("Mul", [net.node("Add", [total, at_end], "with_id"), "READY"], "OUTPUT")
    return _finish_sequence(
        net, ("INPUT", "START", "END", "READY", "CORRID"), ("OUTPUT",), {"CORRID": TensorProto.UINT64}
    )


def simple_string_dyna_sequence(seed: int) -> ModelGraph:
    """INPUT, END, CORRID STRING, state SUM_IN -> OUTPUT = SUM_OUT = sum of all inputs, the id more at the end.

    Ids must be decimal numbers.
    """
    net = GraphBuilder("simple_string_dyna_sequence", seed)
    number = net.node("Cast", ["CORRID"], "number", to=SEQUENCE_TYPE)
    at_end = net.node("Mul", ["END", number], "at_end")
    total = net.node("Add", ["INPUT", "SUM_IN"], "total")
    result = net.node("Add", [total, at_end], "OUTPUT")
    net.node("Identity", [result], "SUM_OUT")
    inputs = ("INPUT", "END", "CORRID", "SUM_IN")
    return _finish_sequence(net, inputs, ("OUTPUT", "SUM_OUT"), {"CORRID": TensorProto.STRING})


def accumulator(seed: int) -> ModelGraph:
    """INPUT, state SUM_IN -> OUTPUT = SUM_OUT = the sum of the sequence's inputs so far."""
    net = GraphBuilder("accumulator", seed)
    net.node("Add", ["INPUT", "SUM_IN"], "OUTPUT")
    net.node("Add", ["SUM_IN", "INPUT"], "SUM_OUT")
    return _finish_sequence(net, ("INPUT", "SUM_IN"), ("OUTPUT", "SUM_OUT"))


def _finish_sequence(
    net: GraphBuilder, inputs: tuple[str, ...], outputs: tuple[str, ...], others: dict[str, int] | None = None
) -> ModelGraph:
    datatypes = {**dict.fromkeys((*inputs, *outputs), SEQUENCE_TYPE), **(others or {})}
    return net.finish(
        dict.fromkeys(inputs, SEQUENCE_SHAPE), dict.fromkeys(outputs, SEQUENCE_SHAPE), datatypes, datatypes
    )
