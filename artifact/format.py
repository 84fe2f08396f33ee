"""The schema of a compiled model. `docs/explanation/artifact.md` documents the files.

An artifact is a folder: `manifest.json` (this schema), `weights.bin` (packed, 64-byte aligned, mapped read-only by
every worker: one copy in the machine) and `kernels.so` (plain C functions, no TVM runtime). A model that cannot be
compiled has its ONNX file there instead, for onnxruntime.

A *row* is one item along the batch axis. Every size, task count and offset below is for one row; the executor runs a
batch as `rows x tasks` tasks over the same kernels, with the bases of arena, inputs and outputs moved on by one row's
stride: `arena_bytes`, and `row_bytes` of the tensor. So weights and whole arena tensors are 64-byte aligned in each
row; parts of concatenated tensors, inputs and outputs are aligned only to the size of their numbers. A version may have
a second kernel, for several rows in one call.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from itertools import cycle, islice
from typing import Literal

import msgspec

from gangway.artifact.instances import SizeInstances

FORMAT_VERSION = 12
Precision = Literal["fp32", "bf16"]
ALIGNMENT_BYTES = 64
ANY_TEXT = "0"  # which most models can read

MANIFEST_FILE = "manifest.json"
WEIGHTS_FILE = "weights.bin"
KERNELS_FILE = "kernels.so"
LIBRARY_PREFIX = "kernels_"  # of the names of further libraries, which KERNELS_FILE needs
ONNX_FOLDER = "onnx"  # the ONNX file, and files with its external data at the places it names
ONNX_FILE = "onnx/model.onnx"
OPTIMISED_ONNX_FILE = "onnx/optimised.onnx"  # in place of that: as onnxruntime executes it on the target
ISLAND_SUFFIX = ".onnx"  # of files with layers that onnxruntime computes

# Of a weight that stands beside an ONNX file: onnxruntime maps each, and a process can have some 65,000 mappings.
LEAST_MAPPED_BYTES = 16 << 10
MAX_ARGUMENTS = 8  # pointers of one kernel
MAX_OPERANDS = 32  # and of one island
MAX_TENSORS = 1024  # inputs, and outputs, of one model
MAX_CHECKS = 8  # of one layer
MAX_LAYERS = 4096
PLAUSIBLE_SIZES = (8, 32, 64, 224, 16, 1, 128, 512, 640)  # of symbolic dimensions, to try a model with, in this order,
MOST_PLAUSIBLE_ELEMENTS = 1 << 22  # but no more in an input: a trial shall not take all memory
MAX_TASKS = 1 << 22  # of one layer, all rows together

STAND_IN = "its kernels are being compiled"  # the reason of an artifact that serves in the place of another meanwhile

# Sizes of Triton's datatypes. Without numpy, which datatypes.py imports: a front end starts sooner without it.
ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("BOOL", "UINT8", "INT8"), 1),
    **dict.fromkeys(("UINT16", "INT16", "FP16", "BF16"), 2),
    **dict.fromkeys(("UINT32", "INT32", "FP32"), 4),
    **dict.fromkeys(("UINT64", "INT64", "FP64"), 8),
    "BYTES": 0,  # any
}


class Engine(StrEnum):
    """What executes a model."""

    NATIVE = "native"  # kernels.so, layer by layer, by gangs; onnxruntime for layers that are islands
    ONNXRUNTIME = "onnxruntime"  # the ONNX file as a whole, one call for all rows
    PYTHON = "python"  # model.py, in processes of its own; the artifact describes its tensors


class MemorySpace(IntEnum):
    """Which memory a kernel's argument lies in."""

    WEIGHTS = 0  # weights.bin; the same for every row
    ARENA = 1  # activations of one running query, one stretch of `arena_bytes` per row
    INPUT = 2  # a request's input tensor, `index` says which
    OUTPUT = 3  # a request's output tensor, `index` says which


class BufferRef(msgspec.Struct, frozen=True):
    """Where a kernel's argument begins: byte `offset_bytes` of a space; `index` is 0 for weights and arena."""

    space: MemorySpace
    offset_bytes: int
    index: int = 0


@dataclass(frozen=True)
class TensorSpec:
    """One input or output. `shape` is the model's own, -1 where the batch goes.

    Of compiled models only the first dimension may be -1; any may be of outputs of a tail, and of models for
    onnxruntime. `symbols` has a name for each dimension, empty for the fixed ones: dimensions of one name are equal in
    every request. Compiled outputs have none.
    """

    name: str
    datatype: str  # Triton's names: FP32, INT32, ...
    shape: tuple[int, ...]
    row_bytes: int  # 0 if it depends on the request or its answer: strings, dimensions other than the batch, a tail
    symbols: tuple[str, ...] = ()
    optional: bool = False  # a request may leave it out; only for onnxruntime, which has a value for it
    # What its one integer is called, if that decides which shapes or branches a model for onnxruntime computes: the
    # model is compiled for each value, as for sizes. Empty: it decides nothing.
    value_symbol: str = ""
    classes: tuple[str, ...] = ()  # what the columns of an output's scores are called, if its ZipMap says it
    # For trials: some texts of each column of an input that refuses texts which it does not know. None: any will do.
    example_texts: tuple[tuple[str, ...], ...] = ()


