#!/usr/bin/env bash
# TVM 0.27 simplifies float expressions as real numbers: x - x is 0 and x == x is true, also for NaN and infinities.
#
# A good guess: without a fast-math option IEEE rules hold, so a kernel may test for NaN by x == x.
# Seen instead: the analyzer that every lowering runs takes float x - x for 0, and x == x for true, in scalars and in
# vectors. A product with the constant 0 is folded for scalars when the expression is made, and kept for vectors, so one
# kernel may answer NaN in its vectors and 0 in its tail. x / x is kept.
# Seen with: apache-tvm 0.27.0.post1, apache-tvm-ffi 0.1.14.post1, numpy 2.4.6.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1 numpy==2.4.6
cat > "$folder/look.py" <<'PYTHON'
import tvm
from tvm import tirx

x, v = tirx.Var("x", "float32"), tirx.Var("v", "float32x4")
zero = tirx.const(0, "float32")
simplify = tvm.sym.Analyzer().simplify
SEEN = {
    "x - x": (simplify(x - x), "T.float32(0.0)"),
    "v - v": (simplify(v - v), "T.Broadcast(T.float32(0.0), 4)"),
    "x == x": (simplify(tirx.EQ(x, x)), "T.bool(True)"),
    "v == v": (simplify(tirx.EQ(v, v)), "T.Broadcast(T.bool(True), 4)"),
    "x * 0": (x * zero, "T.float32(0.0)"),
    "v * 0": (simplify(v * tirx.Broadcast(zero, 4)), "v * T.Broadcast(T.float32(0.0), 4)"),
    "x / x": (simplify(x / x), "x / x"),
}
for text, (seen, expected) in SEEN.items():
    print(text, "->", seen)
    assert str(seen) == expected, text
PYTHON
"$folder/venv/bin/python" "$folder/look.py"
# Seen: 0, 0, true, true, 0, the product itself, the quotient itself.
