"""LSTM, GRU and RNN against onnxruntime."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper

pytestmark = pytest.mark.long

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
node = helper.make_node
Array = Any


class Layers:
    """Nodes of one operator, each with weights of its own; all their outputs are outputs of the model."""

    def __init__(self, operator: str, inputs: int, hidden: int) -> None:
        self._operator, self._inputs, self._hidden = operator, inputs, hidden
        self._random = np.random.default_rng(1)
        self.nodes: list[Any] = []
        self.constants: dict[str, Array] = {}
        self.outputs: dict[str, None] = {}

    def add(self, given: dict[int, str] | None = None, wanted: str = "yhc", biased: bool = True, **how: Any) -> None:
        """Add a node; `given` names inputs by their places, `wanted` says which outputs it has."""
        gates, index = GATES[self._operator], len(self.nodes)
        directions = 2 if how.get("direction") == "bidirectional" else 1
        shapes = {
            "w": (directions, gates * self._hidden, self._inputs),
            "r": (directions, gates * self._hidden, self._hidden),
            **({"b": (directions, 2 * gates * self._hidden)} if biased else {}),
            **({"p": (directions, 3 * self._hidden)} if given and 7 in given else {}),
        }
        names = {kind: f"{kind}{index}" for kind in shapes}
        for kind, shape in shapes.items():
            numbers = self._random.standard_normal(shape) / np.sqrt(self._hidden)
            self.constants[names[kind]] = numbers.astype(np.float32)
        inputs = ["x", names["w"], names["r"], names.get("b", ""), "", "", "", names.get("p", "")]
        for place, name in (given or {}).items():
            inputs[place] = name or inputs[place]
        kinds = "yhc" if self._operator == "LSTM" else "yh"
        outputs = [f"{kind}{index}" if kind in wanted else "" for kind in kinds]
        self.outputs.update(dict.fromkeys(filter(None, outputs)))
        while not inputs[-1]:
            inputs.pop()
        while not outputs[-1]:
            outputs.pop()
        self.nodes.append(node(self._operator, inputs, outputs, hidden_size=self._hidden, **how))


def lengths_of(numbers: str, most: int) -> tuple[list[Any], dict[str, Array]]:
    """Return nodes that make lengths of some of an input's numbers, from 0 to `most`."""
    nodes = [
        node("Abs", [numbers], ["positive"]),
        node("Clip", ["positive", "none", "all"], ["clipped"]),
        node("Cast", ["clipped"], ["lengths"], to=TensorProto.INT32),
    ]
    return nodes, {"none": np.array(0, np.float32), "all": np.array(most, np.float32)}


@pytest.mark.parametrize("target", ["baseline", None])
def test_attributes_of_lstm(check: Callable[..., list[str]], network: Any, target: str | None) -> None:
    layers = Layers("LSTM", 5, 20)
    layers.add(direction="reverse", biased=False)
    layers.add({5: "both_h", 6: "both_c", 7: ""}, direction="bidirectional", clip=0.8)
    layers.add({4: "lengths", 5: "one_h", 6: "one_c"}, wanted="hc", input_forget=1)
    layers.add(
        {4: "lengths"},
        direction="bidirectional",
        activations=["HardSigmoid", "Relu", "Elu", "LeakyRelu", "Softplus", "Tanh"],
        activation_alpha=[0.3, 0.9, 0.2],
        activation_beta=[0.4],
    )
    lengths, limits = lengths_of("l", 7)
    states = {"both_h": [2, 3, 20], "both_c": [2, 3, 20], "one_h": [1, 3, 20], "one_c": [1, 3, 20]}
    inputs = {"x": [7, 3, 5], "l": [3], **states}
    found = check(network([*lengths, *layers.nodes], inputs, layers.outputs, {**layers.constants, **limits}), target)
    assert found.count("LSTM") == 4


@pytest.mark.parametrize("operator", ["GRU", "RNN"])
def test_attributes_of_others(check: Callable[..., list[str]], network: Any, operator: str) -> None:
    layers = Layers(operator, 5, 33)
    resets = [0, 1] if operator == "GRU" else [None]
    for reset in resets:
        how: dict[str, Any] = {} if reset is None else {"linear_before_reset": reset}
        layers.add({5: "h"}, direction="bidirectional", clip=1.5, **how)
        layers.add({4: "lengths"}, direction="reverse", wanted="h", **how)
    lengths, limits = lengths_of("l", 6)
    inputs = {"x": [6, 2, 5], "l": [2], "h": [2, 2, 33]}
    found = check(network([*lengths, *layers.nodes], inputs, layers.outputs, {**layers.constants, **limits}))
    assert found.count(operator) == 2 * len(resets)


def test_any_number_of_steps(check: Callable[..., list[str]], network: Any) -> None:
    layers = Layers("LSTM", 4, 8)
    layers.add()
    layers.add(direction="bidirectional", wanted="h")
    found = check(network(layers.nodes, {"x": [300, 1, 4]}, layers.outputs, layers.constants))
    assert found.count("LSTM") == 2
    single = Layers("LSTM", 4, 40)
    single.add({5: "h"})
    check(network(single.nodes, {"x": [1, 1, 4], "h": [1, 1, 40]}, single.outputs, single.constants))


