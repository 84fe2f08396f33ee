"""Convolutions, pooling and what else slides over images."""

from typing import Any

import numpy as np

from benchmarks.fuzz.differential.draft import Draft
from benchmarks.fuzz.differential.rules.registry import rule


def window(draft: Draft, rank: int, dilated: bool = True) -> tuple[list[int], dict[str, Any]]:
    """A kernel's sizes and attributes; pads are smaller than the kernel."""
    kernel = [draft.whole(1, 3) for _ in range(rank)]
    attributes: dict[str, Any] = {}
    if draft.chance(0.6):
        attributes["strides"] = [draft.whole(1, 3) for _ in range(rank)]
    if dilated and draft.chance(0.3):
        attributes["dilations"] = [draft.whole(1, 2) for _ in range(rank)]
    if draft.chance(0.6):
        attributes["pads"] = [draft.whole(0, size - 1) for _ in range(2) for size in kernel]
    elif draft.chance(0.4) and "dilations" not in attributes:
        attributes["auto_pad"] = draft.pick("SAME_UPPER", "SAME_LOWER", "VALID", "NOTSET")
    return kernel, attributes


def image(draft: Draft, kernel: list[int], attributes: dict[str, Any]) -> list[int]:
    """Sizes of an image that has room for the kernel."""
    dilations = attributes.get("dilations", [1] * len(kernel))
    return [(size - 1) * dilation + draft.whole(1, 6) for size, dilation in zip(kernel, dilations, strict=True)]


