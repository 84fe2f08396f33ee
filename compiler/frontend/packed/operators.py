"""The definition of onnxruntime's MatMulNBits (com.microsoft), whose weights are integers with a scale for each block.

What no kernel computes becomes a product with float32 weights: other numbers of bits, inputs in another order, and zero
points that are no integers.
"""

import numpy as np

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


def _integers(stored: Array, bits: int, count: int) -> Array:
    """Return the first `count` integers of each line of bytes, in which they lie from the lowest bits on."""
    if bits == 8:
        return stored[:, :count]
    if bits == 4:
        return np.stack([stored & 15, stored >> 4], axis=2).reshape(len(stored), -1)[:, :count]
    lines = np.unpackbits(stored, axis=1, bitorder="little")[:, : count * bits].reshape(len(stored), count, bits)
    return np.packbits(lines, axis=2, bitorder="little").reshape(len(stored), count)
