"""A tiny model whose kernels count what they execute and do what the request says: `tiny_model.c`.

It is made with gcc alone, and its tasks last as long as a request's first number says. So tests
know how long a request takes, whatever the machine.
"""

import functools
import hashlib
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from gangway.artifact.format import (
    BatchKernel,
    BufferRef,
    Layer,
    Manifest,
    MemorySpace,
    TargetSpec,
    TensorSpec,
    Version,
    staging_bytes,
)
from gangway.artifact.writer import ArtifactWriter

KERNELS = Path(__file__).with_suffix(".c")
TASKS = 24  # of a layer and a row
ORDERS = 16  # numbers of a row: task_ns, 1 + the task that hangs, 1 + the one that crashes, the layer of both


@dataclass(frozen=True)
class TinyModel:
    """Where the artifact lies, and what it consists of."""

    cache_dir: Path
    key: str
    layers: int
    tasks: int
    row_bytes: int  # of the arena, with what a batch of several requests needs


def make_artifact(
    cache_dir: Path,
    layers: int = 6,
    max_ranks: tuple[int, ...] = (64,),
    batch_rows: int = 0,
    row_ns: int = 0,
    key: str = "",
    checks: tuple[str, ...] = (),
    more_weights: int = 0,
) -> TinyModel:
    """Write the model. With `batch_rows` every other layer, the last one too, has a kernel for so many rows.

    `checks`: of the second layer, whose number n refuses orders[3] == -n.

    `more_weights`: bytes that nobody reads.

    Its counters are in the arena while several requests are executed together, and begin with what is there.
    """
    key = key or hashlib.sha256(f"{layers} {max_ranks} {batch_rows} {row_ns} {checks}".encode()).hexdigest()
    with ArtifactWriter(cache_dir / key) as writer:
        offsets = [writer.append_weights(struct.pack("<i", layer)) for layer in range(layers)]
        writer.append_weights(bytes(more_weights))
        writer.kernels_path.write_bytes(_kernels())
        row_bytes = layers * TASKS * 4
        manifest = Manifest(
            key=key,
            model_name="tiny",
            batched=True,
            inputs=(TensorSpec("orders", "INT32", (-1, ORDERS), 4 * ORDERS),),
            outputs=(TensorSpec("counters", "INT32", (-1, layers * TASKS), row_bytes),),
            layers=tuple(
                _layer(
                    i,
                    offsets[i],
                    max_ranks[i % len(max_ranks)],
                    batch_rows * ((layers - i) % 2),
                    row_ns,
                    checks if i == 1 else (),
                )
                for i in range(layers)
            ),
            arena_bytes=64,
            target=TargetSpec("baseline", "x86-64", 4, ()),
            files={},
        )
        writer.commit(manifest)
    return TinyModel(cache_dir, key, layers, TASKS, manifest.arena_bytes + staging_bytes(manifest))


@functools.cache
def _kernels() -> bytes:
    """Compile the library, which all models have in common."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernels.so"
        subprocess.run(["gcc", "-O1", "-shared", "-fPIC", str(KERNELS), "-o", str(library)], check=True)
        return library.read_bytes()


def _layer(
    number: int, weights_offset: int, max_ranks: int, batch_rows: int, row_ns: int, checks: tuple[str, ...] = ()
) -> Layer:
    arguments = (
        BufferRef(MemorySpace.INPUT, 0),
        BufferRef(MemorySpace.WEIGHTS, weights_offset),
        BufferRef(MemorySpace.ARENA, 0),
        BufferRef(MemorySpace.OUTPUT, number * TASKS * 4),
    )
    batch = BatchKernel("count_rows", batch_rows, TASKS, "counts") if batch_rows and not checks else None
    version = Version("count_checked" if checks else "count", TASKS, "counts", batch=batch)
    return Layer(f"layer{number}", "Count", "", arguments, (version,), 0, 0, max_ranks, row_ns, checks)


SERVED_LAYERS = 40  # so that a boundary is never far


def save_served(
    repository: Path, name: str, cache_dir: Path, config: str = "max_batch_size: 8", more_weights: int = 0
) -> None:
    """Write the model for `gangway serve`: an ONNX file, and in the cache what it is taken to be compiled to.

    Two cores work on a request of r rows for SERVED_LAYERS x TASKS x r / 2 times the length of a task, or longer.
    """
    from gangway.compiler.key import model_key
    from gangway.compiler.target import detect

    path = repository / name / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    info, kind = helper.make_tensor_value_info, TensorProto.INT32
    x, y = info("orders", kind, ["N", ORDERS]), info("counters", kind, ["N", SERVED_LAYERS * TASKS])
    graph = helper.make_graph([helper.make_node("Tile", ["orders", "repeats"], ["counters"])], name, [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    (repository / name / "config.pbtxt").write_text(config)
    make_artifact(cache_dir, SERVED_LAYERS, max_ranks=(2,), key=model_key(path, detect()), more_weights=more_weights)


def orders_of(rows: int = 1, task_us: float = 0) -> "np.ndarray[tuple[int, ...], np.dtype[np.int32]]":
    """Return the input of a request whose tasks last so long."""
    orders = np.zeros((rows, ORDERS), np.int32)
    orders[:, 0] = int(task_us * 1000)
    return orders


def least_s(task_us: float, rows: int = 1) -> float:
    """Return how long a served request takes at least."""
    return SERVED_LAYERS * TASKS * rows * task_us / 2e6
