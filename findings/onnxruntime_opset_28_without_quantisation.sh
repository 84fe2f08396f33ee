#!/usr/bin/env bash
# onnxruntime 1.32.0 opens opset 28 and computes all that it redefines, but no QuantizeLinear and no DequantizeLinear.
#
# A good guess: a release that announces an operator set has kernels for it, or lacks those of new operators. What serves
# quantised files best has these two first.
# Seen instead: of the operators that opset 28 gives a new version, Cast, Mod, Einsum, OneHot, Unique, Celu, Compress and
# the rest that 1.32.0 has at opset 27 load. The two that every quantised file has are refused with NOT_IMPLEMENTED, in the
# plainest form: one scale, uint8. The same files with opset 27 load. 1.31.1 refuses the operator set itself.
# Seen with: onnxruntime 1.32.0 (CPU), onnx 1.23.2, numpy 2.4.6.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cat > "$folder/look.py" <<'PYTHON'
import onnxruntime
from onnx import TensorProto, checker, helper

F, I, U, B = TensorProto.FLOAT, TensorProto.INT64, TensorProto.UINT8, TensorProto.BOOL
CASES = {
    "BitShift": ([(U, [2]), (U, [2])], (U, [2]), {"direction": "LEFT"}),
    "Cast": ([(F, [2])], (I, [2]), {"to": I}),
    "Celu": ([(F, [2])], (F, [2]), {}),
    "Compress": ([(F, [2]), (B, [2])], (F, ["n"]), {}),
    "DepthToSpace": ([(F, [1, 4, 2, 2])], (F, [1, 1, 4, 4]), {"blocksize": 2}),
    "Einsum": ([(F, [2, 3]), (F, [3, 2])], (F, [2, 2]), {"equation": "ij,jk->ik"}),
    "Mod": ([(I, [2]), (I, [2])], (I, [2]), {}),
    "OneHot": ([(I, [2]), (I, []), (F, [2])], (F, [2, "n"]), {}),
    "ReduceLogSum": ([(F, [2, 2])], (F, [1, 1]), {}),
    "ReduceLogSumExp": ([(F, [2, 2])], (F, [1, 1]), {}),
    "ReverseSequence": ([(F, [2, 2]), (I, [2])], (F, [2, 2]), {}),
    "SpaceToDepth": ([(F, [1, 1, 4, 4])], (F, [1, 4, 2, 2]), {"blocksize": 2}),
    "Unique": ([(F, [2])], (F, ["n"]), {}),
    "DequantizeLinear": ([(U, [2]), (F, []), (U, [])], (F, [2]), {}),
    "QuantizeLinear": ([(F, [2]), (F, []), (U, [])], (U, [2]), {}),
}


def opened(kind, opset):
    given, (written, shape), attributes = CASES[kind]
    inputs = [helper.make_tensor_value_info(f"x{at}", *each) for at, each in enumerate(given)]
    node = helper.make_node(kind, [each.name for each in inputs], ["y"], **attributes)
    graph = helper.make_graph([node], "g", inputs, [helper.make_tensor_value_info("y", written, shape)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    checker.check_model(model, full_check=True)
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    except Exception as error:
        return str(error)
    return "opens"


seen = {kind: (opened(kind, 27), opened(kind, 28)) for kind in CASES}
for kind, (before, now) in seen.items():
    print(f"{kind}: opset 27 {before}, opset 28 {now}")
refused = {kind for kind, (_, now) in seen.items() if "NOT_IMPLEMENTED" in now}
assert all(before == "opens" for before, _ in seen.values())
assert refused == {"DequantizeLinear", "QuantizeLinear"}
assert all(now == "opens" for kind, (_, now) in seen.items() if kind not in refused)
PYTHON
"$folder/venv/bin/python" "$folder/look.py" 2> /dev/null
