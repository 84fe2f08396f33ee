#!/usr/bin/env bash
# With fewer queries than keys, the last query of a causal MultiHeadAttention sees every key, and the others do not.
#
# A good guess: `unidirectional` masks as a lower triangle does. With 3 queries and 5 keys it stands either at the upper
# left (query i sees keys 0 to i) or at the lower right (keys 0 to i + 2).
# Seen instead: queries 0 and 1 follow the first reading, and query 2, the last one, has no mask at all: keys 0 to 4. With
# one query and many keys the attribute changes nothing. With as many queries as keys, or more, all readings but the
# lower-right one agree. ONNX's own Attention with is_causal stays at the upper left for each query.
# Seen with: onnxruntime 1.31.1 (CPU), onnx 1.23.2, numpy 2.4.6.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.31.1 onnx==1.23.2 numpy==2.4.6
cat > "$folder/look.py" <<'PYTHON'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper

WIDTH = 8
random = np.random.default_rng(0)


def answered(node, tensors):
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, value.shape) for name, value in tensors.items()]
    graph = helper.make_graph([node], "g", values, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"]).run(None, tensors)[0][0]


def seen_by_each(node, queries, keys):
    """Return how many keys, from the first one on, explain what each query has got."""
    q, k, v = (random.normal(size=(1, rows, WIDTH)).astype(np.float32) for rows in (queries, keys, keys))
    rows = answered(node, {"q": q, "k": k, "v": v})
    found = []
    for query, row in zip(q[0], rows, strict=True):
        for count in range(1, keys + 1):
            weights = np.exp(k[0, :count] @ query / np.sqrt(WIDTH))
            if np.abs(weights @ v[0, :count] / weights.sum() - row).max() < 1e-5:
                found.append(count)
    return found


contrib = helper.make_node(
    "MultiHeadAttention", ["q", "k", "v"], ["y"], domain="com.microsoft", num_heads=1, unidirectional=1
)
standard = helper.make_node("Attention", ["q", "k", "v"], ["y"], q_num_heads=1, kv_num_heads=1, is_causal=1)
seen = {
    (name, queries, keys): seen_by_each(node, queries, keys)
    for name, node in (("MultiHeadAttention", contrib), ("Attention-23", standard))
    for queries, keys in ((4, 4), (3, 5), (1, 5), (5, 3))
}
for (name, queries, keys), counts in seen.items():
    print(f"{name}, {queries} queries, {keys} keys: they see {counts}")
assert seen["MultiHeadAttention", 4, 4] == [1, 2, 3, 4]
assert seen["MultiHeadAttention", 3, 5] == [1, 2, 5]
assert seen["MultiHeadAttention", 1, 5] == [5]
assert seen["Attention-23", 3, 5] == [1, 2, 3]
PYTHON
"$folder/venv/bin/python" "$folder/look.py"
