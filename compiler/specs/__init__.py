"""What a kernel must compute, as data: the contract between the graph half of the compiler and the kernel templates.

The graph half (import, fusion, layout, arena) turns a model into specs; `templates/` turns each distinct spec into
code. Nothing here imports TVM.
"""

from gangway.compiler.specs.base import (
    MOST_LANES,
    Array,
    BatchPlan,
    Check,
    KernelPlan,
    KernelSpec,
    PackedWeights,
    RawWeights,
)
from gangway.compiler.specs.conv_depthwise import ConvDepthwiseSpec
from gangway.compiler.specs.images import (
    BlockedElementwiseSpec,
    ConvSpec,
    CopySpec,
    ElementwiseOperator,
    ElementwiseSpec,
    GlobalPoolSpec,
    PackSpec,
    PoolSpec,
    SoftmaxSpec,
    UnpackSpec,
    window_output,
)
from gangway.compiler.specs.plain import ReduceSpec, RemapSpec, Segment
from gangway.compiler.specs.pointwise import (
    ELEMENT_TYPES,
    FLOATS,
    MOST_OPERANDS,
    Instruction,
    Operand,
    PointwiseSpec,
    broadcast_strides,
    contiguous,
)
from gangway.compiler.specs.scatter import GatherPlacesSpec, Picked, ScatterReduction, ScatterSpec
from gangway.compiler.specs.sequences import (
    AttentionSpec,
    GatherSpec,
    LayerNormSpec,
    MatMulSpec,
    ScoreBias,
    SequencePackSpec,
)
from gangway.compiler.specs.tensor_program import Role, TensorProgramSpec

__all__ = [
    "ELEMENT_TYPES",
    "FLOATS",
    "MOST_LANES",
    "MOST_OPERANDS",
    "Array",
    "AttentionSpec",
    "BatchPlan",
    "BlockedElementwiseSpec",
    "Check",
    "ConvDepthwiseSpec",
    "ConvSpec",
    "CopySpec",
    "ElementwiseOperator",
    "ElementwiseSpec",
    "GatherPlacesSpec",
    "GatherSpec",
    "GlobalPoolSpec",
    "Instruction",
    "KernelPlan",
    "KernelSpec",
    "LayerNormSpec",
    "MatMulSpec",
    "Operand",
    "PackSpec",
    "PackedWeights",
    "Picked",
    "PointwiseSpec",
    "PoolSpec",
    "RawWeights",
    "ReduceSpec",
    "RemapSpec",
    "Role",
    "ScatterReduction",
    "ScatterSpec",
    "ScoreBias",
    "Segment",
    "SequencePackSpec",
    "SoftmaxSpec",
    "TensorProgramSpec",
    "UnpackSpec",
    "broadcast_strides",
    "contiguous",
    "window_output",
]
