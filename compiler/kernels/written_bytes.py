"""How many bytes the kernel of each spec writes for one row: they must be all bytes of its output."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from gangway.compiler.kernels import int8_specs as int8
from gangway.compiler.kernels import plain_specs as plain
from gangway.compiler.kernels import specs
from gangway.compiler.kernels.attention_specs import AttentionSpec
from gangway.compiler.kernels.packed_specs import PackedDenseSpec

_FLOAT = 4


def written_bytes(spec: specs.KernelSpec) -> int | None:
    """Return the bytes of the (last) output, without halos and surplus channels.

    Activations that are stored in bfloat16 count as float32. None: where the spec was made, outputs were compared.
    """
    return _RULES[type(spec)](spec)


def _item_bytes(dtype: str) -> int:
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def _image(spec: Any) -> int:
    return _FLOAT * int(spec.channels * spec.height * spec.width)


def _window(spec: specs.PoolSpec | specs.ResizeSpec) -> int:
    return _FLOAT * spec.channels * math.prod(spec.output_size)


def _convolved(spec: specs.ConvSpec | specs.ConvTransposeSpec) -> int:
    return _FLOAT * spec.out_channels * math.prod(spec.output_size)


def _reduced(spec: plain.ReduceSpec) -> int:
    kept = (n for n, is_reduced in zip(spec.shape, spec.reduced, strict=True) if not is_reduced)
    is_place = spec.operator.endswith(("argmax", "argmin"))
    return _item_bytes("int64" if is_place else spec.dtype) * math.prod(kept)


def _not_told(spec: specs.KernelSpec) -> None:
    return None


_RULES: dict[type[specs.KernelSpec], Callable[[Any], int | None]] = {
    specs.ConvSpec: _convolved,
    specs.ConvDepthwiseSpec: lambda spec: _convolved(spec.depthwise),
    specs.ConvTransposeSpec: _convolved,
    specs.PoolSpec: _window,
    specs.GlobalPoolSpec: lambda spec: _FLOAT * spec.channels,
    specs.ResizeSpec: _window,
    specs.VolumePadSpec: lambda spec: _FLOAT * spec.channels * spec.depth * math.prod(spec.padded),
    specs.VolumeConvSpec: lambda spec: _convolved(spec.conv) * spec.depth.output,
    specs.VolumePoolSpec: lambda spec: _window(spec.pool) * spec.depth.output,
    specs.ElementwiseSpec: lambda spec: _FLOAT * spec.elements,
    **dict.fromkeys((specs.BlockedElementwiseSpec, specs.PackSpec, specs.UnpackSpec), _image),
    specs.SequencePackSpec: lambda spec: _FLOAT * spec.positions * spec.channels,
    specs.LayerNormSpec: lambda spec: _FLOAT * spec.channels * spec.positions,
    AttentionSpec: lambda spec: _FLOAT * spec.windows * spec.heads * spec.value_channels * spec.queries,
    specs.RecurrentSpec: _not_told,  # its outputs are parts of ONNX's, whose shapes follow from the same attributes
    PackedDenseSpec: lambda spec: _FLOAT * spec.positions * spec.out_channels,
    plain.PointwiseSpec: lambda spec: _item_bytes(spec.program[-1].dtype) * math.prod(spec.shape),
    plain.ReduceSpec: _reduced,
    plain.PlainPoolSpec: lambda spec: _FLOAT * spec.output_elements,
    plain.SoftmaxSpec: lambda spec: _FLOAT * spec.rows * spec.columns * spec.inner,
    plain.MatMulSpec: lambda spec: _FLOAT * math.prod(spec.batch_shape) * spec.rows * spec.columns,
    plain.CopySpec: lambda spec: _item_bytes(spec.dtype) * math.prod(spec.shape),
    plain.RemapSpec: lambda spec: _item_bytes(spec.dtype) * math.prod(spec.outer) * spec.length,
    plain.GatherSpec: lambda spec: spec.item_bytes * spec.outer * spec.count * spec.inner,
    plain.GatherPlacesSpec: lambda spec: spec.item_bytes * math.prod(spec.shape),
    plain.ScatterSpec: lambda spec: _item_bytes(spec.dtype) * spec.elements,
    plain.GridSampleSpec: lambda spec: _FLOAT * spec.images * spec.channels * spec.points,
    plain.TopSpec: lambda spec: _item_bytes(spec.dtype) * spec.rows * spec.count,
    plain.TreeSpec: lambda spec: _item_bytes(spec.dtype) * spec.rows * spec.groups * spec.targets,
    plain.TensorProgramSpec: _not_told,  # see `lower/relax.py`
    plain.ZerosSpec: _not_told,  # memory that no tensor has
    plain.IslandSpec: _not_told,  # see `lower/islands.py`
    plain.TailSpec: _not_told,
    **dict.fromkeys(  # made of others, which have been compared
        (
            int8.Int8TableSpec,
            int8.Int8HaloSpec,
            int8.Int8RangeSpec,
            int8.Int8FactorsSpec,
            int8.Int8QuantiseSpec,
        ),
        _not_told,
    ),
}