def open_symbols(inputs: Sequence[TensorSpec], batched: bool) -> tuple[str, ...]:
    """Return the names of the inputs' dimensions that are neither fixed nor the batch, and of values that decide."""
    names = [name for spec in inputs for name in (*spec.symbols[batched:], spec.value_symbol) if name]
    return tuple(dict.fromkeys(names))


def trial_texts(columns: Sequence[Sequence[str]], count: int) -> list[str]:
    """Return texts to try an input with: the first of each column of its `example_texts`, or ANY_TEXT, in turn."""
    return list(islice(cycle([column[0] for column in columns] or [ANY_TEXT]), count))


class BatchKernel(msgspec.Struct, frozen=True):
    """A kernel that computes 1 to `rows` rows in one call, for two rows and more.

    `symbol` is a C function `void symbol(void *arg0, ..., void *argN, const int64_t *batch, int32_t begin, int32_t
    end)` that computes tasks [begin, end), out of `tasks`, for `batch[0]` rows. `batch[1 + i]` is how many bytes lie
    between argument i of one row and that of the next (weights: 0).
    """

    symbol: str
    rows: int
    tasks: int
    description: str


@dataclass(frozen=True)
class Version:
    """One compiled implementation of a layer (VELTAIR's term). All versions take the same arguments and layouts.

    `symbol` is a C function `void symbol(void *arg0, ..., void *argN, int32_t begin, int32_t end)` that computes the
    tasks [begin, end) of one row. Tasks are independent of each other and may run in any order, on any core.
    """

    symbol: str
    tasks: int
    description: str  # template and knobs, for people: "conv 14x2 rows=7"
    blocking_bytes: int = 0  # bytes one tile works on (locality)
    parallelism: int = 0  # tasks x unrolled accumulators
    batch: BatchKernel | None = None  # what computes two rows and more; None: the same, row by row


@dataclass(frozen=True)
class Layer:
    """One fused operator. Layers run in manifest order; one starts when all tasks of the one before have ended."""

    name: str
    operator: str  # "Conv+Add+Relu"
    shape: str  # for people: "64x56x56 -> 256x56x56 k1 s1"
    arguments: tuple[BufferRef, ...]
    versions: tuple[Version, ...]  # the first is the default; between one and five
    flops: int
    bytes: int  # compulsory traffic: inputs + weights + outputs
    max_ranks: int  # more ranks than this make one row slower
    row_ns: int = 0  # what each further row of a batch takes about; so a batch may be worth more ranks
    # What kernels refuse to compute with, as texts for clients; the first {} stands for the number. If there are any,
    # the kernels have one argument more, behind all others, `int64_t *refused`: two words that they set when they meet
    # such a number, to the check that it fails, from 1 on, and to itself. What they compute then is of no use.
    checks: tuple[str, ...] = ()
    # Of an island: the file of the artifact with which onnxruntime computes the layer, row by row. The arguments are
    # the file's inputs and outputs, plain, in their order. There is one version of one task, without a kernel, and
    # `max_ranks` is how many threads are useful. A tail's arguments are the inputs only, and its one task is all rows.
    onnx_file: str = ""
    # Numbers too small for the type's full precision count as zero, in what is read and in what is stored.
    flushes_subnormals: bool = False


@dataclass(frozen=True)
class TargetSpec:
    """The machine the kernels were built for. An artifact is used only where all features and extensions are."""

    name: str  # "avx512", "avx2" or "baseline"
    cpu: str  # LLVM's name, "znver4"
    lanes: int  # float32 values in a vector register
    features: tuple[str, ...]  # /proc/cpuinfo names that must be there
    extensions: tuple[str, ...] = ()  # the same of what only kernels of low precision need; sorted


class FileSpec(msgspec.Struct, frozen=True):
    """Size of a file that lies beside the manifest, and its checksum (see `files.py`)."""

    size_bytes: int
    checksum: str


