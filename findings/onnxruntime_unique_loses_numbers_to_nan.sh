#!/usr/bin/env bash
# One NaN takes other numbers out of onnxruntime's Unique: of [NaN, 1, 2] it answers [NaN], of [1, NaN, 2] [1, 2].
#
# A good guess: NaN is one more value, or each NaN is one, as in numpy; in any case the other numbers are all there.
# Seen instead: the numbers are keys of an ordered tree, in which NaN counts as equal to whatever it is compared with. What
# comes after a NaN at the root is taken for the same key, and a NaN that comes later is taken for a number. `counts` and
# `inverse_indices` say so, too: three times the one key. sorted=0 changes nothing; onnx's reference evaluator keeps all.
# Seen with: onnxruntime 1.32.0, onnx 1.23.2, numpy 2.4.6.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cat > "$folder/look.py" <<'PYTHON'
import numpy as np
import onnx.parser
import onnxruntime
from onnx.reference import ReferenceEvaluator

NAN = float("nan")


def unique(numbers: list[float], is_sorted: int = 1) -> tuple[list[float], list[int], list[float]]:
    model = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17]> g (float[{len(numbers)}] x) => (float[n] y, int64[n] counts) '
        f"{{ y, first, inverse, counts = Unique<sorted = {is_sorted}>(x) }}"
    )
    feeds = {"x": np.array(numbers, np.float32)}
    y, counts = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)
    return y.tolist(), counts.tolist(), ReferenceEvaluator(model).run(["y"], feeds)[0].tolist()


for numbers, wanted, times in (([NAN, 1, 2], [NAN], [3]), ([1, NAN, 2], [1, 2], [2, 1]), ([2, 1, NAN], [1, 2], None)):
    found, counts, reference = unique(numbers)
    print(f"{numbers}: onnxruntime {found}, counts {counts}; onnx's reference {reference}")
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(reference, [1, 2, NAN])
    assert times in (None, counts)
assert len(unique([NAN, 1, 2], is_sorted=0)[0]) == 1
PYTHON
"$folder/venv/bin/python" "$folder/look.py"
