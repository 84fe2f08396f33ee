"""Attention, of ONNX and of com.microsoft."""

import numpy as np

from benchmarks.fuzz.differential.draft import Draft, LeftOutError
from benchmarks.fuzz.differential.rules.registry import rule


@rule("Attention")
def attention(draft: Draft) -> None:
    """With heads as an axis or within the last one, groups of queries, masks, and without what comes later."""
    batch, queries, keys, size = draft.whole(1, 2), draft.whole(1, 4), draft.whole(1, 4), draft.pick(2, 4, 8)
    groups = draft.pick(1, 1, 2)
    kv_heads = draft.whole(1, 2)
    heads = groups * kv_heads
    values = draft.pick(size, size, size + 1)
    if draft.chance(0.5):
        shapes = [[batch, heads, queries, size], [batch, kv_heads, keys, size], [batch, kv_heads, keys, values]]
        attributes = {}
    else:
        shapes = [[batch, queries, heads * size], [batch, keys, kv_heads * size], [batch, keys, kv_heads * values]]
        attributes = {"q_num_heads": heads, "kv_num_heads": kv_heads}
    parts = [draft.given(draft.numbers(shape, "float32", "plain")) for shape in shapes]
    draft.sums(1e-3, 1e-4)
    mask = []
    if draft.chance(0.5):
        kind = draft.pick("bool", "float32")
        shape = draft.pick([queries, keys], [batch, 1, queries, keys], [batch, heads, queries, keys])
        value = draft.random.random(shape) < 0.7
        mask = [draft.given(value if kind == "bool" else np.where(value, 0.0, -10000.0).astype(np.float32), 0.3)]
    draft.finish(
        *parts,
        *mask,
        is_causal=draft.pick(None, 0, 1),
        scale=draft.pick(None, 0.3),
        softcap=draft.pick(None, None, 2.0),
        **attributes,
    )


@rule("RotaryEmbedding")
def rotated(draft: Draft) -> None:
    """Positions as rotations."""
    batch, heads, length, size = draft.whole(1, 2), draft.whole(1, 2), draft.whole(1, 3), draft.pick(4, 8)
    four = draft.chance(0.5)
    x = draft.tensor([batch, heads, length, size] if four else [batch, length, heads * size], "float32", "plain")
    tables = [draft.weight(draft.numbers([6, size // 2], "float32", "unit")) for _ in range(2)]
    positions = draft.given(draft.random.integers(0, 6, [batch, length]), 0.3, "int64")
    draft.sums()
    draft.finish(x, *tables, positions, interleaved=draft.pick(None, 0, 1), num_heads=None if four else heads)


@rule("MultiHeadAttention", domain="ms")
def of_heads(draft: Draft) -> None:
    """Queries, keys and values that are projected already."""
    batch, queries, keys, heads, size = (
        draft.whole(1, 2),
        draft.whole(1, 4),
        draft.whole(1, 4),
        draft.whole(1, 2),
        draft.pick(4, 8),
    )
    shapes = ([batch, queries, heads * size], [batch, keys, heads * size], [batch, keys, heads * size])
    parts = [draft.given(draft.numbers(shape, "float32", "plain")) for shape in shapes]
    bias = draft.weight(draft.numbers([3 * heads * size], "float32", "plain")) if draft.chance(0.4) else ""
    draft.sums(1e-3, 1e-4)
    mask = draft.given(draft.random.integers(0, 2, [batch, keys]), 0, "int32") if draft.chance(0.3) else ""
    added = (
        draft.tensor(draft.pick([batch, heads, queries, keys], [1, heads, queries, keys]), "float32", "plain")
        if draft.chance(0.3)
        else ""
    )
    draft.finish(
        *parts,
        bias,
        mask,
        added,
        num_heads=heads,
        scale=draft.pick(None, 0.3),
        unidirectional=draft.pick(None, None, 1),
    )


@rule("Attention", domain="ms")
def projected(draft: Draft) -> None:
    """With the projection of one tensor to all three."""
    batch, length, inputs, heads, size = (
        draft.whole(1, 2),
        draft.whole(1, 4),
        draft.whole(1, 4),
        draft.whole(1, 2),
        draft.pick(4, 8),
    )
    x = draft.tensor([batch, length, inputs], "float32", "plain")
    hidden = heads * size
    parts = [draft.weight(draft.numbers(shape, "float32", "plain")) for shape in ([inputs, 3 * hidden], [3 * hidden])]
    draft.sums(1e-3, 1e-4)
    mask = []
    if draft.chance(0.4):
        mask = (
            [draft.given(draft.random.integers(1, length + 1, batch), 0, "int32")]
            if draft.chance(0.5)
            else [draft.given(draft.random.integers(0, 2, [batch, length]), 0, "int32")]
        )
    draft.finish(x, *parts, *mask, num_heads=heads, unidirectional=draft.pick(None, 0, 1))


@rule("RotaryEmbedding", domain="ms")
def rotated_here(draft: Draft) -> None:
    """The same, in com.microsoft's order of inputs."""
    batch, heads, length, size = draft.whole(1, 2), draft.whole(1, 2), draft.whole(1, 3), draft.pick(4, 8)
    x = draft.tensor([batch, length, heads * size], "float32", "plain")
    positions = draft.given(draft.random.integers(0, 4, [batch, length]), 0.3, "int64")
    tables = [draft.weight(draft.numbers([6, size // 2], "float32", "unit")) for _ in range(2)]
    draft.sums()
    draft.finish(x, positions, *tables, interleaved=draft.pick(None, 0, 1))


@rule("QAttention", domain="ms")
def quantised(draft: Draft) -> None:
    """With weights of 8 bits."""
    batch, length, inputs, heads, size = 1, draft.whole(1, 4), draft.whole(1, 4), draft.whole(1, 2), 4
    hidden = heads * size
    x = draft.given(draft.random.integers(0, 256, [batch, length, inputs]), 0, "uint8")
    w = draft.weight(draft.numbers([inputs, 3 * hidden], "int8", "finite"))
    parts = [
        draft.weight(draft.numbers([3 * hidden], "float32", "plain")),
        draft.weight(np.float32(0.02)),
        draft.weight(np.float32(0.01)),
    ]
    if not size:
        raise LeftOutError("nothing")
    draft.sums(1e-3, 1e-3)
    draft.finish(x, w, *parts, "", draft.weight(np.uint8(120)), draft.weight(np.int8(0)), num_heads=heads)
