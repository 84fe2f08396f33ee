"""Random index arithmetic: whatever the check accepts, onnxruntime answers row by row as all at once."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

from gangway.compiler.errors import UnsupportedModelError
from tests.helpers.batch_networks import SEQUENCE, is_row_by_row, refusal


@dataclass
class Sketch:
    """A model while it grows, at random."""

    random: np.random.Generator
    nodes: list[Any] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)

    def op(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """The output of a new node, of TopK the indices."""
        outputs = [f"t{len(self.nodes)}"]
        if operator == "TopK":
            outputs.insert(0, f"values{len(self.nodes)}")
        self.nodes.append(helper.make_node(operator, list(inputs), outputs, **attributes))
        return outputs[-1]

    def of(self, *values: int) -> str:
        """A new constant vector."""
        return self.constant(np.array(values, np.int64))

    def constant(self, value: Any) -> str:
        """A new constant."""
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(value, np.int64)
        return name

    def chance(self, share: float) -> bool:
        """Whether something happens."""
        return bool(self.random.random() < share)

    def some(self, *choices: Any) -> Any:
        """One of several."""
        return choices[self.random.integers(len(choices))]


def own_places(sketch: Sketch, length: int) -> str:
    """Places in a row, [N or 1, few], mostly below `length`, by constants or by data."""
    everything = sketch.op("Reshape", "x", sketch.of(-1, 24))
    some = sketch.op("Slice", everything, sketch.of(0), sketch.of(length), sketch.of(1))
    few = int(sketch.random.integers(1, 3))
    match sketch.some("constants", "best", "best few", "data"):
        case "constants":
            places = sketch.constant(sketch.random.integers(0, length + sketch.chance(0.1), (1, few)))
        case "best":
            places = sketch.op("ArgMax", some if sketch.chance(0.9) else everything, axis=1)
        case "best few":
            places = sketch.op("TopK", some, sketch.of(few))
        case _:
            first = sketch.op("Slice", everything, sketch.of(0), sketch.of(few), sketch.of(1))
            places = sketch.op("Cast", first, to=TensorProto.INT64)
            places = sketch.op("Mod", places, sketch.constant(length + sketch.chance(0.1)))
    if sketch.chance(0.2):
        places = sketch.op("Div", sketch.op("Mul", places, sketch.constant(2)), sketch.constant(2))
    if sketch.chance(0.1):
        places = sketch.op("Sub", places, sketch.constant(1))
    if sketch.chance(0.2):
        is_negative = sketch.op("Less", places, sketch.constant(0))
        places = sketch.op("Where", is_negative, sketch.op("Add", places, sketch.constant(length)), places)
    return places


def numbers_of_rows(sketch: Sketch, rows: str, step: int) -> str:
    """Mostly `step` times the number of each row, [N, 1]; `rows` is how many there are."""
    zero, one = sketch.constant(0), sketch.constant(1)
    if sketch.chance(0.15):
        step = sketch.some(1, 2, 6, 24)
    match sketch.some("range", "steps", "sum", "quotients"):
        case "range":
            found = sketch.op("Mul", sketch.op("Range", zero, rows, one), sketch.constant(step))
        case "steps":
            found = sketch.op("Range", zero, sketch.op("Mul", rows, sketch.constant(step)), sketch.constant(step))
        case "sum":
            ones = sketch.op("Expand", one, sketch.op("Reshape", rows, sketch.of(1)))
            found = sketch.op("Mul", sketch.op("CumSum", ones, zero, exclusive=1), sketch.constant(step))
        case _:
            three = sketch.constant(3)
            range_ = sketch.op("Range", zero, sketch.op("Mul", rows, three), three)
            found = sketch.op("Mul", sketch.op("Div", range_, three), sketch.constant(step))
    match sketch.random.integers(24):
        case 0:
            found = sketch.op("Sub", sketch.op("Sub", rows, one), found)
        case 1:
            found = sketch.op("Mod", sketch.op("Add", found, one), rows)
        case 2:
            found = sketch.op("Min", found, sketch.constant(sketch.random.integers(1, 40)))
        case 3:
            found = sketch.op("Sub", found, one)
    return sketch.op("Unsqueeze", found, sketch.of(1))


def model(seed: int) -> Sketch:
    """Numbers of x, picked or changed by the places of rows and places in rows."""
    sketch = Sketch(np.random.default_rng(seed))
    vector = sketch.op("Shape", "x", start=0, end=1)
    rows = sketch.op("Squeeze", vector)
    kind = sketch.some("slots", "numbers", "elements", "pairs")
    length, step = (4, 1 if kind == "pairs" else 4) if kind in ("slots", "pairs") else (24, 24)
    own, offsets = own_places(sketch, length), numbers_of_rows(sketch, rows, step)
    if kind == "pairs":
        shape = sketch.op("Shape", sketch.op("Add", own, offsets))
        parts = [sketch.op("Unsqueeze", sketch.op("Expand", part, shape), sketch.of(2)) for part in (offsets, own)]
        places = sketch.op("Concat", *(parts if sketch.chance(0.9) else parts[::-1]), axis=2)
        found = sketch.op("GatherND", "x", places)
        if sketch.chance(0.4):
            found = sketch.op("ScatterND", "x", places, sketch.op("Neg", found))
    else:
        flat = sketch.op("Reshape", "x", sketch.of(-1, 6) if kind == "slots" else sketch.of(-1))
        places = sketch.op("Add", own, offsets)
        match sketch.random.integers(8):
            case 0:
                places = sketch.op("Clip", places, sketch.constant(0))
            case 1:
                places = sketch.op("Concat", places, places, axis=1)
            case 2:
                places = sketch.op("Tile", places, sketch.some(sketch.of(1, 2), sketch.of(2, 1)))
        if kind == "elements":
            places = sketch.op("Reshape", places, sketch.of(-1))
        found = sketch.op("GatherElements" if kind == "elements" else "Gather", flat, places, axis=0)
        if kind == "elements" and sketch.chance(0.4):
            found = sketch.op("ScatterElements", flat, places, sketch.op("Neg", found), axis=0)
    shape = sketch.op("Concat", vector, sketch.of(-1), axis=0)
    sketch.nodes.append(helper.make_node("Reshape", [found, shape], ["y"]))
    return sketch


@pytest.mark.parametrize("seed", range(48))
def test_what_is_accepted_is_computed_row_by_row(network: Any, tmp_path: Path, seed: int) -> None:
    sketch = model(seed)
    graph = network(sketch.nodes, SEQUENCE, {"y": None}, sketch.constants, opset=18)
    path = graph.save(tmp_path / "model.onnx")
    why = refusal(path)
    assert is_row_by_row(path, graph) is not False if why is None else isinstance(why, UnsupportedModelError)


def test_most_of_what_is_computed_row_by_row_is_accepted(network: Any, tmp_path: Path) -> None:
    apart = accepted = 0
    for seed in range(100, 148):
        sketch = model(seed)
        graph = network(sketch.nodes, SEQUENCE, {"y": None}, sketch.constants, opset=18)
        path = graph.save(tmp_path / "model.onnx")
        if is_row_by_row(path, graph):
            apart += 1
            accepted += refusal(path) is None
    assert apart > 20
    assert accepted >= 0.8 * apart
