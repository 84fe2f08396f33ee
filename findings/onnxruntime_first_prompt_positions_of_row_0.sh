#!/usr/bin/env bash
# onnxruntime takes one number of a first prompt's position_ids: every row counts on from row 0's first position.
#
# A good guess: position_ids of GroupQueryAttention are [batch, tokens], so each token's query and key are rotated by
# its own position, and a batch answers what its rows answer one by one.
# Seen instead: while there is no past, the rest of position_ids is not looked at (the operator's text speaks of "the
# first element", where a reader thinks of each row's). Rows that start elsewhere (prompts
# padded on the left, say) and positions with gaps get others' rotations, without an error. With a past, and one
# token a row, each row has its own. Only differences of positions enter the scores, so a row that is shifted as a
# whole has the right output, and wrong keys in present_key, which the next token meets.
# Seen with: onnxruntime 1.32.0, onnx 1.23.2, numpy 2.4.6.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
cat > "$folder/look.py" <<'PYTHON'
import numpy as np
import onnxruntime
from onnx import TensorProto, helper

QUERY_HEADS, KEY_HEADS, SIZE, POSITIONS = 4, 2, 16, 32
RANDOM = np.random.default_rng(0)
ANGLES = np.outer(np.arange(POSITIONS), 1 / 10.0 ** np.arange(SIZE // 2))
TABLES = {"cos": np.cos(ANGLES).astype(np.float32), "sin": np.sin(ANGLES).astype(np.float32)}
NAMES = ["query", "key", "value", "past_key", "past_value", "lengths", "total", "cos", "sin", "positions"]
OUTPUTS = ["output", "present_key", "present_value"]


def values(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def answers(feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    types = {name: helper.np_dtype_to_tensor_dtype(value.dtype) for name, value in feeds.items()}
    inputs = [helper.make_tensor_value_info(name, types[name], feeds[name].shape) for name in feeds]
    node = helper.make_node(
        "GroupQueryAttention", NAMES, OUTPUTS, domain="com.microsoft",
        num_heads=QUERY_HEADS, kv_num_heads=KEY_HEADS, do_rotary=1,
    )
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in OUTPUTS]
    graph = helper.make_graph([node], "g", inputs, outputs)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, feeds)


def feeds_of(tokens: int, past: int, positions: list[list[int]]) -> dict[str, np.ndarray]:
    rows = len(positions)
    return {
        "query": values(rows, tokens, QUERY_HEADS * SIZE),
        "key": values(rows, tokens, KEY_HEADS * SIZE),
        "value": values(rows, tokens, KEY_HEADS * SIZE),
        "past_key": values(rows, KEY_HEADS, past, SIZE),
        "past_value": values(rows, KEY_HEADS, past, SIZE),
        "lengths": np.full(rows, past + tokens - 1, np.int32),
        "total": np.array(past + tokens, np.int32),
        **TABLES,
        "positions": np.array(positions, np.int64),
    }


def row_alone(feeds: dict[str, np.ndarray], row: int, positions_of: int) -> list[np.ndarray]:
    shared = {"total", *TABLES}
    alone = {name: value if name in shared else value[row : row + 1] for name, value in feeds.items()}
    return answers({**alone, "positions": feeds["positions"][positions_of : positions_of + 1]})


def off_by(ours: list[np.ndarray], theirs: list[np.ndarray]) -> tuple[float, float]:
    output, keys = (float(np.abs(one - other).max()) for one, other in zip(ours[:2], theirs[:2], strict=True))
    return output, keys


found = {}
for title, tokens, past, positions in (
    ("first prompt", 4, 0, [[0, 1, 2, 3], [2, 3, 4, 5]]),
    ("next token", 1, 5, [[5], [11]]),
):
    feeds = feeds_of(tokens, past, positions)
    batch = [part[1:] for part in answers(feeds)]
    for what, positions_of in (("row 1 as alone", 1), ("row 1 by row 0's positions", 0)):
        found[title, what] = off_by(batch, row_alone(feeds, 1, positions_of))
gaps, counted = feeds_of(4, 0, [[2, 3, 7, 9]]), np.array([[2, 3, 4, 5]], np.int64)
found["first prompt", "positions 2 3 7 9 as 2 3 4 5"] = off_by(answers(gaps), answers({**gaps, "positions": counted}))
for (title, what), (output, keys) in found.items():
    print(f"{title}: {what}: output off by {output:.2g}, keys by {keys:.2g}")
same = {case: max(off) < 1e-5 for case, off in found.items()}
assert not same["first prompt", "row 1 as alone"] and same["first prompt", "row 1 by row 0's positions"]
assert same["next token", "row 1 as alone"] and not same["next token", "row 1 by row 0's positions"]
assert same["first prompt", "positions 2 3 7 9 as 2 3 4 5"]
PYTHON
"$folder/venv/bin/python" "$folder/look.py"
