"""Whether onnxruntime and the compiler see the rows of a batch apart."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from gangway.compiler.errors import ModelError
from gangway.compiler.frontend.importer import read_graph
from gangway.compiler.frontend.simplify import simplify

SEQUENCE: dict[str, list[int | str]] = {"x": ["N", 4, 6]}


def integers(*values: int) -> Any:
    """Return a vector of int64."""
    return np.array(values, np.int64)


def numbers(*shape: int, seed: int = 0) -> Any:
    """Return random float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def is_row_by_row(path: Path, network: Any) -> bool | None:
    """Whether onnxruntime's answers to batches of 2, 3 and 5 are those to their rows; None if there are no answers."""
    compared = None
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(str(path), options)
    except Exception:  # onnxruntime's errors have no common class
        return False
    for rows in (2, 3, 5):
        shapes = {name: [rows, *dims[1:]] for name, dims in network.inputs.items()}
        feeds = {name: numbers(*shape, seed=rows + index) for index, (name, shape) in enumerate(shapes.items())}
        apart = [_answers(session, {name: x[row : row + 1] for name, x in feeds.items()}) for row in range(rows)]
        together = _answers(session, feeds)
        if together is None or any(row is None for row in apart):
            if together is None and any(row is None for row in apart):
                continue
            return False
        for index, answer in enumerate(together):
            expected = np.concatenate([row[index] for row in apart if row is not None])
            if answer.shape != expected.shape or not np.allclose(answer, expected, rtol=1e-4, atol=1e-5):
                return False
        compared = True
    return compared


def _answers(session: onnxruntime.InferenceSession, feeds: dict[str, Any]) -> list[Any] | None:
    try:
        answers: list[Any] = session.run(None, feeds)
    except Exception:  # as above
        return None
    return answers


def refusal(path: Path) -> ModelError | None:
    """Return why the compiler does not compute the rows of a model's batch apart; None if it does."""
    try:
        simplify(read_graph(path))
    except ModelError as error:
        return error
    return None
