"""What TVM's own search is given is what our template computes."""

import numpy as np
import pytest
import tvm

from benchmarks.papers.metaschedule import packed_convolution, searchable
from gangway.compiler.kernels.specs import ConvSpec

LANES = 16


@pytest.mark.parametrize(
    "spec",
    [
        ConvSpec(32, 9, 7, 16, (3, 3), (2, 1), (1, 1, 1, 1), input_halo=2),
        ConvSpec(16, 8, 8, 32, (3, 3), pads=(2, 2, 2, 2), dilation=(2, 2), input_halo=2),
        ConvSpec(48, 1, 5, 32),
    ],
)
def test_packed_convolution(spec: ConvSpec) -> None:
    assert searchable(spec)
    rng = np.random.default_rng(5)
    shape, halo = (spec.in_channels // LANES, spec.height, spec.width, LANES), spec.input_halo
    x = np.pad(rng.standard_normal(shape, np.float32), ((0, 0), (halo, halo), (halo, halo), (0, 0)))
    blocks = (spec.out_channels // LANES, spec.in_channels // LANES)
    weights = rng.standard_normal((*blocks, *spec.kernel, LANES, LANES), np.float32)
    expected = np.zeros((blocks[0], *spec.output_size, LANES))
    for row, column in np.ndindex(*spec.output_size):
        for kh, kw in np.ndindex(*spec.kernel):
            h = row * spec.stride[0] + kh * spec.dilation[0] + halo - spec.pads[0]
            w = column * spec.stride[1] + kw * spec.dilation[1] + halo - spec.pads[1]
            expected[:, row, column] += np.einsum("bi,obin->on", x[:, h, w], weights[:, :, kh, kw])
    y = tvm.runtime.tensor(np.zeros(expected.shape, np.float32))
    function = tvm.tirx.build(packed_convolution(spec, LANES).with_attr("global_symbol", "main"), target="llvm")["main"]
    function(tvm.runtime.tensor(x), tvm.runtime.tensor(weights), y)
    np.testing.assert_allclose(y.numpy(), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_what_is_not_searched() -> None:
    assert not searchable(ConvSpec(32, 9, 9, 32, (3, 3), pads=(1, 1, 1, 1), groups=32, input_halo=1))
    assert not searchable(ConvSpec(3, 9, 9, 32, (3, 3), pads=(1, 1, 1, 1), input_layout="planar", input_halo=1))
