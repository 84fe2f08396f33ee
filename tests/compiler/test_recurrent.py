"""LSTM, GRU and RNN against onnxruntime."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from onnx import helper

node = helper.make_node
STEPS, INPUTS, HIDDEN = 4, 5, 12


@pytest.mark.parametrize(("operator", "gates"), [("LSTM", 4), ("GRU", 3), ("RNN", 1)])
def test_recurrent_layers(check: Callable[..., list[str]], network: Any, operator: str, gates: int) -> None:
    random = np.random.default_rng(0)

    def weights(*shape: int) -> Any:
        return (random.standard_normal(shape) / 3).astype(np.float32)

    constants = {
        **{f"w{n}": weights(n, gates * HIDDEN, INPUTS) for n in (1, 2)},
        **{f"r{n}": weights(n, gates * HIDDEN, HIDDEN) for n in (1, 2)},
        **{f"b{n}": weights(n, 2 * gates * HIDDEN) for n in (1, 2)},
        "h": weights(2, 1, HIDDEN),
    }
    states = 2 if operator == "LSTM" else 1
    outputs = {f"{kind}{n}": None for kind in ("y", "h", "c")[: 1 + states] for n in ("a", "b")}
    names = {n: [f"{kind}{n}" for kind in ("y", "h", "c")[: 1 + states]] for n in ("a", "b")}
    attributes = {"linear_before_reset": 1} if operator == "GRU" else {}
    nodes = [
        node(operator, ["x", "w1", "r1"], names["a"], hidden_size=HIDDEN, direction="reverse", **attributes),
        node(
            operator,
            ["x", "w2", "r2", "b2", "", *["h"] * states],
            names["b"],
            hidden_size=HIDDEN,
            direction="bidirectional",
        ),
    ]
    del constants["b1"]
    check(network(nodes, {"x": [STEPS, 1, INPUTS]}, outputs, constants))