@rule("Conv", "ConvInteger", "ConvTranspose")
def convolved(draft: Draft) -> None:
    """Of lines, images and volumes, in groups."""
    kernel, attributes = window(draft, draft.pick(1, 2, 2, 2, 3))
    group, batch = draft.pick(1, 1, 2, 3), draft.whole(1, 2)
    inputs, outputs = group * draft.whole(1, 3), group * draft.whole(1, 3)
    if draft.chance(0.2):
        group = outputs = inputs
    draft.sums()
    size = [batch, inputs, *image(draft, kernel, attributes)]
    if draft.operator == "ConvInteger":
        x_type, w_type = draft.type_of("T1"), draft.type_of("T2")
        x, w = draft.tensor(size, x_type), draft.weight(draft.numbers([outputs, inputs // group, *kernel], w_type))
        zero = [draft.weight(draft.numbers([], x_type, "finite"))] if draft.chance(0.6) else []
        draft.finish(x, w, *zero, group=group, kernel_shape=draft.pick(None, kernel), **attributes)
        return
    dtype = draft.type_of("T", "float32", "float16")
    x = draft.tensor(size, dtype, draft.pick("plain", "sums"))
    shape = [outputs, inputs // group, *kernel]
    if draft.operator == "ConvTranspose":
        shape = [inputs, outputs // group, *kernel]
        if draft.chance(0.3) and "strides" in attributes:
            attributes["output_padding"] = [draft.whole(0, stride - 1) for stride in attributes["strides"]]
    w = draft.weight(draft.numbers(shape, dtype, "plain"))
    bias = [draft.weight(draft.numbers([outputs], dtype, "plain"))] if draft.chance(0.5) else []
    draft.finish(x, w, *bias, group=group, kernel_shape=draft.pick(None, kernel), **attributes)


@rule("MaxPool", "AveragePool", "LpPool")
def pooled(draft: Draft) -> None:
    """Windows that may begin or end beyond the image."""
    since = {"MaxPool": 10, "AveragePool": 19, "LpPool": 18}[draft.operator]
    kernel, attributes = window(draft, draft.pick(1, 2, 2, 2, 3), draft.opset >= since)
    if draft.opset >= {"MaxPool": 10, "AveragePool": 10, "LpPool": 18}[draft.operator]:
        attributes["ceil_mode"] = draft.pick(None, 0, 1)
    dtype = draft.type_of("T", "float32", "uint8", "int8", "float16")
    if draft.operator == "AveragePool":
        attributes["count_include_pad"] = draft.pick(None, 0, 1)
    if draft.operator == "LpPool":
        attributes["p"] = draft.pick(None, 1, 2, 3)
    size = [draft.whole(1, 2), draft.whole(1, 3), *image(draft, kernel, attributes)]
    draft.sums()
    outputs = draft.pick(1, 1, 2) if draft.operator == "MaxPool" else 1
    x = draft.tensor(size, dtype, draft.pick("plain", "ties", "sums"))
    draft.finish(x, outputs=outputs, kernel_shape=kernel, **attributes)


@rule("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def pooled_as_a_whole(draft: Draft) -> None:
    """All pixels of a channel."""
    shape = [draft.whole(1, 2), draft.whole(1, 3), *(draft.whole(1, 5) for _ in range(draft.whole(1, 3)))]
    draft.sums()
    p = draft.pick(None, 1, 3) if draft.operator == "GlobalLpPool" else None
    draft.finish(draft.tensor(shape, draft.type_of("T", "float32", "float16"), draft.pick("sums", "plain")), p=p)


@rule("Resize", "Upsample")
def resized(draft: Draft) -> None:
    """Larger and smaller, by scales or to sizes."""
    shape = [draft.whole(1, 2), draft.whole(1, 3), draft.whole(1, 6), draft.whole(1, 6)]
    if draft.chance(0.25):
        shape = shape[:1] + shape[2:]
    dtype = draft.type_of(
        "T" if draft.operator == "Upsample" or draft.opset < 11 else "T1",
        "float32",
        "float32",
        "uint8",
        "int8",
        "int32",
    )
    mode = (
        draft.pick("nearest", "linear")
        if draft.operator == "Upsample" or draft.opset < 11
        else draft.pick("nearest", "linear", "cubic")
    )
    scales = np.array(
        [1.0] * (len(shape) - 2) + [draft.pick(1, 2, 3, 0.5, 1.5, 0.7, 2.3) for _ in range(2)], np.float32
    )
    scales = np.maximum(scales, np.array([1.0 / size for size in shape], np.float32))
    if draft.operator == "Upsample":
        scales = np.maximum(scales, 1).astype(np.float32)
    x = draft.tensor(shape, dtype, draft.pick("plain", "finite") if mode != "nearest" else "")
    draft.sums(1e-4, 1e-5)
    if draft.operator == "Upsample" and draft.opset < 9:
        draft.finish(x, mode=mode, scales=scales.tolist())
        return
    if draft.operator == "Upsample" or draft.opset < 11:
        draft.finish(x, draft.weight(scales), mode=mode)
        return
    attributes: dict[str, Any] = {"mode": mode}
    modes = ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel", "tf_crop_and_resize"]
    modes += ["half_pixel_symmetric"] * (draft.opset >= 19)
    attributes["coordinate_transformation_mode"] = how = draft.pick(*modes)
    if mode == "nearest":
        attributes["nearest_mode"] = draft.pick(None, "floor", "ceil", "round_prefer_floor", "round_prefer_ceil")
    if mode == "cubic":
        attributes |= {"cubic_coeff_a": draft.pick(None, -0.5), "exclude_outside": draft.pick(None, 0, 1)}
    roi = ""
    if how == "tf_crop_and_resize":
        begins, ends = [0.0] * (len(shape) - 2) + [0.2, -0.1], [1.0] * (len(shape) - 2) + [0.9, 1.2]
        roi = draft.weight([*begins, *ends], "float32")
        attributes["extrapolation_value"] = draft.pick(None, 10.0)
    if draft.chance(0.5):
        draft.finish(x, roi, draft.weight(scales), **attributes)
        return
    sizes = [max(1, int(size * scale)) for size, scale in zip(shape, scales, strict=True)]
    empty = "" if draft.opset >= 13 else draft.given(np.zeros(0, np.float32), 1)
    if draft.opset < 13 and not roi:
        roi = draft.given(np.zeros(0, np.float32), 1)
    draft.finish(x, roi, empty, draft.weight(sizes, "int64"), **attributes)


@rule("GridSample")
def sampled(draft: Draft) -> None:
    """Pixels at any places."""
    batch, channels, height, width = draft.whole(1, 2), draft.whole(1, 2), draft.whole(1, 4), draft.whole(1, 4)
    x = draft.given(draft.numbers([batch, channels, height, width], "float32", "plain"))
    grid = draft.random.uniform(-1.4, 1.4, [batch, draft.whole(1, 3), draft.whole(1, 3), 2])
    modes = ("bilinear", "nearest", "bicubic") if draft.opset < 20 else ("linear", "nearest", "cubic")
    draft.sums()
    draft.finish(
        x,
        draft.given(grid, 0.3, "float32"),
        mode=draft.pick(*modes),
        align_corners=draft.pick(None, 0, 1),
        padding_mode=draft.pick(None, "zeros", "border", "reflection"),
    )


@rule("AffineGrid")
def grid(draft: Draft) -> None:
    """The places of an affine map."""
    size = [draft.whole(1, 2), 1, draft.whole(1, 4), draft.whole(1, 4)]
    theta = draft.given(draft.numbers([size[0], 2, 3], "float32", "plain"))
    draft.sums()
    draft.finish(theta, draft.weight(size, "int64"), align_corners=draft.pick(None, 0, 1))


@rule("CenterCropPad")
def cropped(draft: Draft) -> None:
    """The middle, or zeros around it."""
    shape = draft.shape(1, 3, empty=0)
    axes = sorted(draft.random.permutation(len(shape))[: draft.whole(1, len(shape))].tolist())
    wanted = [draft.whole(1, 6) for _ in axes]
    x = draft.tensor(shape, draft.type_of())
    draft.finish(x, draft.weight(wanted, "int64"), axes=axes)


@rule("Col2Im")
def from_columns(draft: Draft) -> None:
    """Blocks that add up to an image."""
    kernel = [draft.whole(1, 2), draft.whole(1, 2)]
    size = [draft.whole(2, 4), draft.whole(2, 4)]
    blocks = int(np.prod([n - k + 1 for n, k in zip(size, kernel, strict=True)]))
    x = draft.tensor([1, 2 * int(np.prod(kernel)), blocks], "float32", "plain")
    draft.sums()
    draft.finish(x, draft.weight(size, "int64"), draft.weight(kernel, "int64"))


@rule("RoiAlign")
def aligned(draft: Draft) -> None:
    """Regions of images."""
    batch = draft.whole(1, 2)
    x = draft.tensor([batch, draft.whole(1, 2), draft.whole(2, 6), draft.whole(2, 6)], "float32", "plain")
    count = draft.whole(1, 3)
    corners = np.sort(draft.random.uniform(-1, 7, [count, 2, 2]), 1).reshape(count, 4)
    rois = draft.given(corners, 0.3, "float32")
    which = draft.given(draft.random.integers(0, batch, count), 0.3, "int64")
    draft.sums()
    how = draft.pick(None, "half_pixel", "output_half_pixel") if draft.opset >= 16 else None
    draft.finish(
        x,
        rois,
        which,
        mode=draft.pick(None, "avg", "max"),
        output_height=draft.pick(None, 2),
        output_width=draft.pick(None, 3),
        sampling_ratio=draft.pick(None, 0, 2),
        spatial_scale=draft.pick(None, 0.5),
        coordinate_transformation_mode=how,
    )


@rule("NonMaxSuppression")
def selected(draft: Draft) -> None:
    """The best of boxes that overlap."""
    batch, count, classes = draft.whole(1, 2), draft.whole(1, 6), draft.whole(1, 2)
    boxes = draft.given(np.sort(draft.random.random([batch, count, 2, 2]), 2).reshape(batch, count, 4), 0, "float32")
    scores = draft.given(draft.random.random([batch, classes, count]), 0, "float32")
    most = [draft.weight([draft.whole(0, 4)], "int64"), draft.weight([0.4], "float32"), draft.weight([0.3], "float32")]
    draft.finish(boxes, scores, *most[: draft.whole(1, 3)], center_point_box=draft.pick(None, 0, 1))
