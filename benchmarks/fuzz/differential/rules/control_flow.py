"""Nodes with graphs inside."""

from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

from benchmarks.fuzz.differential.draft import Draft, LeftOutError
from benchmarks.fuzz.differential.rules.registry import rule

_FUNCTIONS = ("Neg", "Abs", "Relu", "Exp", "Identity")


def _unknown(name: str) -> Any:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, None)


@rule("If")
def branched(draft: Draft) -> None:
    """One branch or the other, which may differ in shape, on a tensor from outside."""
    shape = draft.shape(1, 3, empty=0)
    condition = draft.given(np.array(draft.chance(0.5)), 0)
    outer = draft.tensor(shape, "float32", "plain", 0.3)
    branches = []
    for side in ("then", "else"):
        node = helper.make_node(draft.pick(*_FUNCTIONS), [outer], [f"{side}_y"])
        if draft.chance(0.3):
            node = helper.make_node("Concat", [outer, outer], [f"{side}_y"], axis=0)
        branches.append(helper.make_graph([node], side, [], [_unknown(f"{side}_y")]))
    draft.finish(condition, then_branch=branches[0], else_branch=branches[1])


@rule("Loop")
def repeated(draft: Draft) -> None:
    """A number of rounds, also none, with a state and what each round yields."""
    rounds = draft.weight(draft.whole(0, 4), "int64") if draft.chance(0.9) else ""
    keep = draft.weight(np.array(draft.chance(0.8))) if not rounds or draft.chance(0.6) else ""
    limit = float(draft.whole(1, 6))
    state = draft.tensor(draft.shape(0, 2, empty=0), "float32", "plain", 0)
    one = numpy_helper.from_array(np.array(1, np.float32), "one")
    most = numpy_helper.from_array(np.array(limit, np.float32), "most")
    body = helper.make_graph(
        [
            helper.make_node("Cast", ["i"], ["at"], to=TensorProto.FLOAT),
            helper.make_node("Less", ["at", "most"], ["go"]),
            helper.make_node("Add", ["s", "one"], ["t"]),
            helper.make_node(draft.pick("Mul", "Add"), ["s", "at"], ["row"]),
        ],
        "round",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            _unknown("s"),
        ],
        [helper.make_tensor_value_info("go", TensorProto.BOOL, []), _unknown("t"), _unknown("row")],
        [one, most],
    )
    draft.finish(rounds, keep, state, outputs=2, body=body)


@rule("Scan")
def scanned(draft: Draft) -> None:
    """Running sums over the first axis, in either direction."""
    if draft.opset < 9:
        raise LeftOutError("it has a batch of its own")
    rest = draft.shape(0, 2, empty=0)
    begin = draft.tensor(rest, "float32", "plain", 0.3)
    x = draft.tensor([draft.whole(1, 4), *rest], "float32", "plain", 0)
    body = helper.make_graph(
        [helper.make_node("Add", ["s", "v"], ["t"]), helper.make_node("Identity", ["t"], ["row"])],
        "step",
        [_unknown("s"), _unknown("v")],
        [_unknown("t"), _unknown("row")],
    )
    draft.finish(
        begin,
        x,
        outputs=2,
        body=body,
        num_scan_inputs=1,
        scan_input_directions=draft.pick(None, [0], [1]),
        scan_output_directions=draft.pick(None, [0], [1]),
    )