@dataclass(frozen=True)
class Manifest:
    """One compiled model."""

    key: str  # 64 hex digits: model bytes, compiler version and target decide it
    model_name: str
    batched: bool  # the first dimension of every input and output is a symbolic batch, or (onnxruntime) may be one
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    layers: tuple[Layer, ...]
    arena_bytes: int  # of one row; must be all zero before the first query, kernels keep the halos zero after that
    target: TargetSpec
    files: dict[str, FileSpec]
    engine: Engine = Engine.NATIVE
    fallback_reason: str = ""  # why it was not compiled; empty unless the engine is onnxruntime
    mixes_rows: str = ""  # how rows of a batch influence each other, if the compiler has found that they do
    apart_rows: bool = False  # of onnxruntime: rows do not influence each other if all inputs have as many
    fixed_rows: bool = False  # not compiled for any number of rows, but can be for each one
    trial_sizes: dict[str, int] = field(default_factory=dict)  # of symbols, with which onnxruntime could run the model
    phase_us: dict[str, int] = field(default_factory=dict)  # how long each phase of the compilation took
    pass_layers: int = 0  # so many layers a batch computes pass by pass (compiler/place/costs.py)
    pass_rows: int = 1  # of a pass, for each core
    parameters: int = 0  # numbers of the model's weights
    # The last layer is an island that makes all outputs, of sizes that are known only then: the answer is a frame
    # (executor/frames.py), as that of a model for onnxruntime is.
    tail: bool = False
    slow_nodes: tuple[str, ...] = ()  # first outputs of nodes that are in islands since their kernels were slower
    session_bytes: int = 0  # of memory beside mapped weights for a session of onnxruntime, of each island one
    compiler_version: str = ""
    precision: Precision = "fp32"  # the lowest of products; activations are float32
    keep_fp32: tuple[str, ...] = ()  # names of layers that were to stay float32, sorted
    difference: str = ""  # how answers differ from onnxruntime's, for people; empty if they agree or it is not known
    integers: str = ""  # what multiplies 8-bit numbers, for people; empty if the model has none
    instances: SizeInstances | None = None  # other sizes for which the layers are the same
    precision_note: str = ""  # how answers agree with those in fp32, or why it is in fp32: of a job, not of the file
    format_version: int = FORMAT_VERSION

    @property
    def islands(self) -> tuple[Layer, ...]:
        """The layers of a compiled model that onnxruntime computes."""
        return tuple(layer for layer in self.layers if layer.onnx_file)

    @property
    def is_whole(self) -> bool:
        """Whether it is one task, of which only who executes it knows more."""
        return self.engine is not Engine.NATIVE

    @property
    def is_stand_in(self) -> bool:
        """Whether onnxruntime executes it until the compiled artifact takes its place; rows are apart if it says so."""
        return self.engine is Engine.ONNXRUNTIME and self.fallback_reason == STAND_IN

    @property
    def is_compilable(self) -> bool:
        """Whether kernels compute it, or will."""
        return self.engine is Engine.NATIVE or self.is_stand_in

    @property
    def is_optimised(self) -> bool:
        """Whether onnxruntime has optimised the ONNX file that it executes as a whole."""
        return OPTIMISED_ONNX_FILE in self.files

    @property
    def whole_file(self) -> str:
        """The ONNX file that onnxruntime executes as a whole."""
        return OPTIMISED_ONNX_FILE if self.is_optimised else ONNX_FILE

    @property
    def weights_bytes(self) -> int:
        """Size of the weights that all workers map, one copy in the machine."""
        if self.engine is Engine.NATIVE:
            return self.files[WEIGHTS_FILE].size_bytes
        return sum(file.size_bytes for name, file in self.files.items() if name != self.whole_file)


class Staging(msgspec.Struct, frozen=True):
    """Places for inputs and outputs in the arena, by number of the input or output: bytes from the start of a row.

    A batch kernel computes several rows in one call, and there is one stride between them. Rows of different requests
    have none. So the tensors that batch kernels read or write are copied to these places before the first layer, and
    from there to the requests after the last one. `size_bytes` are what a row has behind its arena for them.
    """

    inputs: Mapping[int, int]
    outputs: Mapping[int, int]
    size_bytes: int


def align_up(size_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES) -> int:
    """Return the least multiple of the alignment that is no smaller."""
    return -(-size_bytes // alignment_bytes) * alignment_bytes


def plan_staging(manifest: Manifest) -> Staging:
    """Give each tensor that a batch kernel uses a place, aligned to 64 bytes; none if the model takes no batches."""
    used = _used_by_batch_kernels(manifest) if manifest.batched else set()
    end = manifest.arena_bytes
    places: dict[MemorySpace, dict[int, int]] = {MemorySpace.INPUT: {}, MemorySpace.OUTPUT: {}}
    for space, index in sorted(used):
        places[space][index] = end
        end += align_up(_tensor(manifest, space, index).row_bytes)
    return Staging(places[MemorySpace.INPUT], places[MemorySpace.OUTPUT], end - manifest.arena_bytes)


def staging_bytes(manifest: Manifest) -> int:
    """Return how many bytes more than `arena_bytes` a row takes where several requests are executed together."""
    return plan_staging(manifest).size_bytes


def _used_by_batch_kernels(manifest: Manifest) -> set[tuple[MemorySpace, int]]:
    return {
        (argument.space, argument.index)
        for layer in manifest.layers
        if any(version.batch for version in layer.versions)
        for argument in layer.arguments
        if argument.space in (MemorySpace.INPUT, MemorySpace.OUTPUT)
    }


def _tensor(manifest: Manifest, space: MemorySpace, index: int) -> TensorSpec:
    return (manifest.inputs if space is MemorySpace.INPUT else manifest.outputs)[index]
