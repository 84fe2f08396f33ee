#!/usr/bin/env bash
# TVM 0.27 computes a tile layout for each buffer that names none: most of alloc_buffer's time, and for the same code.
#
# A good guess: a buffer without a layout has none, or a shared constant that says row-major; `layout=None` is the default.
# Seen instead: the default is a TileLayout that is made for each buffer, and takes more than half of the time of
# alloc_buffer and decl_buffer. A function with layout=None is not structurally equal to the same one with the default
# layout, which says row-major too, so caches by structure miss. LLVM gets the same text for both.
# Seen with: apache-tvm 0.27.0.post1, apache-tvm-ffi 0.1.14.post1, numpy 2.4.6.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    apache-tvm==0.27.0.post1 apache-tvm-ffi==0.1.14.post1 numpy==2.4.6
cat > "$folder/look.py" <<'PYTHON'
import statistics
import time

import tvm
import tvm_ffi
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as ir

BUFFERS, TURNS = 400, 15


def kernel(**layout):
    with IRBuilder() as builder, ir.prim_func():
        ir.func_name("kernel")
        ir.func_attr({"global_symbol": "kernel"})
        ir.arg("x", tvm.tirx.decl_buffer((64,), "float32", layout=None))
        begin = time.process_time()
        buffers = [ir.alloc_buffer((4, 8), "float32", scope="local", **layout) for _ in range(BUFFERS)]
        seconds = time.process_time() - begin
        ir.buffer_store(buffers[0], tvm.tirx.const(1.0, "float32"), [0, 0])
    return builder.get(), buffers[0].layout, seconds


default, default_layout, _ = kernel()
plain, plain_layout, _ = kernel(layout=None)
ratio = statistics.median(kernel()[2] / kernel(layout=None)[2] for _ in range(TURNS))
modules = [tvm.compile(tvm.IRModule({"kernel": each}), target="llvm") for each in (default, plain)]
texts = {module.inspect_source("ll") for module in (each.mod for each in modules)}
equal = tvm_ffi.structural_equal(default, plain)
print("layouts:", default_layout, "and", plain_layout)
print("time of alloc_buffer, default / None: %.1f; structurally equal: %s; texts of LLVM: %d" % (ratio, equal, len(texts)))
assert str(default_layout) == "T.TileLayout(T.S[(4, 8):(8, 1)])" and plain_layout is None
assert ratio > 1.5 and not equal and len(texts) == 1
PYTHON
"$folder/venv/bin/python" "$folder/look.py"