@pytest.mark.parametrize(
    ("operator", "hidden", "layers_a_step", "how"),
    [
        ("LSTM", 330, 1, {}),
        ("GRU", 370, 1, {"linear_before_reset": 1}),
        ("GRU", 370, 2, {}),
        ("GRU", 370, 2, {"clip": 0.7, "activations": ["HardSigmoid", "Softplus", "Elu", "Relu"]}),
    ],
)
def test_steps_of_large_matrices_are_layers(
    check: Callable[..., list[str]], network: Any, operator: str, hidden: int, layers_a_step: int, how: dict[str, Any]
) -> None:
    layers = Layers(operator, 4, hidden)
    layers.add({5: "h"}, direction="bidirectional", **how)
    found = check(network(layers.nodes, {"x": [3, 2, 4], "h": [2, 2, hidden]}, layers.outputs, layers.constants))
    assert found.count(operator) == 6 * layers_a_step


@pytest.mark.parametrize(("steps", "given"), [(1, {5: "h"}), (2, {5: "h"}), (2, {})])
def test_reverse_and_last_states_of_large_matrices(
    check: Callable[..., list[str]], network: Any, steps: int, given: dict[int, str]
) -> None:
    layers = Layers("GRU", 4, 370)
    layers.add(given, direction="reverse", wanted="h")
    inputs = {"x": [steps, 1, 4], **({"h": [1, 1, 370]} if given else {})}
    found = check(network(layers.nodes, inputs, layers.outputs, layers.constants))
    assert found.count("GRU") == 2 * steps


def test_rows_of_a_batch(tmp_path: Path, compile_file: Any, load_artifact: Any, network: Any) -> None:
    """The batch as requests have it, in front; every row alone."""
    layers = Layers("GRU", 4, 12)
    layers.add({0: "t"}, linear_before_reset=1)
    nodes = [
        node("Transpose", ["x"], ["t"], perm=[1, 0, 2]),
        *layers.nodes,
        node("Transpose", ["y0"], ["y"], perm=[2, 0, 1, 3]),
        node("Transpose", ["h0"], ["h"], perm=[1, 0, 2]),
    ]
    path = network(nodes, {"x": ["N", 5, 4]}, {"y": None, "h": None}, layers.constants).save(tmp_path / "model.onnx")
    compiled = compile_file(path)
    assert compiled.manifest.batched and not compiled.manifest.fallback_reason
    run, session = load_artifact(compiled.folder), onnxruntime.InferenceSession(str(path))
    x = np.random.default_rng(2).standard_normal((3, 5, 4)).astype(np.float32)
    wanted: Any = session.run(["y", "h"], {"x": x})
    for row in range(3):
        found = run({"x": x[row : row + 1]})
        for name, value in zip(("y", "h"), wanted, strict=True):
            np.testing.assert_allclose(found[name], value[row : row + 1], rtol=1e-5, atol=1e-5)


def test_batch_first(tmp_path: Path, compile_file: Any, load_artifact: Any, network: Any) -> None:
    """onnxruntime knows layout 0 only: it gets the same numbers in that order. Three sequences at once, or as rows."""
    random = np.random.default_rng(3)
    feeds = {"x": random.standard_normal((5, 3, 4), np.float32), "h": random.standard_normal((2, 3, 12), np.float32)}
    swapped = {name: np.ascontiguousarray(value.swapaxes(0, 1)) for name, value in feeds.items()}
    paths = []
    for layout, sequences in ((0, 3), (1, 3), (1, "N")):
        layers = Layers("LSTM", 4, 12)
        layers.add({5: "h"}, direction="bidirectional", layout=layout)
        shapes = {name: [sequences, *value.shape[1:]] for name, value in swapped.items()}
        if not layout:
            shapes = {name: [*value.shape] for name, value in feeds.items()}
        paths.append(tmp_path / f"{layout}{sequences}.onnx")
        network(layers.nodes, shapes, layers.outputs, layers.constants).save(paths[-1])
    answers: Any = onnxruntime.InferenceSession(str(paths[0])).run(["y0", "h0", "c0"], feeds)
    wanted = [answers[0].transpose(2, 0, 1, 3), *(value.swapaxes(0, 1) for value in answers[1:])]
    together, alone = (load_artifact(compile_file(path).folder) for path in paths[1:])
    rows = [alone({name: value[row : row + 1] for name, value in swapped.items()}) for row in range(3)]
    for name, value in zip(("y0", "h0", "c0"), wanted, strict=True):
        np.testing.assert_allclose(together(swapped)[name], value, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(np.concatenate([row[name] for row in rows]), value, rtol=1e-5, atol=1e-5)


def test_a_length_of_more_steps_than_there_are(
    tmp_path: Path, compile_file: Any, load_artifact: Any, network: Any
) -> None:
    layers = Layers("RNN", 4, 5)
    layers.add({4: "lengths"})
    nodes = [node("Cast", ["l"], ["lengths"], to=TensorProto.INT32), *layers.nodes]
    inputs = {"x": [6, 2, 4], "l": [2]}
    path = network(nodes, inputs, layers.outputs, layers.constants).save(tmp_path / "model.onnx")
    run, session = load_artifact(compile_file(path).folder), onnxruntime.InferenceSession(str(path))
    for wrong in (7, -1):
        feeds = {"x": np.ones((6, 2, 4), np.float32), "l": np.array([3, wrong], np.float32)}
        with pytest.raises(Exception, match="Invalid value/s in sequence_lens") as refused:
            session.run(None, feeds)
        run(feeds)
        (text,) = run.refusals
        assert text.endswith(f", found {wrong}")
        assert text.partition(", found")[0].partition(": ")[2] in str(refused.value)
