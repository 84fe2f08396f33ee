"""Recurrent networks."""

from typing import Any

import numpy as np

from benchmarks.fuzz.differential.draft import Draft
from benchmarks.fuzz.differential.rules.registry import rule

_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}


@rule("LSTM", "GRU", "RNN")
def recurrent(draft: Draft) -> None:
    """In each direction, with and without bias, lengths and initial states."""
    steps, batch, inputs, hidden = draft.whole(1, 4), draft.whole(1, 2), draft.whole(1, 4), draft.whole(1, 4)
    direction = draft.pick("forward", "reverse", "bidirectional")
    directions = 2 if direction == "bidirectional" else 1
    gates = _GATES[draft.operator]
    batch_first = draft.opset >= 14 and draft.chance(0.1)

    def weights(*shape: int) -> str:
        return draft.weight(draft.numbers([directions, *shape], "float32", "unit"))

    shape = [batch, steps, inputs] if batch_first else [steps, batch, inputs]
    parts = [draft.tensor(shape, "float32", "unit"), weights(gates * hidden, inputs), weights(gates * hidden, hidden)]
    bias = weights(2 * gates * hidden) if draft.chance(0.6) else ""
    lengths = draft.given(draft.random.integers(1, steps + 1, batch), 0.5, "int32") if draft.chance(0.3) else ""
    state = [batch, directions, hidden] if batch_first else [directions, batch, hidden]
    begin = draft.tensor(state, "float32", "unit") if draft.chance(0.4) else ""
    more = []
    if draft.operator == "LSTM":
        more.append(draft.tensor(state, "float32", "unit") if begin and draft.chance(0.8) else "")
        more.append(weights(3 * hidden) if draft.chance(0.2) else "")
    attributes: dict[str, Any] = {"hidden_size": hidden, "direction": direction, "clip": draft.pick(None, None, 0.3)}
    if draft.operator == "GRU":
        attributes["linear_before_reset"] = draft.pick(None, 0, 1)
    if draft.operator == "LSTM":
        attributes["input_forget"] = draft.pick(None, None, None, 1)
    if batch_first:
        attributes["layout"] = 1
    draft.sums(1e-3, 1e-4)
    draft.finish(
        *parts, bias, lengths, begin, *more, outputs=draft.whole(1, 3 if draft.operator == "LSTM" else 2), **attributes
    )


@rule("StringNormalizer")
def texts(draft: Draft) -> None:
    """Letters in one case, and words left out."""
    x = draft.tensor([draft.whole(1, 5)], "object")
    draft.finish(
        x,
        case_change_action=draft.pick(None, "LOWER", "UPPER", "NONE"),
        stopwords=draft.pick(None, ["a", "b"]),
        is_case_sensitive=draft.pick(None, 0, 1),
        locale="en_US.UTF-8",
    )


@rule("StringConcat")
def joined(draft: Draft) -> None:
    """Texts behind each other."""
    shape = draft.shape(1)
    draft.finish(draft.tensor(shape, "object"), draft.tensor(draft.like(shape), "object"))


@rule("StringSplit")
def split(draft: Draft) -> None:
    """Words of texts."""
    draft.finish(draft.tensor(draft.shape(1, 2, empty=0), "object"), outputs=2, delimiter=draft.pick(None, " ", "a"))


@rule("RegexFullMatch")
def matched(draft: Draft) -> None:
    """Whether texts have a form."""
    draft.finish(draft.tensor(draft.shape(1), "object"), pattern=draft.pick("a+", ".*", "[0-9.]+"))


@rule("TfIdfVectorizer")
def counted(draft: Draft) -> None:
    """How often n-grams occur."""
    pool = [1, 2, 3, 1, 2, 2, 3]
    x = draft.given(draft.random.integers(0, 4, draft.shape(1, 2, empty=0)), 0, "int64")
    draft.finish(
        x,
        mode=draft.pick("TF", "IDF", "TFIDF"),
        min_gram_length=1,
        max_gram_length=2,
        max_skip_count=draft.pick(0, 1),
        ngram_counts=[0, 3],
        ngram_indexes=[0, 1, 2, 3, 4],
        pool_int64s=pool,
    )


@rule("Bernoulli")
def chance(draft: Draft) -> None:
    """Zeros only, of a chance of zero."""
    draft.finish(draft.given(np.zeros(draft.shape(1), np.float32)))
