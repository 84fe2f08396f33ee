#!/usr/bin/env bash
# onnxruntime 1.31.1 has CPU kernels for nine standard operators at opset 21 and none at 22 to 26.
#
# A good guess: a file that onnx checks, with an operator set that onnxruntime reads, runs if it ran with an older set.
# Seen instead: RoiAlign, MaxRoiPool, GlobalLpPool, Multinomial, RandomNormal, RandomUniform and both *Like got new
# versions in opset 22, which add bfloat16. onnxruntime's kernels end at the version before, so sessions are refused with
# NOT_IMPLEMENTED. Bernoulli fails by its expansion, which makes a RandomUniformLike. GlobalAveragePool and LpPool, which
# got new versions in the same opset, are served.
# Seen with: onnx 1.23.2, onnxruntime 1.31.1, numpy 2.4.6.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnx==1.23.2 onnxruntime==1.31.1 numpy==2.4.6
cat > "$folder/look.py" <<'PYTHON'
import onnx
import onnxruntime

IMAGE = "(float[1,1,4,4] x"
ANY = "=> (float[a,b,c,d] y)"
LOST = {
    "RoiAlign": f"{IMAGE}, float[1,4] r, int64[1] i) {ANY} {{ y = RoiAlign(x, r, i) }}",
    "MaxRoiPool": f"{IMAGE}, float[1,5] r) {ANY} {{ y = MaxRoiPool<pooled_shape=[2,2]>(x, r) }}",
    "GlobalLpPool": f"{IMAGE}) {ANY} {{ y = GlobalLpPool(x) }}",
    "Bernoulli": "(float[4] x) => (float[4] y) { y = Bernoulli(x) }",
    "Multinomial": "(float[1,4] x) => (int32[1,1] y) { y = Multinomial(x) }",
    "RandomNormal": "() => (float[4] y) { y = RandomNormal<shape=[4]>() }",
    "RandomUniform": "() => (float[4] y) { y = RandomUniform<shape=[4]>() }",
    "RandomNormalLike": "(float[4] x) => (float[4] y) { y = RandomNormalLike(x) }",
    "RandomUniformLike": "(float[4] x) => (float[4] y) { y = RandomUniformLike(x) }",
}
KEPT = {
    "GlobalAveragePool": f"{IMAGE}) {ANY} {{ y = GlobalAveragePool(x) }}",
    "LpPool": f"{IMAGE}) {ANY} {{ y = LpPool<kernel_shape=[2,2]>(x) }}",
}
onnxruntime.set_default_logger_severity(4)


def opens(graph: str, opset: int) -> bool:
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}]> g {graph}')
    onnx.checker.check_model(model, full_check=True)
    try:
        onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    except onnxruntime.capi.onnxruntime_pybind11_state.NotImplemented:
        return False
    return True


for name, graph in (LOST | KEPT).items():
    seen = [opens(graph, opset) for opset in (21, 22, 26)]
    print(name, seen)
    assert seen == [True, name in KEPT, name in KEPT], name
PYTHON
"$folder/venv/bin/python" "$folder/look.py"
# Seen: nine lines of [True, False, False], then GlobalAveragePool and LpPool with [True, True, True].
