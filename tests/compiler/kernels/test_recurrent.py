"""The kernels of an LSTM, and of the parts of a GRU's step, against numpy: of one row, and of several rows at strides
of any kind, between guards.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np

from gangway.artifact.format import TargetSpec
from gangway.compiler.kernels.codegen import aligned
from gangway.compiler.kernels.specs import Activation, Array, RecurrentSpec
from gangway.compiler.kernels.templates import registry
from tests.helpers.kernel_runs import build, for_rows, in_pieces

STEPS, HIDDEN = 3, 21
ACTIVATIONS = (Activation("sigmoid"), Activation("tanh"), Activation("tanh"))
SPEC = RecurrentSpec(
    "LSTM", STEPS, 1, HIDDEN, (ACTIVATIONS,) * 2, initial_h=True, initial_c=True, outputs=(True, True, True)
)
GAP = 5  # numbers between rows that belong to nobody
GUARD = 77.0


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def lstm(x: Array, matrices: Array, h: Array, c: Array) -> tuple[Array, Array, Array]:
    """Products [directions][gates][hidden][steps] of one row to y, the last h and the last c, in double precision."""
    y, last_h, last_c = np.zeros((STEPS, 2, HIDDEN)), np.zeros((2, HIDDEN)), np.zeros((2, HIDDEN))
    for direction in range(2):
        state, cell = h[direction].astype(np.float64), c[direction].astype(np.float64)
        for step in range(STEPS)[:: -1 if direction else 1]:
            sums = x[direction, :, :, step] + (matrices[direction] @ state).reshape(4, HIDDEN)
            cell = sigmoid(sums[2]) * cell + sigmoid(sums[0]) * np.tanh(sums[3])
            y[step, direction] = state = sigmoid(sums[1]) * np.tanh(cell)
        last_h[direction], last_c[direction] = state, cell
    return y, last_h, last_c


def blocked(x: Array, lanes: int) -> Array:
    """[rows][directions][gates][hidden][steps] -> [rows][blocks of channels x steps x lanes]; surplus is no number."""
    padded = np.pad(x, ((0, 0), (0, 0), (0, 0), (0, SPEC.units - HIDDEN), (0, 0)), constant_values=np.nan)
    return padded.reshape(len(x), -1, lanes, STEPS).swapaxes(2, 3).reshape(len(x), -1)


def rows_in_memory(values: Array) -> Array:
    """The rows, each before GAP numbers that nobody may touch."""
    memory = np.full((len(values), values[0].size + GAP), GUARD, np.float32)
    memory[:, :-GAP] = values.reshape(len(values), -1)
    return aligned(memory, offset_bytes=4)


def test_every_number_of_rows(target: TargetSpec, library_path: Path, rng: np.random.Generator) -> None:
    plan, batch = registry.plan(SPEC, target), registry.batch_plan(SPEC, target)
    assert batch is not None
    library = build({"one": plan, "batch": batch}, target, library_path)
    matrices = (rng.standard_normal((2, 4 * HIDDEN, HIDDEN)) / 5).astype(np.float32)
    packed = aligned(registry.pack(plan, target, {"recurrent": matrices})[0])
    for rows in range(1, batch.rows + 1):
        x = rng.standard_normal((rows, 2, 4, HIDDEN, STEPS), np.float32)
        h, c = (rng.standard_normal((rows, 2, HIDDEN), np.float32) for _ in range(2))
        wanted = [lstm(*row) for row in zip(x, [matrices] * rows, h, c, strict=True)]
        results = [np.full((rows, size), 5, np.float32) for size in (2 * HIDDEN, 2 * HIDDEN, STEPS * 2 * HIDDEN)]
        blocks = rows_in_memory(blocked(x, target.lanes))
        for symbol, tasks in (("batch", batch.tasks), *([("one", plan.tasks)] if rows == 1 else [])):
            outputs = [rows_in_memory(result) for result in results]
            arguments = [blocks, packed, rows_in_memory(h), rows_in_memory(c), *outputs]
            if symbol == "batch":
                for_rows(library, symbol, arguments, [packed], tasks)
            else:
                in_pieces(library, symbol, arguments, tasks)
            for row, (y, last_h, last_c) in enumerate(wanted):
                for output, value in zip(outputs, (last_h, last_c, y), strict=True):
                    np.testing.assert_allclose(output[row, :-GAP], value.reshape(-1), rtol=1e-5, atol=1e-6)
                    assert (output[row, -GAP:] == GUARD).all()


def test_parts_of_a_step(target: TargetSpec, library_path: Path, rng: np.random.Generator) -> None:
    """The reset state and the update gate, then what follows from them: the new state, twice."""
    step = RecurrentSpec("GRU", 1, 1, HIDDEN, (ACTIVATIONS[:2],), initial_h=True, positions=STEPS)
    specs = [replace(step, part="gates"), replace(step, part="candidate", outputs=(True, True, False))]
    plans, batches = ([choose(spec, target) for spec in specs] for choose in (registry.plan, registry.batch_plan))
    named = {"one": plans, "batch": batches}
    functions = {f"{name}{index}": plan for name, each in named.items() for index, plan in enumerate(each)}
    library = build(functions, target, library_path)
    matrix = (rng.standard_normal((3, HIDDEN, HIDDEN)) / 5).astype(np.float32)
    weights = [aligned(registry.pack(plan, target, {"recurrent": matrix})[0]) for plan in plans]
    for rows in range(1, batches[0].rows + 1):
        x, h = (
            rng.standard_normal((rows, 1, 3, HIDDEN, STEPS), np.float32),
            rng.standard_normal((rows, HIDDEN), np.float32),
        )
        update, reset = (sigmoid(x[:, 0, gate, :, 0] + h @ matrix[gate].T) for gate in range(2))
        wanted = (1 - update) * np.tanh(x[:, 0, 2, :, 0] + (reset * h) @ matrix[2].T) + update * h
        for symbol, chosen in (("batch", batches), *([("one", plans)] if rows == 1 else [])):
            ready, state = rows_in_memory(blocked(x, target.lanes)), rows_in_memory(h)
            halves, results = ([rows_in_memory(np.full_like(h, 5)) for _ in range(2)] for _ in range(2))
            for index, others in enumerate([[state, *halves], [state, *halves, *results]]):
                arguments = [ready, weights[index], *others]
                if symbol == "batch":
                    for_rows(library, f"batch{index}", arguments, weights, chosen[index].tasks)
                else:
                    in_pieces(library, f"one{index}", arguments, chosen[index].tasks)
            for memory, expected in zip([*halves, *results], [reset * h, update, wanted, wanted], strict=True):
                np.testing.assert_allclose(memory[:, :-GAP], expected, rtol=1e-5, atol=1e-6)
                assert (memory[:, -GAP:] == GUARD).all()
