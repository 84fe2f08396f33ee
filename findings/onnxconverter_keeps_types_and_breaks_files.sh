#!/usr/bin/env bash
# onnxconverter-common's float16 conversion with keep_io_types=True makes files of valid ones that onnxruntime refuses.
#
# A good guess: keep_io_types=True is the safe choice. It puts a Cast after each input and before each output, and the rest
# is float16.
# Seen instead, without an error or a warning: each Cast is made per reader and named after the reader, so two nodes
# without names that read one input define the same tensor twice. A Cast of integers to float, as a mask has it, keeps
# its `to` and gets a float16 type. A node that reads an output of the graph gets a float32 tensor beside a float16 type.
# onnx's checker and onnxruntime refuse all three. One reader, and readers with names, are served.
# Seen with: onnxconverter-common 1.16.0, onnx 1.23.2, onnxruntime 1.32.0, numpy 2.4.6.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
  onnxconverter-common==1.16.0 onnx==1.23.2 onnxruntime==1.32.0 numpy==2.4.6
cat > "$folder/look.py" <<'PYTHON'
import onnx
import onnxruntime
from onnx import TensorProto, helper
from onnxconverter_common.float16 import convert_float_to_float16


def tensor(name, kind=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, kind, [1, 4])


def tried(nodes, inputs, outputs, named):
    made = [
        helper.make_node(kind, read, written, name=f"node{at}" if named else "", **attributes)
        for at, (kind, read, written, attributes) in enumerate(nodes)
    ]
    graph = helper.make_graph(made, "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    halved = convert_float_to_float16(model, keep_io_types=True).SerializeToString()
    try:
        onnx.checker.check_model(halved, full_check=True)
        checks = True
    except Exception:
        checks = False
    try:
        onnxruntime.InferenceSession(halved, providers=["CPUExecutionProvider"])
    except Exception as error:
        return checks, str(error)
    return checks, "opens"


x, mask, y, z = tensor("x"), tensor("mask", TensorProto.INT64), tensor("y"), tensor("z")
chain = [("Relu", ["x"], ["a"], {}), ("Exp", ["a"], ["y"], {})]
shared = [("Relu", ["x"], ["a"], {}), ("Exp", ["x"], ["b"], {}), ("Add", ["a", "b"], ["y"], {})]
masked = [("Cast", ["mask"], ["m"], {"to": TensorProto.FLOAT}), ("Mul", ["x", "m"], ["y"], {})]
through = [("Relu", ["x"], ["y"], {}), ("Exp", ["y"], ["z"], {})]
SEEN = {
    "one reader, no names": (tried(chain, [x], [y], named=False), "opens"),
    "two readers, names": (tried(shared, [x], [y], named=True), "opens"),
    "two readers, no names": (tried(shared, [x], [y], named=False), "two nodes with same node name (x_cast_to_)"),
    "a mask, names": (tried(masked, [x, mask], [y], named=True), "does not match expected type"),
    "an output that is read, names": (tried(through, [x], [y, z], named=True), "does not match expected type"),
}
for name, ((checks, said), expected) in SEEN.items():
    print(f"{name}: checker {'passes' if checks else 'refuses'}; onnxruntime: {said}")
    assert expected in said and checks == (expected == "opens"), name
PYTHON
"$folder/venv/bin/python" -W ignore "$folder/look.py"
