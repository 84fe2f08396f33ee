"""Reductions, normalisations, and what runs along an axis."""

import numpy as np

from benchmarks.fuzz.differential.draft import Draft
from benchmarks.fuzz.differential.rules.registry import rule

_BY_INPUT = {"ReduceSum": 13}


@rule(
    "ReduceL1",
    "ReduceL2",
    "ReduceLogSum",
    "ReduceLogSumExp",
    "ReduceMax",
    "ReduceMean",
    "ReduceMin",
    "ReduceProd",
    "ReduceSum",
    "ReduceSumSquare",
)
def reduced(draft: Draft) -> None:
    """Over some axes, or all, or none."""
    shape = draft.shape(0, 4)
    axes = sorted(draft.random.permutation(len(shape))[: draft.whole(0, len(shape))].tolist())
    axes = [axis - len(shape) if draft.opset >= 11 and draft.chance(0.3) else axis for axis in axes]
    dtype = draft.type_of()
    x = draft.tensor(shape, dtype, draft.pick("sums", "plain", "ties") if np.dtype(dtype).kind == "f" else "")
    keep = draft.pick(None, 0, 1)
    draft.sums()
    if draft.opset < _BY_INPUT.get(draft.operator, 18):
        draft.finish(x, axes=axes or None, keepdims=keep)
        return
    given = [draft.weight(axes, "int64")] if axes or draft.chance(0.3) else []
    draft.finish(x, *given, keepdims=keep, noop_with_empty_axes=draft.pick(None, 0, 1))


@rule("ArgMax", "ArgMin")
def place_of(draft: Draft) -> None:
    """The place of the largest or smallest, first or last."""
    shape = draft.shape(1, empty=0)
    axis = draft.axis(len(shape)) if draft.opset >= 11 else draft.whole(0, len(shape) - 1)
    last = draft.pick(None, 0, 1) if draft.opset >= 12 else None
    x = draft.tensor(shape, draft.type_of(), draft.pick("ties", "ties", "finite", ""))
    draft.finish(x, axis=draft.pick(None, axis), keepdims=draft.pick(None, 0, 1), select_last_index=last)


@rule("Softmax", "LogSoftmax", "Hardmax")
def along(draft: Draft) -> None:
    """Along an axis; before opset 13 along all from there on."""
    shape = draft.shape(1)
    axis = draft.axis(len(shape)) if draft.opset >= 11 else draft.whole(0, len(shape) - 1)
    kind = draft.pick("ties", "sums", "finite", "plain")
    default = None if len(shape) > 1 or draft.opset >= 13 else axis  # which is 1, or the last one
    draft.finish(draft.tensor(shape, draft.type_of(), kind), axis=draft.pick(default, axis, axis))


@rule("CumSum", "CumProd")
def running(draft: Draft) -> None:
    """Sums up to each place."""
    shape = draft.shape(1)
    axis = draft.axis(len(shape))
    dtype = draft.type_of()
    x = draft.tensor(shape, dtype, "sums" if np.dtype(dtype).kind == "f" else "")
    draft.sums()
    where = draft.weight(np.array(axis, draft.pick("int32", "int64")))
    draft.finish(x, where, exclusive=draft.pick(None, 0, 1), reverse=draft.pick(None, 0, 1))


@rule("LpNormalization")
def of_length_one(draft: Draft) -> None:
    """Divided by its length."""
    shape = draft.shape(1, empty=0)
    x = draft.tensor(shape, draft.type_of(), draft.pick("ties", "plain", "sums"))
    draft.sums()
    draft.finish(x, axis=draft.pick(None, draft.axis(len(shape))), p=draft.pick(None, 1, 2))


@rule("LayerNormalization", "RMSNormalization")
def normalised(draft: Draft) -> None:
    """Over the last axes."""
    shape, dtype = draft.shape(1, 4, empty=0), draft.type_of()
    axis = draft.axis(len(shape))
    x = draft.tensor(shape, dtype, draft.pick("plain", "ties"))
    rest = shape[axis:]
    draft.sums(1e-3, 1e-4)
    parts = [draft.given(draft.numbers(rest, dtype, "plain"), 0.7)]
    if draft.operator == "LayerNormalization" and draft.chance(0.7):
        parts.append(draft.given(draft.numbers(rest, dtype, "plain"), 0.7))
    outputs = draft.pick(1, 1, 1, 3) if draft.operator == "LayerNormalization" else 1
    draft.finish(x, *parts, outputs=outputs, axis=axis, epsilon=draft.pick(None, 1e-2))


@rule("InstanceNormalization", "GroupNormalization", "BatchNormalization", "LRN", "MeanVarianceNormalization")
def of_channels(draft: Draft) -> None:
    """Channels of images."""
    groups = draft.whole(1, 3)
    channels = groups * draft.whole(1, 3)
    shape = [draft.whole(1, 2), channels, *(draft.whole(1, 5) for _ in range(draft.whole(1, 3)))]
    dtype = draft.type_of("T1" if draft.operator == "_" else "T")
    if draft.operator == "MeanVarianceNormalization":
        shape = [*shape[:2], draft.whole(2, 5), draft.whole(1, 5)]
    if draft.operator == "LRN":
        shape = [*shape[:2], draft.whole(1, 5), draft.whole(1, 5)]
    x = draft.tensor(shape, dtype, "plain")
    draft.sums(1e-3, 1e-4)

    def vector(length: int, kind: str = "plain") -> str:
        return draft.given(draft.numbers([length], dtype, kind), 0.8)

    match draft.operator:
        case "InstanceNormalization":
            draft.finish(x, vector(channels), vector(channels), epsilon=draft.pick(None, 0.1))
        case "GroupNormalization":
            length = channels if draft.opset >= 21 else groups
            draft.finish(x, vector(length), vector(length), num_groups=groups, epsilon=draft.pick(None, 0.1))
        case "BatchNormalization":
            parts = [vector(channels), vector(channels), vector(channels), vector(channels, "positive")]
            draft.finish(x, *parts, epsilon=draft.pick(None, 0.1))
        case "LRN":
            draft.finish(
                x,
                size=draft.pick(1, 3, 5),
                alpha=draft.pick(None, 0.5),
                beta=draft.pick(None, 0.5),
                bias=draft.pick(None, 2.0),
            )
        case _:
            draft.finish(x, axes=draft.pick(None, [0, 2, 3], [1], [2, 3]))


@rule("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")
def loss(draft: Draft) -> None:
    """What a classifier is trained by."""
    classes = draft.whole(1, 4)
    rest = draft.shape(0, 2, empty=0)
    batch = draft.whole(1, 3)
    scores = draft.given(draft.numbers([batch, classes, *rest], "float32", "plain"))
    targets = draft.random.integers(0, classes, [batch, *rest])
    ignored = draft.pick(None, 0, -1)
    if ignored == -1:
        targets = np.where(draft.random.random(targets.shape) < 0.3, -1, targets)
    weights = [draft.given(draft.numbers([classes], "float32", "positive"), 0.5)] if draft.chance(0.4) else []
    draft.sums()
    draft.finish(
        scores,
        draft.given(targets, 0, draft.pick("int64", "int32")),
        *weights,
        ignore_index=ignored,
        reduction=draft.pick(None, "none", "mean", "sum"),
    )
