"""Small transformers of the zoo, compiled, against onnxruntime: one row at a time against all of a batch at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest

from gangway.zoo.transformers import Size, bert_base, gpt2, xlnet_base

S, ROWS = 11, 3
SIZE = Size(layers=2, heads=2, hidden=32, vocabulary=40, positions=16)
ODD = Size(layers=1, heads=3, hidden=36, vocabulary=40, positions=16)  # heads that fill no register
MODELS: dict[str, Callable[..., Any]] = {"bert": bert_base, "gpt2": gpt2, "xlnet": xlnet_base}


def _feeds(random: np.random.Generator, session: Any) -> dict[str, Any]:
    """Rows of different lengths, the shortest of one token."""
    lengths = [S, S // 2, 1]
    feeds = {"input_ids": random.integers(40, size=(ROWS, S)), "token_type_ids": random.integers(2, size=(ROWS, S))}
    feeds["attention_mask"] = np.array([[int(place < length) for place in range(S)] for length in lengths])
    return {item.name: feeds[item.name].astype(np.int64) for item in session.get_inputs()}


@pytest.mark.parametrize(("name", "size"), [("bert", SIZE), ("bert", ODD), ("gpt2", SIZE), ("xlnet", SIZE)])
def test_answers_match_onnxruntime(
    compile_file: Callable[[Path], Any], load_artifact: Callable[[Path], Any], tmp_path: Path, name: str, size: Size
) -> None:
    path = tmp_path / "model.onnx"
    with path.open("wb") as file:
        MODELS[name](5, S, size).write(file)
    model = load_artifact(compile_file(path).folder)
    session = onnxruntime.InferenceSession(str(path))
    feeds = _feeds(np.random.default_rng(7), session)
    names = [output.name for output in session.get_outputs()]
    expected = dict(zip(names, session.run(names, feeds), strict=True))
    for row in range(ROWS):
        answers = model({key: value[row : row + 1] for key, value in feeds.items()}, seed=row)
        for output in names:
            limit = 2e-5 * np.abs(expected[output]).max()
            np.testing.assert_allclose(answers[output], expected[output][row : row + 1], rtol=0, atol=limit)
    operators = [layer.operator for layer in model.manifest.layers]
    assert operators.count("FusedAttention") == size.layers
    assert sum("Gelu" in operator for operator in operators) == size.layers
    if name == "bert" and size is SIZE:  # nothing is packed or unpacked between the embeddings and the answer
        assert operators.count("Pack") == 1
        assert operators.count("Unpack") == 1
