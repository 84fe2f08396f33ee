"""Products with weights that stay integers of 4 or 8 bits, while activations are float32.

A dense layer becomes a node `PackedMatMul`: x, integers, scales, zero points or nothing, a bias or nothing. These
constants are the raw weights of `kernels/packed_specs.py`, and so are the attributes `bits` and `block`; `outputs`
counts columns.

LSTM, GRU and RNN have four inputs more then, from number `PACKED_GATES` on: integers of both matrices, each with its
scales. They are those of int8 weights without zero points.
"""

PACKED_MATMUL = "PackedMatMul"
PACKED_GATES = 8
