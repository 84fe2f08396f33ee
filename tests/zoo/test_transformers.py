"""The transformers' graphs compute what they should, shown on small ones: masks, causality, relative positions."""

import io
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import pytest

from gangway.zoo.graph import ModelGraph
from gangway.zoo.transformers import Size, bert_base, gpt2, xlnet_base

TINY = Size(layers=2, heads=4, hidden=64, vocabulary=100, positions=32)
SEQUENCE = 12
BUILDERS = {"bert": bert_base, "gpt2": gpt2, "xlnet": xlnet_base}

Numbers = npt.NDArray[Any]


def run(graph: ModelGraph, inputs: dict[str, Numbers], extra: str | None = None) -> Numbers:
    """The first output, or the value `extra` inside the graph; inputs that the model lacks are left out."""
    file = io.BytesIO()
    graph.write(file)
    model = onnx.load_from_string(file.getvalue())
    if extra:
        del model.graph.output[:]
        model.graph.output.append(onnx.ValueInfoProto(name=extra))
    session = onnxruntime.InferenceSession(model.SerializeToString())
    names = {info.name for info in session.get_inputs()}
    output: Numbers = session.run(None, {name: value for name, value in inputs.items() if name in names})[0]
    return output


def tokens(seed: int = 1) -> dict[str, Numbers]:
    """Two sequences; the second half of each is another segment."""
    shape = (2, SEQUENCE)
    return {
        "input_ids": np.random.default_rng(seed).integers(0, TINY.vocabulary, shape),
        "attention_mask": np.ones(shape, np.int64),
        "token_type_ids": (np.arange(SEQUENCE) >= SEQUENCE // 2).astype(np.int64)[None].repeat(2, axis=0),
    }


@pytest.mark.parametrize("name", BUILDERS)
def test_answers_are_finite_and_depend_on_the_tokens(name: str) -> None:
    y = run(BUILDERS[name](3, SEQUENCE, TINY), tokens())
    assert np.isfinite(y).all()
    assert 0.3 < y.std() < 3
    assert np.abs(y[0] - y[1]).max() > 0.2 * np.abs(y).max()


@pytest.mark.parametrize("name", BUILDERS)
def test_masked_tokens_have_no_influence(name: str) -> None:
    inputs = tokens()
    inputs["attention_mask"][:, :4] = 0
    graph = BUILDERS[name](3, SEQUENCE, TINY)
    before = run(graph, inputs)
    inputs["input_ids"][:, :4] = 7
    after = run(graph, inputs)
    seen = slice(4, None) if before.ndim == 3 else slice(None)
    np.testing.assert_allclose(after[:, seen], before[:, seen], atol=1e-5)
    inputs["input_ids"][:, 4] = 7
    assert np.abs(run(graph, inputs)[:, seen] - before[:, seen]).max() > 0.01


def test_gpt2_looks_back_only() -> None:
    inputs = tokens()
    graph = gpt2(3, SEQUENCE, TINY)
    before = run(graph, inputs, extra="ln_f")
    inputs["input_ids"][:, 8] = (inputs["input_ids"][:, 8] + 1) % TINY.vocabulary
    change = np.abs(run(graph, inputs, extra="ln_f") - before).max(axis=(0, 2))
    assert change[:8].max() < 1e-5
    assert change[8:].min() > 1e-3


def test_gpt2_s_head_is_its_embedding_table() -> None:
    graph = gpt2(3, SEQUENCE, TINY)
    hidden = run(graph, tokens(), extra="ln_f")
    words = run(graph, tokens(), extra="wte.weight")
    np.testing.assert_allclose(run(graph, tokens()), hidden[:, -1] @ words.T, atol=1e-4)


def test_xlnet_knows_only_relative_positions() -> None:
    """Tokens that are moved along, with masked ones around them, keep their meaning."""
    graph = xlnet_base(3, SEQUENCE, TINY)
    left = tokens()
    left["attention_mask"][:, 8:] = 0
    right = {name: np.roll(value, 4, axis=1) for name, value in left.items()}
    here, there = run(graph, left)[:, :8], run(graph, right)[:, 4:]
    np.testing.assert_allclose(there, here, atol=1e-5)
    turned = {**left, "input_ids": np.concatenate([left["input_ids"][:, 7::-1], left["input_ids"][:, 8:]], axis=1)}
    assert np.abs(run(graph, turned)[:, 7::-1] - here).max() > 0.01  # order matters


def test_xlnet_knows_whether_segments_agree_but_not_which_they_are() -> None:
    graph = xlnet_base(3, SEQUENCE, TINY)
    inputs = tokens()
    before = run(graph, inputs)
    swapped = {**inputs, "token_type_ids": 1 - inputs["token_type_ids"]}
    np.testing.assert_allclose(run(graph, swapped), before, atol=1e-5)
    joined = {**inputs, "token_type_ids": np.zeros_like(inputs["token_type_ids"])}
    assert np.abs(run(graph, joined) - before).max() > 0.01
