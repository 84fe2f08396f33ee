"""Definitions of onnxruntime's operators (com.microsoft) whose weights are integers with a scale for each block.

What no kernel computes becomes a product with float32 weights: other numbers of bits, inputs in another order, and zero
points that are no integers.
"""

import numpy as np
from onnx import TensorProto

from gangway.compiler.frontend.contrib_operators import DOMAIN, optional
from gangway.compiler.frontend.decompositions import Body, defines
from gangway.compiler.frontend.graph import PRIVATE_DOMAIN
from gangway.compiler.frontend.packed import PACKED_MATMUL
from gangway.compiler.frontend.packed.weights import make_weights
from gangway.compiler.kernels.specs import Array

_SCALES, _ZEROS, _ORDER, _BIAS = 2, 3, 4, 5  # inputs


@defines("MatMulNBits", domain=DOMAIN)
def matmul_of_bits(body: Body) -> None:
    """x times a matrix [K, N]; `accuracy_level`, by which onnxruntime rounds x, too, is not heeded."""
    inputs, outputs, block = (int(body.node.attributes[name]) for name in ("K", "N", "block_size"))
    bits, blocks, bias = int(body.attribute("bits", 4)), -(-inputs // block), optional(body, _BIAS)
    stored, scales, zeros, order = (body.value(index) for index in (1, _SCALES, _ZEROS, _ORDER))
    if body.type(0).dtype != "float32" or stored is None or scales is None:
        raise body.node.unsupported("a type other than float32, or no weights")
    scales, integers = scales.reshape(outputs, blocks), _integers(stored.reshape(outputs, -1), bits, inputs)
    if zeros is None:
        zeros = np.full(scales.shape, 1 << bits - 1, np.uint8)
    elif zeros.dtype == np.uint8:
        zeros = _integers(zeros.reshape(outputs, -1), bits, blocks)
    number = np.arange(inputs) // block
    if order is not None and order.size:
        number, plain = order.reshape(-1), False
    else:
        plain = bits in (4, 8) and zeros.dtype == np.uint8
    packed = make_weights(f"uint{bits}", integers, scales, zeros, block) if plain else None
    output = body.node.outputs[0]
    if packed:
        names = [body.constant(value) for value in (packed.integers, packed.scales)]
        inside = bias if bias in body.graph.constants else ""
        names += ["" if packed.zeros is None else body.constant(packed.zeros), inside]
        attributes = {"bits": packed.bits, "block": packed.block, "outputs": outputs}
        whole = output if bias == inside else ""
        product = body.op(PACKED_MATMUL, body.node.inputs[0], *names, output=whole, domain=PRIVATE_DOMAIN, **attributes)
        if bias != inside:
            body.op("Add", product, bias, output=output)
        return
    real = (integers - zeros.reshape(scales.shape).astype(np.float32)[:, number]) * scales[:, number]
    product = body.op("MatMul", body.node.inputs[0], body.constant(real.T, "float32"), output="" if bias else output)
    if bias:
        body.op("Add", product, bias, output=output)


@defines("GatherBlockQuantized", domain=DOMAIN)
def embedding_of_bits(body: Body) -> None:
    """Rows of a table of integers, with a scale for each block of a row: integers are looked up, then scaled."""
    table, scales, zeros = (body.value(index) for index in (0, 2, 3))
    block, ids = int(body.attribute("block_size", 128)), body.node.inputs[1]
    if table is None or scales is None or table.ndim != 2 or scales.dtype != np.float32:
        raise body.node.unsupported("a table of other axes, or scales of another type than float32")
    is_plain = table.dtype != np.uint8  # of a type of 4 bits, whose integers stand one by one
    bits = 8 if is_plain else int(body.attribute("bits", 4))
    inputs, middle = table.shape[1] * (8 // bits), 0 if is_plain else 1 << bits - 1
    axes = [body.attribute(name, default) % 2 for name, default in (("gather_axis", 0), ("quantize_axis", 1))]
    if bits not in (4, 8) or axes != [0, 1] or scales.shape[1] * block != inputs or table.dtype.itemsize != 1:
        raise body.node.unsupported(f"{bits} bits along axes {axes}, or blocks that do not fill a row")
    if zeros is None:
        zeros = np.full(scales.shape, middle)
    elif not is_plain:
        zeros = _integers(zeros, bits, scales.shape[1])
    table = table.astype(np.int8) if is_plain else table
    values = body.op("Cast", body.op("Gather", body.constant(table), ids), to=TensorProto.FLOAT)
    to = [*body.type(1).shape, -1, 1]
    to[0] = 0
    if bits == 4:
        high = body.op("Floor", body.op("Mul", values, body.constant(1 / 16, "float32")))
        low = body.op("Sub", values, body.op("Mul", high, body.constant(16, "float32")))
        values = body.op("Concat", *(body.reshape(part, to) for part in (low, high)), axis=len(to) - 1)
    values = body.reshape(values, [*to[:-2], -1, block])
    scale, zero = (body.reshape(body.op("Gather", body.constant(each, "float32"), ids), to) for each in (scales, zeros))
    scaled = body.op("Mul", body.op("Sub", values, zero), scale)
    body.reshape(scaled, [*to[:-2], inputs], body.node.outputs[0])


def _integers(stored: Array, bits: int, count: int) -> Array:
    """Return the first `count` integers of each line of bytes, in which they lie from the lowest bits on."""
    if bits == 8:
        return stored[:, :count]
    if bits == 4:
        return np.stack([stored & 15, stored >> 4], axis=2).reshape(len(stored), -1)[:, :count]
    lines = np.unpackbits(stored, axis=1, bitorder="little")[:, : count * bits].reshape(len(stored), count, bits)
    return np.packbits(lines, axis=2, bitorder="little").reshape(len(stored), count)
