"""How long a further size of a model with symbolic dimensions takes to compile, and what it adds to the cache.

Each size is compiled as a server does it: in the process that is kept for sizes, at the lowest priority. Times do not
include the load by workers, which takes milliseconds. The models are files that packages on PyPI ship, if
REALMODELS_CACHE names their folder, else a small convolutional network.
"""

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from gangway.server.control.repository.compile_jobs import IDLE_SECONDS, Compiler, CompileRequest

SIZES = 30
CHANNELS = (3, 32, 64, 128)
MEDIAN_S, TOTAL_S, DISK_RATIO = 1.0, 30.0, 1.2  # what is wanted


@dataclass(frozen=True)
class Case:
    """A model, the sizes that stay, the dimension that varies, and its smallest and largest size."""

    name: str
    path: Path
    fixed: Mapping[str, int]
    dimension: str
    smallest: int
    largest: int

    def sizes(self) -> list[int]:
        """SIZES different ones in a random order, the same in each run."""
        everything = np.arange(self.smallest, self.largest + 1)
        return [int(size) for size in np.random.default_rng(0).choice(everything, SIZES, replace=False)]


def real_cases() -> list[Case]:
    """The models in the folder that REALMODELS_CACHE names."""
    folder = Path(os.environ.get("REALMODELS_CACHE", "")) / "files"
    cases = [
        Case(
            "ppocr_rec",
            folder / "48fc40f24f6d2a207a2b1091d3437eb3cc3eb6b676dc3ef9c37384005483683b.onnx",
            {"x.2": 48},
            "x.3",
            160,
            1200,
        ),
        Case(
            "minilm_l3",
            folder / "b388816f4fe4beccf2106589a786544596eb1385cac0c57c6a4e2a6758215b16.onnx",
            {},
            "sequence_length",
            5,
            512,
        ),
    ]
    return [case for case in cases if case.path.is_file()]


def synthetic_case(folder: Path) -> Case:
    """Convolutions over images of any width."""
    random, nodes, constants, name = np.random.default_rng(0), [], [], "x"
    for index, (inputs, outputs) in enumerate(pairwise(CHANNELS)):
        weights = random.standard_normal((outputs, inputs, 3, 3)).astype(np.float32)
        constants.append(numpy_helper.from_array(weights, f"w{index}"))
        nodes.append(helper.make_node("Conv", [name, f"w{index}"], [f"c{index}"], pads=[1, 1, 1, 1], strides=[2, 1]))
        nodes.append(helper.make_node("Relu", [f"c{index}"], [f"r{index}"]))
        name = f"r{index}"
    nodes.append(helper.make_node("Softmax", [name], ["y"], axis=-1))
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["N", 3, 48, "W"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "widths", [x], [y], constants)
    path = folder / "widths.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return Case("widths", path, {}, "W", 160, 1200)


def disk_bytes(folder: Path) -> int:
    """What a folder takes on the disk; links to a file count once."""
    statuses = [path.lstat() for path in folder.rglob("*")]
    return sum({status.st_ino: status.st_blocks * 512 for status in statuses}.values())


async def measure(case: Case, folder: Path) -> None:
    """Compile all sizes of a case, one after the other, and print a line for each and their sums."""
    folder.mkdir()
    compiler = Compiler(folder, idle_seconds=IDLE_SECONDS)
    seconds, first_bytes = [], 0
    for size in case.sizes():
        begin = time.monotonic()
        manifest = await compiler.compile(CompileRequest(case.name, case.path, {**case.fixed, case.dimension: size}))
        seconds.append(time.monotonic() - begin)
        first_bytes = first_bytes or disk_bytes(folder)
        kernels_ms = manifest.phase_us["kernels"] / 1e3
        print(f"{case.name:10} {size:5} {seconds[-1]:6.2f} s, kernels {kernels_ms:6.0f} ms", flush=True)
    compiler.stop()
    further = seconds[1:]
    total_bytes = disk_bytes(folder)
    print(
        f"{case.name}: first {seconds[0]:.2f} s; a further size {statistics.median(further):.2f} s (p50, wanted"
        f" {MEDIAN_S:g}), {max(further):.2f} s at most; {SIZES} sizes {sum(seconds):.1f} s (wanted {TOTAL_S:g}); disk"
        f" {total_bytes / 1e6:.1f} MB, {total_bytes / first_bytes:.2f} of one size (wanted {DISK_RATIO:g})",
        flush=True,
    )


async def main() -> None:
    """Measure all cases."""
    with tempfile.TemporaryDirectory() as folder:
        for case in real_cases() or [synthetic_case(Path(folder))]:
            await measure(case, Path(folder) / case.name)


if __name__ == "__main__":
    asyncio.run(main())
